"""What the engine does on a GPU, as far as it can be seen without one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fakes import fake_engine  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from minibatcher import Engine, SamplingParams  # noqa: E402
from minibatcher.attention import RaggedBatch, choose_attention, reference, sdpa, store_kv  # noqa: E402
from minibatcher.attention.choose import AttentionBackend  # noqa: E402
from minibatcher.build import _check_graphs, assemble_engine  # noqa: E402
from minibatcher.compare import warm_up  # noqa: E402
from minibatcher.errors import DeviceError, InvalidParameter  # noqa: E402
from minibatcher.kv import BlockKV, SlotKV  # noqa: E402
from minibatcher.memory import _sample_from, gpu_pool_bytes, kv_pool_bytes  # noqa: E402
from minibatcher.model.loader import LoadedModel, empty_model, load_model  # noqa: E402
from minibatcher.model.logprobs import most_probable  # noqa: E402
from minibatcher.request import Request  # noqa: E402
from minibatcher.runners.graphs import DecodeGraphs, graph_sizes  # noqa: E402
from minibatcher.runners.packed import TableArrays  # noqa: E402
from minibatcher.runners.padded import PaddedRunner  # noqa: E402
from minibatcher.runners.ragged import RaggedRunner  # noqa: E402
from minibatcher.scheduling.plan import StepPlan  # noqa: E402
from minibatcher.transfer import to_device  # noqa: E402

META = torch.device("meta")  # has shapes and no data: whatever waits for a result fails there


@pytest.fixture(scope="module")
def bard():
    return load_model("bard", dtype="float32")


def test_arrays_arrive_as_they_were_in_one_piece():
    arrays = [
        np.arange(5),
        np.array([[1.5], [2.5], [3.5]]),
        np.zeros((0,), dtype=np.int64),
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
        np.array([7], dtype=np.float32),
    ]

    class Elsewhere(TorchFunctionMode):
        """A "GPU" whose copies are counted, and land on the CPU."""

        copies = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.to:
                Elsewhere.copies += 1
                return args[0].clone()
            return func(*args, **(kwargs or {}))

    with Elsewhere():
        tensors = to_device(arrays, META)
    assert Elsewhere.copies == 1
    for array, tensor in zip(arrays, tensors):
        assert tensor.shape == array.shape and np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert tensor.numel() == 0 or tensor.data_ptr() % 16 == tensors[0].data_ptr() % 16


class HostData(TorchFunctionMode):
    """Notes where data of the host would be copied to the device, or the other way, one call at a time."""

    WAITS = ("tensor", "as_tensor", "tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.WAITS:
            self.seen.append(func.__name__)
        if func is torch.Tensor.to and args[1:] == ("cpu",):  # from a GPU; here there is nothing to copy
            self.seen += [] if (kwargs or {}).get("non_blocking") else ["to"]
            return args[0]
        return func(*args, **(kwargs or {}))


def no_attention(q, k_cache, v_cache, batch, scale):
    return torch.empty_like(q)


@pytest.mark.parametrize("runner_class", [RaggedRunner, PaddedRunner])
@pytest.mark.parametrize("backend", ["sdpa", "none"])
def test_a_step_waits_for_nothing_but_its_tokens(bard, runner_class, backend):
    ghost = LoadedModel(
        empty_model(bard.config, META, torch.float32), bard.config, None, "", "", torch.float32, META, ""
    )
    ghost.model.inverse_frequencies = ghost.model.inverse_frequencies.to(META)
    attention = choose_attention("sdpa", "cpu", torch.float32)
    if backend == "none":
        attention = AttentionBackend("none", "", no_attention, no_attention)
    kv = BlockKV(40, 8) if runner_class is RaggedRunner else SlotKV(5, 64)
    runner = runner_class(ghost, kv, attention)
    kinds = [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}, {"min_tokens": 3}, {"temperature": 1.0, "logprobs": 3}]
    plan = StepPlan(width=None if runner_class is RaggedRunner else 9)
    for i, kind in enumerate(kinds):
        request = Request(f"r{i}", list(range(3, 12 - i)), SamplingParams(max_tokens=8, **kind))
        assert kv.allocate(request.request_id, 12)
        plan.num_tokens[request] = request.num_pending_tokens
    runner.allocate()
    with HostData() as host:
        launched = runner.launch(plan)
    assert host.seen == []
    assert launched.token_ids.shape == (4,) and launched.token_ids.device == META
    assert launched.logprobs.rows == [3] and launched.logprobs.top_ids.shape == (1, 3)
    with pytest.raises(Exception, match="meta"):
        launched.result()


def test_graph_sizes():
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(64) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    assert graph_sizes(100)[-2:] == [96, 100]


class Replays:
    """In place of CUDA graphs: runs again what was recorded, into the same output."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, run, memory):
        out = run()

        def replay():
            self.count += 1
            out.copy_(run())

        return replay, out


def capturable_reference() -> AttentionBackend:
    """The reference, reading lengths from tensors alone, as a kernel in a graph has to."""

    def ragged(q, k_cache, v_cache, batch, scale):
        if not batch.only_decodes:
            return reference.ragged_attention(q, k_cache, v_cache, batch, scale)
        live = (batch.context_lens > 0).nonzero().flatten()
        rows = RaggedBatch(
            batch.slot_mapping[live],
            torch.arange(len(live) + 1, dtype=torch.int32),
            batch.context_lens[live],
            batch.block_tables[live],
            [1] * len(live),
            batch.context_lens[live].tolist(),
        )
        return torch.zeros_like(q).index_copy(
            0, live, reference.ragged_attention(q[live], k_cache, v_cache, rows, scale)
        )

    def store(k, v, k_cache, v_cache, slot_mapping):
        kept = slot_mapping >= 0
        store_kv(k[kept], v[kept], k_cache, v_cache, slot_mapping[kept])

    return AttentionBackend("capturable reference", "", ragged, reference.padded_attention, store, True)


@pytest.fixture(scope="module")
def batch(bard):
    generator = torch.Generator().manual_seed(9)
    prompts = [torch.randint(3, 400, (n,), generator=generator).tolist() for n in (5, 30, 1, 12, 9, 17)]
    lengths = (12, 3, 20, 7, 1, 9)
    return [
        (f"r{i}", p, SamplingParams(max_tokens=n, ignore_eos=True, logprobs=2 if i % 2 else None))
        for i, (p, n) in enumerate(zip(prompts, lengths))
    ]


@pytest.mark.parametrize("strategy", ["continuous", "chunked"])
def test_padded_decode_steps_change_no_answer_and_show_in_the_timeline(bard, batch, strategy):
    options = {"strategy": strategy, "max_model_len": 64, "max_num_seqs": 5, "max_num_batched_tokens": 24}
    plain = [Request(*row) for row in batch]
    Engine.from_model(bard, **options).run(plain)

    engine = assemble_engine(bard, block_size=4, **options)
    runner, replays = engine.runner, Replays()
    runner.attention = capturable_reference()
    runner.graphs = DecodeGraphs([2, 5], max_blocks=16, device=bard.device, record=replays)
    runner.allocate()
    assert all(not k.any() and not v.any() for k, v in runner.pool)  # recording stores nothing
    padded = [Request(*row) for row in batch]
    timeline = engine.run(padded)
    assert [r.output_token_ids for r in padded] == [r.output_token_ids for r in plain]
    for ours, theirs in zip(padded, plain):
        assert len(ours.logprobs) == len(theirs.logprobs) == (ours.num_output_tokens if ours.params.logprobs else 0)
        for one, other in zip(ours.logprobs, theirs.logprobs):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)

    decodes = [step for step in timeline.steps if all(row.num_tokens == 1 for row in step.rows)]
    assert replays.count == len(decodes) > 5
    for step in timeline.steps:
        useful = sum(row.num_tokens for row in step.rows)
        wanted = (2 if useful <= 2 else 5) if step in decodes else useful
        assert step.num_computed_tokens == wanted and step.num_padding_tokens == wanted - useful
    assert any(step.num_padding_tokens for step in decodes)


def test_graphs_are_refused_where_they_can_not_run(bard):
    with pytest.raises(DeviceError, match="cuda_graphs needs a CUDA GPU, and the model is on cpu"):
        Engine.from_model(bard, cuda_graphs=True)


GIB = 2**30


@pytest.mark.parametrize(
    ("free", "total", "needed", "share", "pool"),
    [
        (78 * GIB, 80 * GIB, 2 * GIB, 0.9, 68 * GIB),
        (30 * GIB, 80 * GIB, 2 * GIB, 0.9, 20 * GIB),  # others hold 50: they count in the share
        (5 * GIB, 80 * GIB, 2 * GIB, 0.9, 0),
        (16 * GIB, 16 * GIB, 0, 1.0, 16 * GIB),
    ],
)
def test_pool_size(free, total, needed, share, pool):
    assert gpu_pool_bytes(free, total, needed, share) == pool


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA GPU as the choice of kernels sees it."""

    def pretend(capability: tuple[int, int], triton: str | None = "3.7.1"):
        from minibatcher.attention import triton_support

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(triton_support, "version", lambda: triton)
        monkeypatch.setattr(triton_support, "is_interpreted", lambda: False)

    return pretend


@pytest.mark.parametrize(
    ("capability", "triton", "dtype", "name", "why"),
    [
        ((9, 0), "3.7.1", torch.bfloat16, "triton", "compute capability 9.0"),
        ((8, 0), "3.4.0", torch.float16, "triton", "compute capability 8.0"),
        ((7, 5), "3.6.0", torch.float16, "triton+sdpa", "SDPA the prompts"),
        ((7, 5), "3.6.0", torch.bfloat16, "sdpa", "7.5 does not compute in bfloat16; use float16"),
        ((7, 5), "3.3.1", torch.float16, "sdpa", "3.3 can't compile a matrix product for compute capability 7.5"),
        ((9, 0), "3.3.1", torch.float16, "sdpa", "Triton 3.3.1 is older than 3.4"),
        ((7, 0), "3.7.1", torch.float16, "sdpa", "need compute capability 7.5 or later, and this GPU has 7.0"),
        ((9, 0), None, torch.float16, "sdpa", "Triton is not installed"),
        ((9, 0), "3.7.1", torch.float64, "sdpa", "not in float64"),
    ],
)
def test_the_choice_on_a_gpu_says_why(gpu, capability, triton, dtype, name, why):
    if name.startswith("triton"):
        pytest.importorskip("triton", reason="the kernels of the backend chosen need Triton, which exists for Linux")
    gpu(capability, triton)
    chosen = choose_attention("auto", "cuda", dtype)
    assert chosen.name == name and why in chosen.why and chosen.capturable == name.startswith("triton")
    if name == "sdpa":
        with pytest.raises(DeviceError, match=r"attention backend triton can't run here: .*; or use --attention sdpa"):
            choose_attention("triton", "cuda", dtype)
    else:
        assert choose_attention("triton", "cuda", dtype).name == name
    assert choose_attention("sdpa", "cuda", dtype).name == "sdpa"


def test_the_interpreter_refuses_bfloat16():
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    with pytest.raises(DeviceError, match=r"interpreter.*computes wrongly in bfloat16; use float32 or float16"):
        choose_attention("triton", "cpu", torch.bfloat16)


def test_options_that_are_no_truth_values_are_refused(bard):
    with pytest.raises(InvalidParameter, match="cuda_graphs must be True or False, not 'yes'"):
        Engine.from_model(bard, cuda_graphs="yes")


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("capability", "dtype", "masked", "shared"),
    [
        ((9, 0), torch.bfloat16, False, True),
        ((9, 0), torch.bfloat16, True, False),
        ((9, 0), torch.float32, False, False),
        ((7, 5), torch.float16, False, False),
    ],
)
def test_keys_are_repeated_where_flash_attention_can_not_run(monkeypatch, capability, dtype, masked, shared):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    q, keys, values = (torch.randn(2, heads, 5, 8, dtype=dtype) for heads in (6, 2, 2))
    mask = torch.ones(5, 5, dtype=torch.bool) if masked else None
    more_keys, more_values, gqa = sdpa.share_heads(q.as_subclass(OnGpu), keys, values, mask)
    assert gqa is shared
    assert more_keys.shape == (2, 2 if shared else 6, 5, 8)
    if not shared:
        assert torch.equal(more_keys[:, 3], keys[:, 1]) and torch.equal(more_values[:, 2], values[:, 0])
    assert sdpa.share_heads(q, keys, values, mask) == (keys, values, True)  # on a CPU all is well


def test_sdpa_on_a_gpu_does_without_cudnn(gpu):
    """Its plans are made anew for every length."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        choose_attention("sdpa", "cpu", torch.float32)
        assert torch.backends.cuda.cudnn_sdp_enabled()
        gpu((9, 0))
        choose_attention("sdpa", "cuda", torch.bfloat16)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_graphs_are_refused_where_kernels_are_interpreted():
    why = "TRITON_INTERPRET is set"
    attention = AttentionBackend("triton (interpreted)", why, None, None, capturable=True, interpreted=True)
    model = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(DeviceError, match=r"triton \(interpreted\) was chosen \(TRITON_INTERPRET is set\)"):
        _check_graphs(model, attention)


def test_sampling_is_measured_at_its_worst(bard, monkeypatch):
    """As much as a step of requests that ask for everything."""
    seen = []
    keep_top = "minibatcher.model.sampling.keep_top"
    monkeypatch.setattr(keep_top, lambda logits, params: seen.append(len(params)) or logits)
    probable = "minibatcher.model.logprobs.most_probable"
    monkeypatch.setattr(probable, lambda logits, k: seen.append((len(logits), k)) or most_probable(logits, k))
    tokens = _sample_from(bard, torch.zeros(3, dtype=torch.int64))
    assert tokens.shape == (3,) and seen == [3, (3, 20)] and 0 not in tokens.tolist()


@pytest.mark.parametrize(
    ("name", "strategy", "contexts", "repeated"),
    [("triton", "static", 0, 0), ("sdpa", "static", 4, 4), ("triton+sdpa", "continuous", 4, 1)],
)
def test_memory_for_what_sdpa_copies_is_set_aside(bard, monkeypatch, name, strategy, contexts, repeated):
    """One layer's keys and values of so many contexts, and of some a copy for each query head."""
    told = []
    monkeypatch.setattr("minibatcher.build.choose_attention", lambda *_: AttentionBackend(name, "", None, None))
    monkeypatch.setattr("minibatcher.build.kv_pool_bytes", lambda *args: told.append(args[3]) or kv_pool_bytes(*args))
    assemble_engine(bard, strategy=strategy, max_num_seqs=4, max_model_len=64)
    group = bard.config.num_heads // bard.config.num_kv_heads
    assert told == [(contexts + group * repeated) * 64 * bard.config.kv_bytes_per_token(4) // bard.config.num_layers]


def test_a_pool_that_does_not_fit_is_a_sentence(bard, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = assemble_engine(bard, kv_cache_tokens=4096)
    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(DeviceError, match=r"a KV pool of 0\.0 GiB does not fit on cpu.*lower kv_cache_tokens"):
        engine.runner.allocate()


@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("strategy", ["continuous", "chunked"])
def test_a_warm_up_on_a_gpu_sees_full_and_single_short_and_long(strategy, max_num_seqs):
    engine = fake_engine(strategy, num_blocks=400, max_model_len=400, max_num_seqs=max_num_seqs)
    decodes, run = [], engine.runner.run

    def noted(plan):
        if all(n == 1 for n in plan.num_tokens.values()):
            decodes.append([request.num_tokens for request in plan.num_tokens])
        return run(plan)

    engine.runner.run = noted
    warm_up(engine, SimpleNamespace(device=torch.device("cuda"), config=SimpleNamespace(vocab_size=1000)))
    assert {len(contexts) for contexts in decodes} >= {1, max_num_seqs}
    assert min(map(max, decodes)) < 64
    assert any(max(contexts) > 256 for contexts in decodes)


def test_the_gpu_of_the_model_is_the_current_one_in_a_step(bard, monkeypatch):
    """Triton launches on the current device, wherever the tensors are."""
    runner = assemble_engine(bard, kv_cache_tokens=4096).runner
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    monkeypatch.setattr(runner, "_launch", lambda plan: torch.is_inference_mode_enabled())
    assert runner.launch(StepPlan()) is True and entered == []
    runner.device = torch.device("cuda:1")
    assert runner.launch(StepPlan()) is True and entered == [runner.device]


def test_block_tables_follow_growth_preemption_and_departure():
    kv = BlockKV(20, 4)
    tables = TableArrays(kv)
    a, b = (Request(name, [1, 2, 3]) for name in "ab")
    assert kv.allocate("a", 9) and kv.allocate("b", 3)
    for grown in (9, 10, 13, 30):
        assert kv.allocate("a", grown)
        assert [t.tolist() for t in tables.of([a, b])] == [kv.table("a"), kv.table("b")]
        assert [t.tolist() for t in tables.of([b])] == [kv.table("b")]
    kv.free("a")
    assert kv.allocate("b", 20) and kv.allocate("a", 9)  # other blocks than before
    assert [t.tolist() for t in tables.of([b, a])] == [kv.table("b"), kv.table("a")]
    kv.free("a")
    assert kv.allocate("a", 9) and tables.of([a])[0].tolist() == kv.table("a")
    assert tables.of([a])[0].dtype == np.int32


def test_a_triton_that_can_not_be_imported_is_no_triton(gpu, monkeypatch):
    from minibatcher.attention import choose

    gpu((9, 0))

    def broken(device):
        raise ImportError("no libtriton")

    monkeypatch.setattr(choose, "_kernels", broken)
    chosen = choose_attention("auto", "cuda", torch.float16)
    assert chosen.name == "sdpa" and "is installed and can't be imported (no libtriton)" in chosen.why
    with pytest.raises(DeviceError, match="no libtriton"):
        choose_attention("triton", "cuda", torch.float16)


def test_blocks_larger_than_the_context_are_rounded_up_to(bard):
    engine = Engine.from_model(bard, strategy="chunked", block_size=128, max_num_seqs=2, max_model_len=64)
    assert engine.scheduler.kv.num_blocks == 2


def test_a_cpu_has_no_number():
    from minibatcher.build import resolve_device

    for name in ("cpu:3", "cpu:", "cuda:", "gpu"):
        with pytest.raises(DeviceError, match="unknown device"):
            resolve_device(name)
