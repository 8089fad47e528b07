"""100,000 requests of all kinds, and 2,000 through the real model: invariants hold at every step, memory is flat."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter

import pytest
from fakes import stub_engine

from minibatcher.ahead import AheadEngine
from minibatcher.engine import Engine
from minibatcher.request import Request, SamplingParams
from minibatcher.tally import Tally

FULL_CHECK = 200  # steps from one full check of the pool to the next; the cheap checks are made after every step


class Ends(Tally):
    """Counts how often each request ends, while it is one of those at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[str] = set()
        self.reasons: Counter[str] = Counter()

    def opened(self, request: Request) -> None:
        super().opened(request)
        self.open.add(request.request_id)

    def closed(self, request: Request) -> None:
        super().closed(request)
        self.open.remove(request.request_id)  # a second end is a KeyError
        self.reasons[request.finish_reason.value] += 1


def check_step(engine: Engine) -> None:
    scheduler, kv = engine.scheduler, engine.scheduler.kv
    assert kv.num_free_blocks + kv.num_cached_blocks + kv.num_used_blocks == kv.num_blocks
    assert min(kv.num_free_blocks, kv.num_cached_blocks, kv.num_used_blocks) >= 0
    running, waiting = scheduler.running, scheduler.waiting
    assert len(running) <= scheduler.config.max_num_seqs
    ended_rows = sum(r.finished for r in running) if scheduler.kv_layout == "slots" else 0
    assert len(engine.requests) == len(running) - ended_rows + len(waiting) == len(engine.recorder.open)


def check_all(engine: Engine) -> None:
    scheduler = engine.scheduler
    scheduler.kv.check()
    if scheduler.host is not None:
        scheduler.host.check()
    assert set(engine.requests.values()) == {r for r in (*scheduler.running, *scheduler.waiting) if not r.finished}


def soak(engine: Engine, make_request, n: int, seed: int, queue: int = 60) -> int:
    """Keep the machine busy with `n` requests, and abort one for every twelve.

    Returns by how many Python's memory blocks in use have grown from the end of the first fifth to the end of all, both
    times with nobody left.
    """
    rng, num_submitted, num_steps, num_aborts, in_use = random.Random(seed), 0, 0, 0, None
    while num_submitted < n or engine.scheduler.has_work():
        while num_submitted < (n if in_use else n // 5) and len(engine.requests) < queue:
            engine.submit(make_request(rng, num_submitted, engine.clock.now()))
            num_submitted += 1
            if rng.random() < 1 / 12:
                num_aborts += engine.abort(rng.choice(list(engine.requests)))
        engine.step()
        if engine.idle and engine.scheduler.has_work():
            engine.clock.sleep_until(engine.next_moment())
        num_steps += 1
        check_step(engine)
        if num_steps % FULL_CHECK == 0:
            check_all(engine)
        if not in_use and num_submitted == n // 5 and not engine.scheduler.has_work():
            engine.recorder.summary()  # which takes in what it has put aside
            gc.collect()
            in_use = sys.getallocatedblocks()
    check_all(engine)
    assert engine.scheduler.kv.num_used_blocks == 0 and not engine.requests and not engine.recorder.open
    reasons = engine.recorder.reasons
    assert sum(reasons.values()) == n and reasons["abort"] == num_aborts > n / 20
    assert set(reasons) <= {"stop", "length", "abort"}
    engine.recorder.summary()
    gc.collect()
    return sys.getallocatedblocks() - in_use


SYSTEM_PROMPTS = [[(31 * k + 7 * i) % 1000 for i in range(48)] for k in range(6)]
CLASSES = [("paid", 0), ("chat", 1), ("batch", 2), ("background", 3)]


def mixed(rng: random.Random, i: int, now: float) -> Request:
    """Short questions behind one of six long beginnings; four tenants, each of a class."""
    tenant, priority = CLASSES[rng.randrange(4)]
    question = [rng.randrange(1000) for _ in range(rng.randint(1, 12))]
    prompt = SYSTEM_PROMPTS[rng.randrange(6)][: rng.choice((8, 24, 48))] + question
    params = SamplingParams(max_tokens=16, ignore_eos=True, stop_after=rng.randint(1, 12))
    return Request(f"r{i}", prompt, params, arrival_time=now, tenant=tenant, priority=priority)


SOAKS = {  # requests, options
    "solo": (6_000, {}),
    "static": (6_000, {"batch_timeout_s": 0.05}),
    "dynamic": (6_000, {"bucket_by_length": True}),
    "continuous": (20_000, {"admission": "optimistic", "ordering": "fair-share"}),
    "chunked": (32_000, {"ordering": "priority", "preemption": "swap", "swap_tokens": 160}),
    "chunked, worst-case": (15_000, {"admission": "worst-case", "ordering": "shortest-prompt", "watermark": 0.02}),
    "continuous, ahead": (15_000, {"engine_class": AheadEngine, "ordering": "priority", "ageing_s": 1.0}),
}


def soak_engine(name: str, **options) -> Engine:
    sizes = {"num_blocks": 60, "block_size": 8, "max_model_len": 80, "max_num_seqs": 24, "max_num_batched_tokens": 256}
    return stub_engine(name, recorder=Ends(), enable_prefix_caching=True, **sizes, **options)


def test_they_are_a_hundred_thousand():
    assert sum(n for n, _ in SOAKS.values()) == 100_000


@pytest.mark.parametrize("name", SOAKS)
def test_a_hundred_thousand_requests(name):
    n, options = SOAKS[name]
    engine = soak_engine(name.split(",")[0], **options)
    growth = soak(engine, mixed, n, seed=len(name))
    assert growth < n / 10  # one object kept a request would be 0.8 n
    num_preemptions = engine.recorder.summary()["num_preemptions"]
    assert (num_preemptions > 0) == (name in ("continuous", "chunked", "continuous, ahead"))


def test_memory_that_grows_is_noticed():
    engine = soak_engine("chunked")
    kept, close = [], engine._close

    def keeping(request):
        kept.append(object())
        return close(request)

    engine._close = keeping
    assert soak(engine, mixed, 3_000, seed=0) > 3_000 / 10


@pytest.mark.parametrize(
    "strategy, options",
    [
        ("chunked", {"ordering": "priority", "preemption": "swap", "swap_tokens": 200, "ageing_s": 1.0}),
        ("continuous", {"ordering": "fair-share", "plan_ahead": True}),
    ],
)
def test_two_thousand_requests_through_the_real_model(strategy, options):
    pytest.importorskip("torch")
    sizes = {"kv_cache_tokens": 320, "block_size": 8, "max_num_seqs": 24, "max_num_batched_tokens": 192}
    engine = Engine.from_model(
        "bard", strategy=strategy, max_model_len=80, enable_prefix_caching=True, dtype="float32", **sizes, **options
    )
    rng = random.Random(3)
    prompts = [mixed(rng, i, 0.0).prompt_token_ids for i in range(40)]
    prompts = [[3 + token % (engine.vocab_size - 3) for token in prompt] for prompt in prompts]
    alone = Engine.from_model("bard", strategy="solo", max_model_len=80, dtype="float32", max_num_seqs=1)
    solo = [
        Request(f"r{i}", prompt, SamplingParams(max_tokens=12, ignore_eos=True)) for i, prompt in enumerate(prompts)
    ]
    alone.run(solo)
    todo = []

    def known(rng: random.Random, i: int, now: float) -> Request:
        which, (tenant, priority) = rng.randrange(40), CLASSES[rng.randrange(4)]
        params = SamplingParams(max_tokens=12, ignore_eos=True, stop_after=rng.randint(1, 6))
        todo.append(
            (Request(f"r{i}", prompts[which], params, arrival_time=now, tenant=tenant, priority=priority), which)
        )
        return todo[-1][0]

    engine.recorder = Ends()
    engine.reset()
    soak(engine, known, 1_000, seed=1)
    assert engine.recorder.summary()["num_preemptions"] > 0
    assert sum(r.num_cached_tokens for r, _ in todo) > 0.2 * sum(r.num_prompt_tokens for r, _ in todo)
    for r, which in todo:
        assert r.output_token_ids == solo[which].output_token_ids[: r.num_output_tokens]
        assert r.finish_reason == "abort" or r.num_output_tokens == r.params.stop_after
