"""A bounded queue and a share for each tenant: refused with numbers, charged and given back to the token."""

from __future__ import annotations

import json
import warnings
from types import MappingProxyType

import pytest
from fakes import fake_engine, solo_answer
from faulty import ENGINES as FAULTY_ENGINES
from faulty import PAGED, faulty_engine, requests
from hypothesis import example, given
from hypothesis import strategies as st

from minibatcher.ahead import AheadEngine
from minibatcher.engine import Engine
from minibatcher.errors import InvalidParameter, OutOfMemory, QueueFull, RateLimited, RequestRefused
from minibatcher.hardware import device, model_spec
from minibatcher.limits import Door, Limits, TenantLimit, TokenBucket
from minibatcher.request import Request, SamplingParams
from minibatcher.runners.roofline import CostModel
from minibatcher.scheduling.ordering import PriorityClasses
from minibatcher.simulate import simulated_engine

ENGINES = [("static", Engine), ("continuous", Engine), ("chunked", Engine), ("chunked", AheadEngine)]


def request(name: str, prompt: int = 3, output: int = 5, tenant: str = "default", **options) -> Request:
    return Request(name, list(range(prompt)), SamplingParams(max_tokens=output), tenant=tenant, **options)


def tenants(**limits) -> Limits:
    return Limits(tenants={"*": TenantLimit(**limits)})


def test_a_bucket_fills_up_to_its_burst():
    bucket = TokenBucket(rate_per_s=2, burst=10)
    assert bucket.level(100.0) == 10
    bucket.take(8, 100.0)
    assert bucket.level(100.0) == 2 and bucket.level(101.5) == 5 and bucket.level(200.0) == 10
    assert bucket.delay(2, 100.0) == 0 and bucket.delay(7, 100.0) == 2.5 and bucket.delay(11, 100.0) is None
    bucket.take(-100, 101.0)
    assert bucket.level(101.0) == 10
    empty = TokenBucket(rate_per_s=0, burst=1)
    empty.take(1, 0.0)
    assert empty.delay(1, 5.0) is None and empty.delay(0, 5.0) == 0


@given(
    rate=st.floats(0.001, 1000),
    burst=st.integers(1, 10_000),
    asked=st.lists(st.tuples(st.floats(0, 50), st.integers(1, 5000)), max_size=30),
)
def test_no_more_than_burst_and_rate_ever_leaves_and_the_delay_is_exact(rate, burst, asked):
    bucket, now, taken = TokenBucket(rate, burst), 0.0, 0
    for gap, amount in asked:
        now += gap
        delay = bucket.delay(amount, now)
        if delay is None:
            assert amount > burst
            continue
        if delay:
            assert delay < 1e-6 or bucket.delay(amount, now + 0.99 * delay) > 0
            now += delay
            assert bucket.delay(amount, now) == 0  # after exactly so long it is let in
        bucket.take(amount, now)
        taken += amount
        assert taken <= (burst + rate * now) * (1 + 1e-6)


@given(
    rate=st.floats(1e-6, 1e12),
    burst=st.floats(1, 1e9),
    start=st.floats(0, 1e9),
    gaps=st.lists(st.floats(0, 100), min_size=1, max_size=9),
    shares=st.lists(st.floats(1e-9, 1), min_size=9, max_size=9),
)
@example(rate=1e6, burst=64.0, start=1e6, gaps=[0.0] * 9, shares=[1.0] * 9)
@example(rate=1e6, burst=64.0, start=3e8, gaps=[1e-6] * 9, shares=[0.7] * 9)
def test_who_comes_back_when_told_is_let_in_at_any_rate_and_time(rate, burst, start, gaps, shares):
    """However late it is and however fast tokens flow: seconds are rounded, and the clock may be a nanosecond off."""
    bucket, now, taken = TokenBucket(rate, burst), start, 0.0
    bucket.take(burst, start)  # what has flowed in from here on counts
    for gap, share in zip(gaps, shares):
        now, amount = now + gap, share * burst
        delay = bucket.delay(amount, now)
        if delay:
            assert bucket.delay(amount, now + delay) == 0 and bucket.delay(amount, now + delay - 1e-9) == 0
            assert delay < 1e-3 or bucket.delay(amount, now + 0.99 * delay) > 0
            now += delay
        bucket.take(amount, now)
        taken += amount
        slack = burst * 1e-8 + rate * (2e-9 + now * 1e-14)
        assert taken <= rate * (now - start) + slack  # the errors do not add up


def test_a_large_quota_that_comes_back_slowly_is_no_less_exact():
    for tenths in range(1, 50):
        bucket, now = TokenBucket(rate_per_s=1e-6, burst=1e9), 1234.567 * tenths
        bucket.take(3e8 + tenths / 10, 0.0)
        delay = bucket.delay(7e8, now)
        assert delay == pytest.approx(tenths * 1e5 - now, rel=1e-4) and bucket.delay(7e8, now + delay) == 0


@pytest.mark.parametrize("rate, burst", [(1e6, 60), (3e8, 8), (3e5, 50)])
def test_retry_after_holds_on_a_clock_that_has_run_for_long(rate, burst):
    engine, refused = fake_engine("chunked", limits=tenants(tokens_per_s=rate, burst_tokens=burst)), 0
    engine.clock.sleep_until(1e7 + 0.1)
    for i in range(50):
        one = request(f"r{i}", 1, burst - 2)
        try:
            engine.submit(one)
        except RateLimited as refusal:
            refused += 1
            engine.clock.sleep_until(engine.clock.now() + refusal.retry_after_s)
            engine.submit(one)
    assert refused > 30


@pytest.mark.parametrize("name, engine_class", ENGINES)
def test_a_full_queue_refuses_and_changes_nothing(name, engine_class):
    engine = fake_engine(name, engine_class=engine_class, limits=Limits(max_waiting_requests=2))
    for i in range(2):
        engine.submit(request(f"r{i}"))
    waiting, known, late = list(engine.scheduler.waiting), dict(engine.requests), request("r2")
    with pytest.raises(QueueFull, match="no room for request 'r2': need 1 requests, have 0; try again later") as info:
        engine.submit(late)
    error = info.value
    assert isinstance(error, RequestRefused) and (error.need, error.have, error.unit) == (1, 0, "requests")
    assert error.retry_after_s is None  # the queue has not moved yet
    assert list(engine.scheduler.waiting) == waiting and engine.requests == known
    assert "r2" not in engine.timeline.requests and late.is_fresh and not engine._detokenizers
    while engine.scheduler.has_work():
        engine.step()
        engine.clock.sleep_until(engine.clock.now() + 0.1)
    engine.submit(late)  # the same one again
    while not late.finished:
        engine.step()
        engine.clock.sleep_until(engine.clock.now() + 0.1)
    assert late.output_token_ids == solo_answer([0, 1, 2], 5)


def test_waiting_tokens_are_prompts_and_max_tokens():
    engine = fake_engine("chunked", limits=Limits(max_waiting_tokens=20))
    engine.submit(request("r0", 3, 5))
    engine.submit(request("r1", 4, 4))
    with pytest.raises(QueueFull, match="need 5 tokens, have 4") as info:
        engine.submit(request("r2", 1, 4))
    assert info.value.unit == "tokens"
    engine.submit(request("r3", 1, 3))  # fits to the token
    with pytest.raises(QueueFull, match="request 'big' alone is larger than the queue: need 21 tokens, have 20"):
        engine.submit(request("big", 10, 11))


@pytest.mark.parametrize("name, engine_class", FAULTY_ENGINES)
@given(data=st.data())
def test_the_door_knows_how_much_waits(name, engine_class, data):
    """It keeps sums instead of asking the queue, which may be long: also while some are preempted, fail or end."""
    knobs = {"max_num_seqs": data.draw(st.integers(1, 4))}
    if (name, engine_class) in PAGED:
        knobs |= {
            "num_blocks": data.draw(st.integers(9, 20)),
            "preemption": data.draw(st.sampled_from(["recompute", "swap"])),
            "admission": data.draw(st.sampled_from(["worst-case", "optimistic", "preempt"])),
            "ordering": data.draw(st.sampled_from(["fcfs", "shortest-prompt", "priority", "fair-share"])),
        }
    errors = st.sampled_from([ValueError("bad"), OutOfMemory("20 GiB")])
    faults = data.draw(st.dictionaries(st.integers(1, 30), st.tuples(st.just("after"), errors), max_size=3))
    bounds = {"*": TenantLimit(max_waiting_requests=10**6)}
    limits = Limits(max_waiting_requests=10**6, max_waiting_tokens=10**6, tenants=bounds)
    engine = faulty_engine(name, engine_class, faults, keep_going=True, limits=limits, **knobs)
    scheduler, todo = engine.scheduler, requests(8)

    def check(output=None):
        waits = list(scheduler.waiting)
        assert engine._door.queue.waiting(scheduler.running) == (len(waits), sum(r.max_total_tokens for r in waits))
        own = {tenant: queue.waiting(scheduler.running) for tenant, queue in engine._door.queues.items()}
        for tenant in {r.tenant for r in todo}:
            tokens = [r.max_total_tokens for r in waits if r.tenant == tenant]
            assert own.pop(tenant, (0, 0)) == (len(tokens), sum(tokens))
        assert not own

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for request in todo[:5]:
            engine.submit(request, check)
        for step in range(60):
            check()
            late = todo[5 + step // 4] if step in (0, 4, 8) else None
            if late and scheduler.kv.blocks_for(late.max_total_tokens) <= scheduler.kv.num_blocks:
                engine.submit(late, check)
            if step == 5:
                engine.abort(f"r{data.draw(st.integers(0, 4))}")
            engine.step()
        engine.abort_all()
    check()
    assert not any("on_output" in (request.error or "") for request in todo)
    assert engine._door.queue.tokens == 0 and not engine._door.queue.charged and not engine._door.queues


def test_the_queue_is_not_gone_through_at_each_arrival(monkeypatch):
    """It may be long: with a thousand times as many requests that would take a million times as long."""
    asked = []
    monkeypatch.setattr(PriorityClasses, "__iter__", lambda self: asked.append(self) or iter(()))
    limits = Limits(max_waiting_tokens=10**6, max_waiting_requests=10**6)
    engine = fake_engine("continuous", ordering="priority", max_num_seqs=2, limits=limits)
    for i in range(30):
        engine.submit(request(f"r{i}"))
        engine.step()
    assert len(engine.scheduler.waiting) > 15 and not asked


def test_the_queue_says_how_fast_it_has_moved():
    engine = fake_engine("continuous", max_num_seqs=1, limits=Limits(max_waiting_requests=4))
    for i in range(4):
        engine.submit(request(f"r{i}", output=5))
    arrived, spared = 4, []
    while arrived < 30:
        engine.step()
        if len(engine.scheduler.waiting) < 4:
            engine.submit(request(f"r{arrived}", output=5))
            arrived += 1
        elif arrived > 10:
            with pytest.raises(QueueFull, match="try again in about") as info:
                engine.submit(request("late"))
            spared.append(info.value.retry_after_s)
    # One slot: each request takes it for one step of three tokens and four of one, 7 ms.
    assert all(0.006 < seconds < 0.009 for seconds in spared) and len(spared) > 20


@pytest.mark.parametrize("name, engine_class", ENGINES)
def test_a_flood_of_one_tenant_leaves_room_for_the_others(name, engine_class):
    bounds = {"flood": TenantLimit(max_waiting_requests=3), "*": TenantLimit(max_waiting_requests=1)}
    limits = Limits(max_waiting_requests=5, tenants=bounds)
    engine = fake_engine(name, engine_class=engine_class, max_num_seqs=2, batch_timeout_s=0.0, limits=limits)
    arrived, refused, polite = 0, 0, []
    while arrived < 200 or engine.has_work():
        for _ in range(5 if arrived < 200 else 0):
            arrived += 1
            try:
                engine.submit(request(f"f{arrived}", tenant="flood"))
            except QueueFull as refusal:
                refused += 1
                assert "the queue of tenant 'flood' has no room for request 'f" in str(refusal)
                assert (refusal.need, refusal.have, refusal.unit) == (1, 0, "requests")
        if arrived < 200 and (not polite or polite[-1].finished):
            polite.append(request(f"p{arrived}", tenant="polite"))
            engine.submit(polite[-1])  # let in however full the other's queue is
        engine.step()
        waiting = [r.tenant for r in engine.scheduler.waiting]
        assert waiting.count("flood") <= 3 and waiting.count("polite") <= 1
    assert refused > 100 and len(polite) > 2 and not engine._door.queues
    assert all(one.finish_reason == "length" for one in polite)


def test_a_tenants_queue_says_how_fast_it_has_moved_and_a_reset_empties_it():
    limits = Limits(tenants={"a": TenantLimit(max_waiting_requests=2)})
    engine = fake_engine("continuous", max_num_seqs=1, ordering="priority", limits=limits)
    for i in range(9):  # the others are served first, and slow this one down
        engine.submit(request(f"b{i}", output=5, tenant="b"))
    for i in range(2):
        engine.submit(request(f"a{i}", output=5, priority=1, tenant="a"))
    with pytest.raises(QueueFull, match="try again later") as info:
        engine.submit(request("a2", tenant="a"))
    assert info.value.retry_after_s is None
    while engine.requests["a0"].first_scheduled_time is None:
        engine.step()
    engine.submit(request("a2", output=5, priority=1, tenant="a"))
    with pytest.raises(QueueFull, match=r"the queue of tenant 'a' .*try again in about") as info:
        engine.submit(request("a3", tenant="a"))
    assert info.value.retry_after_s == pytest.approx(engine.clock.now())  # in all this time one has left it
    engine.abort_all()
    engine.reset()
    for i in range(2):
        engine.submit(request(f"a{i}", tenant="a"))


def test_requests_that_come_together_come_in_together_or_not_at_all():
    limits = tenants(max_waiting_requests=3, tokens_per_s=1, burst_tokens=40, requests_per_s=1, burst_requests=4)
    door = Door(limits)
    first, pair = [request("r0", 1, 4)], [request(f"p{i}", 1, 4) for i in range(3)]
    door.enter(first, [], 0.0)
    with pytest.raises(QueueFull, match=r"no room for request 'p0' and 2 that come with it: need 3 requests, have 2"):
        door.enter(pair, [], 0.0)
    assert door.queue.waiting([]) == (1, 5)
    door.enter(pair, first, 0.0)  # the first runs by now, and the refusal has cost nothing
    for request_ in pair:
        door.leave(request_, 0.0)
    with pytest.raises(RateLimited) as refused:
        door.enter([request(f"q{i}", 1, 4) for i in range(3)], first, 0.0)
    assert refused.value.retry_after_s == 3.0 and not refused.value.for_good  # for all three of them
    door.enter([request(f"s{i}", 1, 4) for i in range(3)], first, 3.0)
    for size, kind in ((4, QueueFull), (5, QueueFull)):
        with pytest.raises(kind) as never:
            door.check([request(f"n{i}", 1, 1) for i in range(size)])
        assert never.value.for_good and never.value.retry_after_s is None
    with pytest.raises(RateLimited) as never:
        door.check([request(f"t{i}", 10, 10) for i in range(3)])
    assert never.value.for_good and (never.value.need, never.value.have) == (60, 40)


def test_a_door_that_an_interrupt_has_torn_can_be_cleared():
    door = Door(tenants(max_waiting_requests=2))
    door.enter([request("r0")], [], 0.0)
    door.queue.add(request("r1"), [], 0.0)  # the interrupt has come before it was added to its tenant's queue
    door.clear(0.0)
    assert not door.queue.charged and not door.queue.tokens and not door.queues
    for i in range(2):
        door.enter([request(f"s{i}")], [], 0.0)


@pytest.mark.parametrize("name, engine_class", ENGINES)
def test_a_run_goes_on_without_those_refused(name, engine_class):
    limits = Limits(max_waiting_requests=3)
    engine = fake_engine(name, engine_class=engine_class, max_num_seqs=2, limits=limits)
    todo = [request(f"r{i}", output=4 + i) for i in range(6)] + [request("late", arrival_time=9.0)]
    timeline = engine.run(todo)  # all are checked before; the queue's bounds must not count then
    assert [r.finish_reason for r in todo] == ["length"] * 3 + ["refused"] * 3 + ["length"]
    for row in todo:
        record = timeline.requests[row.request_id]
        assert record.finish_reason == row.finish_reason and record.finish_time >= record.arrival_time
        if row.finish_reason == "refused":
            assert record.error == row.error and "need 1 requests, have 0" in row.error
            assert not row.output_token_ids and record.first_scheduled_time is None
        else:
            assert row.error is None and row.output_token_ids == solo_answer([0, 1, 2], row.params.max_tokens)
    assert "interrupted" not in timeline.header and not engine.requests
    assert timeline.header["limits"]["max_waiting_requests"] == 3 and json.dumps(timeline.header)


@pytest.mark.parametrize("name, engine_class", [*ENGINES, ("dynamic", Engine), ("solo", Engine)])
def test_a_run_whose_last_arrival_is_refused_ends_well(name, engine_class):
    """Nobody waits or runs then, and nobody will come."""
    engine = fake_engine(name, engine_class=engine_class, limits=tenants(tokens_per_s=0, burst_tokens=20))
    todo = [request("r0", 10, 10), request("r1", 10, 10, arrival_time=9.0)]
    timeline = engine.run(todo)
    assert [r.finish_reason for r in todo] == ["length", "refused"] and "interrupted" not in timeline.header
    assert [record.finish_reason for record in timeline.requests.values()] == ["length", "refused"]


def test_an_iterator_of_requests_is_held_against_the_limits_too():
    engine = fake_engine("chunked", limits=Limits(max_waiting_requests=3))
    todo = [request(f"r{i}") for i in range(5)]
    engine.run(iter(todo))
    assert [r.finish_reason for r in todo] == ["length"] * 3 + ["refused"] * 2


def test_a_tenant_is_told_exactly_when():
    engine = fake_engine("chunked", limits=tenants(tokens_per_s=10, burst_tokens=20))
    for name in ("a", "b"):  # each has a bucket of its own
        engine.submit(request(f"{name}0", 3, 5, name))
        engine.submit(request(f"{name}1", 4, 7, name))
        with pytest.raises(RateLimited, match=rf"tenant '{name}' .*need 8 tokens, have 1; try again in 0.7 s") as info:
            engine.submit(request(f"{name}2", 3, 5, name))
        assert info.value.retry_after_s == pytest.approx(0.7)
    engine.clock.sleep_until(0.699)
    with pytest.raises(RateLimited):
        engine.submit(request("a2", 3, 5, "a"))
    engine.clock.sleep_until(info.value.retry_after_s)
    engine.submit(request("a2", 3, 5, "a"))


def test_requests_are_limited_in_number():
    engine = fake_engine("chunked", limits=tenants(requests_per_s=0.5, burst_requests=2))
    engine.submit(request("r0"))
    engine.submit(request("r1"))
    with pytest.raises(RateLimited, match="need 1 requests, have 0; try again in 2 s") as info:
        engine.submit(request("r2"))
    assert info.value.unit == "requests" and info.value.retry_after_s == pytest.approx(2.0)


def test_both_buckets_are_asked_before_either_gives():
    door = Door(tenants(tokens_per_s=1, burst_tokens=10, requests_per_s=1, burst_requests=1))
    door.enter([request("r0", 1, 1)], [], 0.0)
    with pytest.raises(RateLimited) as info:  # both say no: the longer time counts
        door.enter([request("r1", 1, 9)], [], 0.0)
    assert info.value.retry_after_s == pytest.approx(2.0)
    door.enter([request("r2", 4, 4)], [], 1.0)  # 9 tokens are there: the refusal has cost none
    with pytest.raises(RateLimited) as info:
        door.enter([request("r3", 1, 1)], [], 1.5)
    assert info.value.unit == "requests"


def test_what_can_never_pass_is_told_at_once_and_before_a_run():
    engine = fake_engine("chunked", limits=tenants(tokens_per_s=1, burst_tokens=20))
    with pytest.raises(RateLimited, match=r"larger than the burst .*need 21 tokens, have 20; lower max_tokens") as info:
        engine.submit(request("big", 1, 20))
    assert info.value.retry_after_s is None
    with pytest.raises(RateLimited):
        engine.run([request("r0"), request("big", 1, 20)])
    assert not engine.timeline.steps and not engine.requests
    door = Door(tenants(tokens_per_s=0, burst_tokens=20))
    door.enter([request("r0", 10, 10)], [], 0.0)
    with pytest.raises(RateLimited, match="its limit lets nothing more in") as info:
        door.enter([request("r1")], [], 1e6)
    assert info.value.retry_after_s is None


def test_named_tenants_and_the_others():
    limits = Limits(tenants={"paid": TenantLimit(), "*": TenantLimit(requests_per_s=1, burst_requests=1)})
    engine = fake_engine("chunked", limits=limits)
    for i in range(9):
        engine.submit(request(f"p{i}", tenant="paid"))
    for tenant in ("x", "y"):
        engine.submit(request(f"{tenant}0", tenant=tenant))
        with pytest.raises(RateLimited):
            engine.submit(request(f"{tenant}1", tenant=tenant))
    free = fake_engine("chunked", limits=Limits(tenants={"x": TenantLimit(requests_per_s=1, burst_requests=1)}))
    for i in range(9):
        free.submit(request(f"r{i}", tenant="nobody"))  # no «*»: without limit


@pytest.mark.parametrize("name, engine_class", ENGINES)
@pytest.mark.parametrize("end", ["length", "stop", "abort waiting", "abort running", "error", "abort_all"])
def test_what_a_request_did_not_use_is_given_back(name, engine_class, end):
    eos = tuple(solo_answer([0, 1, 2], 9)[3:4]) if end == "stop" else ()
    limits = tenants(tokens_per_s=1e-9, burst_tokens=1000)
    options = {"max_num_seqs": 1, "batch_timeout_s": 0.0, "keep_going": True, "max_model_len": 200}
    engine = fake_engine(name, engine_class=engine_class, limits=limits, eos=eos, **options)
    engine.submit(request("r0", 3, 100))
    bucket = engine._door._tenant_buckets("default", 0.0)[0]

    def left() -> int:
        return round(bucket.level(engine.clock.now()))

    assert left() == 1000 - 103
    if end == "abort waiting":
        engine.submit(request("r1", 3, 100))
        engine.step()
        assert left() == 1000 - 206
        engine.abort("r1")
        assert left() == 1000 - 103  # all of it: nothing was done for it
        return
    for _ in range(4):
        engine.step()
    if end == "stop":
        assert engine.timeline.requests["r0"].finish_reason == "stop" and left() == 1000 - 3 - 4
    elif end == "abort running":
        engine.abort("r0")
        assert left() == 1000 - 3 - 4
    elif end == "abort_all":
        engine.abort_all()
        assert left() == 1000 - 3 - 4
    elif end == "error":
        engine.runner.run = engine.runner.launch = lambda plan: 1 / 0
        with pytest.warns(RuntimeWarning, match="the step failed"):
            engine.step()
        assert left() == 1000 - 3 - 4
    else:
        while engine.scheduler.has_work():
            engine.step()
        assert left() == 1000 - 103  # used to the last token


def test_a_quota_is_a_slow_bucket_and_a_reset_forgets_it():
    engine = fake_engine("chunked", limits=tenants(tokens_per_s=100 / 86_400, burst_tokens=100))
    todo = [request(f"r{i}", 3, 22) for i in range(6)]
    engine.run(todo)
    assert [r.finish_reason for r in todo] == ["length"] * 4 + ["refused"] * 2
    assert "try again in 2.16e+04 s" in todo[4].error  # a quarter of a day
    again = [request(f"r{i}", 3, 22) for i in range(4)]
    engine.run(again)
    assert [r.finish_reason for r in again] == ["length"] * 4


def test_tenants_that_were_here_once_are_forgotten():
    door = Door(tenants(tokens_per_s=1, burst_tokens=10))
    for i in range(5000):
        one = request(f"r{i}", 1, 1, tenant=f"t{i}")
        door.enter([one], [], float(i))
        one.first_scheduled_time = float(i)
        door.leave(one, float(i))
    assert len(door._buckets) <= 1001 and not door.queue.charged
    door.enter([request("x", 5, 5, tenant="x")], [], 5000.0)
    for i in range(3000):
        door.enter([request(f"s{i}", 1, 1, tenant=f"s{i}")], [], 5000.0)
    with pytest.raises(RateLimited):  # x is not full, so it was kept
        door.enter([request("x1", 5, 5, tenant="x")], [], 5000.0)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Limits(max_waiting_requests=0), "max_waiting_requests must be a whole number of at least 1, not 0"),
        (lambda: Limits(max_waiting_tokens=1.5), "max_waiting_tokens must be a whole number"),
        (lambda: Limits(tenants={"a": 5}), "the limit of tenant 'a' must be a TenantLimit, not 5"),
        (lambda: Limits(tenants=None), "tenants must be a dict of names and TenantLimits, not None"),
        (lambda: Limits(tenants=[("a", TenantLimit())]), "tenants must be a dict"),
        (lambda: Limits(tenants={3: TenantLimit()}), "the name of a tenant must be a text, not 3"),
        (lambda: TenantLimit(tokens_per_s=-1), "tokens_per_s must be a number of at least 0, not -1"),
        (lambda: TenantLimit(burst_tokens=5), "burst_tokens 5 says nothing without tokens_per_s"),
        (lambda: TenantLimit(max_waiting_requests=True), "max_waiting_requests must be a whole number of at least 1"),
        (lambda: TenantLimit(requests_per_s=1, burst_requests=0.5), "burst_requests must be a number of at least 1"),
    ],
)
def test_limits_are_checked(make, message):
    with pytest.raises(InvalidParameter, match=message):
        make()


def test_limits_can_not_be_changed_afterwards_and_any_mapping_will_do():
    names = {"a": TenantLimit(requests_per_s=1)}
    limits = Limits(tenants=MappingProxyType(names))
    names["a"] = 5
    assert limits.tenants == {"a": TenantLimit(requests_per_s=1)}
    assert json.dumps(fake_engine("chunked", limits=limits).timeline.header)


def test_a_burst_is_a_minute_unless_told():
    assert TenantLimit(tokens_per_s=50).burst_tokens == 3000 and TenantLimit(requests_per_s=0.001).burst_requests == 1


def test_engines_are_built_with_limits():
    cost = CostModel(device("h100"), model_spec("bard"))
    engine = simulated_engine(cost, "chunked", max_model_len=64, limits=Limits(max_waiting_requests=2))
    todo = [request(f"r{i}") for i in range(3)]
    engine.run(todo)
    assert [r.finish_reason for r in todo] == ["length", "length", "refused"]
    pytest.importorskip("torch")
    from minibatcher import LLM

    llm = LLM("bard", max_model_len=64, limits=Limits(max_waiting_requests=1))
    one, other = llm.generate(["A", "B"], SamplingParams(max_tokens=2))
    assert one.error is None and len(one.token_ids) == 2
    assert other.finish_reason == "refused" and "the queue has no room" in other.error and other.token_ids == []
    with pytest.raises(InvalidParameter, match=r"limits must be a minibatcher\.limits\.Limits"):
        LLM("bard", limits=3)


def test_a_rate_that_brings_a_unit_only_after_all_time_is_none():
    limit = TenantLimit(tokens_per_s=1e-320, burst_tokens=10)
    bucket, _ = limit.buckets()
    bucket.take(10, 0.0)
    assert bucket.delay(1, 0.0) is None and bucket.delay(0, 0.0) == 0.0
