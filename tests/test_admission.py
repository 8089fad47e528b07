"""Admission policies, the watermark, swaps: who is let in, who has to go, and that it costs nobody an answer."""

from __future__ import annotations

import pytest
from fakes import fake_engine, solo_answer
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.ahead import AheadEngine
from minibatcher.engine import Engine
from minibatcher.errors import InvalidParameter, UnknownName
from minibatcher.request import Request, SamplingParams
from minibatcher.scheduling import ADMISSIONS, ORDERINGS, SchedulerConfig, WaitReason
from minibatcher.scheduling.admission import POLICIES, Optimistic
from minibatcher.scheduling.ordering import QUEUES, make_ordering

CONTINUOUS = ["continuous", "chunked"]


def crowd(n: int = 8, prompt: int = 5, max_tokens: int = 20, stop_after: int | None = None) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, stop_after=stop_after)
    return [Request(f"r{i}", [i, *range(prompt - 1)], params) for i in range(n)]


def served(name: str, todo: list[Request], **options) -> Engine:
    """The engine after it has served these, each with its solo answer."""
    engine = fake_engine(name, **options)
    engine.run(todo)
    engine.scheduler.kv.check()
    assert engine.scheduler.kv.num_used_blocks == 0
    for r in todo:
        assert r.output_token_ids == solo_answer(r.prompt_token_ids, r.params.stop_after or r.params.max_tokens)
    return engine


def figures(engine: Engine) -> tuple[int, int]:
    """Preemptions; the most requests that ran at once."""
    steps = engine.timeline.steps
    return sum(len(step.preempted) for step in steps), max(len(step.rows) for step in steps)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_timid_and_eager(name):
    """Of 20 tokens asked for 6 come. Whoever reckons with 20 leaves slots idle; whoever reckons with none preempts."""
    at_once = {}
    for admission in ADMISSIONS:
        engine = served(name, crowd(stop_after=6), num_blocks=16, max_num_seqs=8, admission=admission)
        preemptions, at_once[admission] = figures(engine)
        assert (preemptions > 0) == (admission == "preempt")
    # 16 blocks of 4: a prompt takes 2, prompt + 20 take 7, prompt + 0.7 x 20 take 5, prompt + 6 take 3
    assert at_once == {"worst-case": 2, "optimistic": 3, "preempt": 8}


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("engine_class", [Engine, AheadEngine])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=2, max_size=10),
    num_blocks=st.integers(6, 20),
    caching=st.booleans(),
    ordering=st.sampled_from(["fcfs", "shortest-prompt", "fair-share"]),
)
def test_worst_case_never_preempts(name, engine_class, lengths, num_blocks, caching, ordering):
    todo = [Request(f"r{i}", range(n), SamplingParams(max_tokens=m)) for i, (n, m) in enumerate(lengths)]
    options = {"admission": "worst-case", "ordering": ordering, "enable_prefix_caching": caching}
    engine = fake_engine(name, engine_class=engine_class, num_blocks=num_blocks, max_model_len=24, **options)
    engine.run(todo)
    assert figures(engine)[0] == 0 and all(r.num_preemptions == 0 for r in todo)
    assert [r.output_token_ids for r in todo] == [
        solo_answer(list(r.prompt_token_ids), r.params.max_tokens) for r in todo
    ]


def test_worst_case_makes_way_for_the_more_urgent_alone():
    engine = fake_engine("chunked", admission="worst-case", ordering="priority", num_blocks=7, block_size=4)
    low = engine.add([1] * 8, SamplingParams(max_tokens=16), priority=3)
    for _ in range(5):
        engine.step()
    high = engine.add([2] * 4, SamplingParams(max_tokens=8), priority=0)
    while engine.scheduler.has_work():
        engine.step()
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)
    assert low.output_token_ids == solo_answer([1] * 8, 16)


def test_the_optimist_learns():
    policy = Optimistic()
    assert policy.ratio == 0.7
    request = Request("r", [1] * 10, SamplingParams(max_tokens=100))
    assert policy.target(request) == 10 + 70
    for _ in range(300):
        policy.stepped()
    assert policy.ratio == pytest.approx(0.4)
    policy.ran_short()
    assert policy.ratio == pytest.approx(0.7)  # half the way to 1
    for _ in range(2_000):
        policy.stepped()
    assert policy.ratio == 0.1 and policy.target(request) == 10 + 10
    for _ in range(50):
        policy.ran_short()
    assert 0.99 < policy.ratio <= 1 and policy.target(request) <= request.max_total_tokens


def test_the_optimist_falls_step_by_step_and_rises_when_it_hurts():
    engine = fake_engine("chunked", admission="optimistic", num_blocks=12, max_num_seqs=8, max_model_len=48)
    policy = engine.scheduler.admission
    policy.ratio = 0.1
    for r in crowd(6, prompt=4, max_tokens=30):
        engine.submit(r)
    rises = falls = 0
    while engine.scheduler.has_work():
        before = policy.ratio
        engine.step()
        hurt = len(engine.timeline.steps[-1].preempted)
        expected = before
        for _ in range(hurt):
            expected += (1 - expected) / 2
        assert policy.ratio == pytest.approx(max(0.1, expected - 0.001))
        rises, falls = rises + (hurt > 0), falls + (hurt == 0)
    assert rises > 0 and falls > 0
    engine.scheduler.clear()
    assert engine.scheduler.admission.ratio == 0.7  # nothing is learnt from the past


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempt_preempts_and_loses_nothing(name, preemption):
    todo = crowd(8, max_tokens=20)
    engine = served(name, todo, num_blocks=12, max_num_seqs=8, admission="preempt", preemption=preemption)
    assert figures(engine)[0] == sum(r.num_preemptions for r in todo) > 0
    computed = sum(step.num_computed_tokens for step in engine.timeline.steps)
    needed = sum(r.num_tokens - 1 for r in todo)
    assert computed == needed + sum(r.num_lost_tokens for r in todo)  # what is lost is computed again, nothing else
    assert (sum(r.num_lost_tokens for r in todo) == 0) == (preemption == "swap")
    assert todo[0].num_preemptions == 0
    for r in todo:
        assert engine.timeline.requests[r.request_id].num_lost_tokens == r.num_lost_tokens


@pytest.mark.parametrize("watermark, blocks_kept", [(0.0, 0), (0.25, 5), (0.5, 10)])
def test_the_watermark_keeps_its_blocks(watermark, blocks_kept):
    engine = fake_engine("chunked", num_blocks=20, max_num_seqs=20, max_num_batched_tokens=200, watermark=watermark)
    for r in crowd(20, prompt=4, max_tokens=4):
        engine.submit(r)
    engine.step()
    assert engine.scheduler.kv.num_free_blocks == blocks_kept
    if blocks_kept:
        need_and_have = {"need": 1 + blocks_kept, "have": blocks_kept}
        wait = engine.timeline.steps[0].wait
        assert wait == {"request_id": f"r{20 - blocks_kept}", "reason": WaitReason.WATERMARK.value, **need_and_have}
    engine.step()  # those that run may grow into it
    assert engine.scheduler.kv.num_free_blocks < max(1, blocks_kept)


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_whoever_is_alone_gets_in(name, admission):
    """Its prompt fills all but the watermark and more; a pool that holds it at all must serve it."""
    rows = [Request(f"r{i}", [i] * 35, SamplingParams(max_tokens=5)) for i in range(3)]
    engine = served(name, rows, num_blocks=10, admission=admission, watermark=0.9, ordering="fcfs")
    assert max(len(step.rows) for step in engine.timeline.steps) == 1


def first_wait(**options) -> tuple:
    """Why the second of two requests waits in the first step: reason, need, have."""
    engine = fake_engine("chunked", **{"num_blocks": 10, "max_num_batched_tokens": 64} | options)
    for i in range(2):
        engine.add([i] * 8, SamplingParams(max_tokens=20), request_id=f"r{i}")
    engine.step()
    wait = engine.timeline.steps[0].wait
    assert wait is None or wait["request_id"] == "r1"
    return wait and (WaitReason(wait["reason"]), wait["need"], wait["have"])


def test_reasons_to_wait_say_need_and_have():
    assert first_wait() is None
    assert first_wait(max_num_seqs=1) == (WaitReason.SLOTS, 1, 0)
    assert first_wait(max_num_batched_tokens=8)[0] is WaitReason.BUDGET
    assert first_wait(num_blocks=7, max_num_batched_tokens=8)[0] is WaitReason.BUDGET
    # A prompt takes 2 blocks; prompt + 20 takes 7, prompt + 14 takes 6.
    assert first_wait(admission="worst-case") == (WaitReason.PROMISED, 2 + 5 + 5, 8)
    assert first_wait(admission="optimistic") == (WaitReason.PROMISED, 2 + 4 + 4, 8)
    assert first_wait(watermark=0.7) == (WaitReason.WATERMARK, 2 + 7, 8)
    engine = fake_engine("chunked", num_blocks=7, max_num_batched_tokens=64)
    engine.add([1] * 24, SamplingParams(max_tokens=4))
    engine.add([2] * 8, SamplingParams(max_tokens=4), request_id="next")
    engine.step()
    assert engine.timeline.steps[0].wait == {"request_id": "next", "reason": WaitReason.KV.value, "need": 2, "have": 1}


def test_static_batches_say_why_too():
    engine = fake_engine("static", max_num_seqs=2, batch_timeout_s=1.0)
    engine.add([1], SamplingParams(max_tokens=3))
    assert engine.step() == []
    for i in range(2):
        engine.add([1, i], SamplingParams(max_tokens=3), request_id=f"r{i}")
    engine.step()
    assert engine.timeline.steps[0].wait == {
        "request_id": "r1",
        "reason": WaitReason.LAUNCHED.value,
        "need": 1,
        "have": 0,
    }


@pytest.mark.parametrize(
    "knobs, error",
    [
        ({"admission": "eager"}, UnknownName),
        ({"ordering": "lifo"}, UnknownName),
        ({"preemption": "kill"}, UnknownName),
        ({"watermark": 1.0}, InvalidParameter),
        ({"watermark": -0.1}, InvalidParameter),
        ({"watermark": "much"}, InvalidParameter),
        ({"ageing_s": 0}, InvalidParameter),
        ({"ageing_s": float("inf")}, InvalidParameter),
        ({"swap_tokens": -1}, InvalidParameter),
        ({"swap_tokens": 1.5}, InvalidParameter),
    ],
)
def test_bad_knobs_are_refused(knobs, error):
    with pytest.raises(error, match=next(iter(knobs))):
        SchedulerConfig(**knobs)


# swap


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("engine_class", [Engine, AheadEngine])
@pytest.mark.parametrize("caching", [False, True])
def test_swapped_requests_go_on_where_they_were(name, engine_class, caching):
    todo = crowd(8, max_tokens=20)
    options = {"engine_class": engine_class, "enable_prefix_caching": caching, "preemption": "swap"}
    engine = served(name, todo, num_blocks=12, max_num_seqs=8, **options)
    assert sum(r.num_preemptions for r in todo) > 0 and sum(r.num_lost_tokens for r in todo) == 0
    engine.scheduler.host.check()
    assert engine.scheduler.host.num_used_blocks == 0


def test_with_little_host_memory_some_are_swapped_and_some_computed_again():
    todo = crowd(8, max_tokens=20)
    engine = fake_engine("chunked", num_blocks=12, max_num_seqs=8, preemption="swap", swap_tokens=8)
    run, swaps = engine.runner.run, []

    def watched(plan):
        swaps.extend(plan.swaps)
        return run(plan)

    engine.runner.run = watched
    engine.run(todo)
    assert [r.output_token_ids for r in todo] == [solo_answer(r.prompt_token_ids, 20) for r in todo]
    num_out, num_in = sum(s.out for s in swaps), sum(not s.out for s in swaps)
    assert num_out == num_in > 0 and sum(r.num_lost_tokens for r in todo) > 0
    assert all(len(s.device_blocks) == len(s.host_blocks) <= 2 for s in swaps)


def test_an_aborted_swapped_request_gives_its_host_blocks_back():
    engine = fake_engine("chunked", num_blocks=8, max_num_seqs=4, preemption="swap")
    todo = crowd(4, max_tokens=16)
    for r in todo:
        engine.submit(r)
    while not engine.scheduler.host.num_used_blocks:
        engine.step()
    swapped = next(r for r in todo if engine.scheduler.host.table(r.request_id))
    before, its = engine.scheduler.host.num_used_blocks, len(engine.scheduler.host.table(swapped.request_id))
    engine.abort(swapped.request_id)
    assert engine.scheduler.host.num_used_blocks == before - its
    while engine.scheduler.has_work():
        engine.step()
    for r in todo:
        if r is not swapped:
            assert engine.scheduler.host.num_used_blocks == 0
            assert r.output_token_ids == solo_answer(r.prompt_token_ids, 16)


def test_no_room_on_the_host_is_recompute():
    engine = fake_engine("chunked", preemption="swap", swap_tokens=0)
    assert engine.scheduler.host is None


def test_every_name_has_its_policy():
    assert tuple(POLICIES) == ADMISSIONS and all(cls.name == name for name, cls in POLICIES.items())
    assert tuple(QUEUES) == ORDERINGS and all(make_ordering(SchedulerConfig(ordering=n)).name == n for n in QUEUES)
