"""KV copied to host memory and back: in the order of the plan, and without a trace in the answers of a real model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from minibatcher import Engine, SamplingParams  # noqa: E402
from minibatcher.model.loader import load_model  # noqa: E402
from minibatcher.request import Request  # noqa: E402
from minibatcher.runners.swap import HostPool  # noqa: E402
from minibatcher.scheduling import Swap  # noqa: E402


def pool(num_blocks: int, layers: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Blocks of 3 tokens, 2 heads of 4 numbers; block b of layer l holds the numbers b + 100 l, values negative."""
    keys = [torch.arange(num_blocks).float()[:, None, None, None].expand(-1, 3, 2, 4) + 100 * n for n in range(layers)]
    return [(k.clone(), -k.clone()) for k in keys]


def held(caches, blocks: list[int]) -> list[list[float]]:
    for k, v in caches:
        assert torch.equal(k[blocks], -v[blocks])
        assert torch.equal(k[blocks], k[blocks][:, :1, :1, :1].expand_as(k[blocks]))
    return [k[blocks, 0, 0, 0].tolist() for k, _ in caches]


def test_copies_are_made_in_the_order_of_the_plan():
    """One leaves, another takes its blocks on the device; one comes back, another takes its blocks on the host."""
    device, a, b = pool(5), Request("a", [1]), Request("b", [1])
    host = HostPool(device, 3)
    host.copy(device, [Swap(a, True, [4, 1], [0, 2])])
    assert held(device, [0, 1, 2, 3, 4]) == [[0, 1, 2, 3, 4], [100, 101, 102, 103, 104]]
    assert held(host.layers, [0, 2]) == [[4, 1], [104, 101]]
    host.copy(device, [Swap(b, True, [3], [1]), Swap(a, False, [2, 3], [0, 2]), Swap(b, True, [0], [0])])
    assert held(device, [0, 1, 2, 3, 4]) == [[0, 1, 4, 1, 4], [100, 101, 104, 101, 104]]
    assert held(host.layers, [0, 1, 2]) == [[0, 3, 1], [100, 103, 101]]


@pytest.fixture(scope="module")
def bard():
    return load_model("bard", dtype="float32")


@pytest.mark.parametrize("strategy", ["continuous", "chunked"])
@pytest.mark.parametrize("plan_ahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("swap_tokens", [None, 24])
def test_greedy_answers_equal_the_solo_run(bard, strategy, plan_ahead, caching, swap_tokens):
    generator = torch.Generator().manual_seed(11)
    head = torch.randint(3, bard.config.vocab_size, (21,), generator=generator).tolist()
    lengths = [3, 17, 9, 1, 21, 6]

    def requests() -> list[Request]:
        params = [SamplingParams(max_tokens=24 - 2 * i, ignore_eos=True) for i in range(6)]
        return [Request(f"r{i}", [*head[:n], 40 + i], p) for i, (n, p) in enumerate(zip(lengths, params))]

    alone, todo = requests(), requests()
    Engine.from_model(bard, strategy="solo", max_model_len=64).run(alone)
    engine = Engine.from_model(
        bard,
        strategy=strategy,
        max_model_len=64,
        plan_ahead=plan_ahead,
        enable_prefix_caching=caching,
        preemption="swap",
        swap_tokens=swap_tokens,
        block_size=4,
        kv_cache_tokens=72,
        max_num_batched_tokens=40,
    )
    swaps, launch = [], engine.runner.launch
    engine.runner.launch = lambda plan: swaps.extend(plan.swaps) or launch(plan)
    engine.run(todo)
    assert [r.output_token_ids for r in todo] == [r.output_token_ids for r in alone]
    assert sum(s.out for s in swaps) == sum(not s.out for s in swaps) > 0
    if swap_tokens is None and not caching:  # what is shared on the device is not on the host, and may not fit there
        assert sum(r.num_lost_tokens for r in todo) == 0
    if swap_tokens is not None:
        assert sum(r.num_lost_tokens for r in todo) > 0
    engine.scheduler.kv.check()
    engine.scheduler.host.check()
    assert engine.scheduler.kv.num_used_blocks == engine.scheduler.host.num_used_blocks == 0
