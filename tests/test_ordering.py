"""Order of service, in simulated time: who may overtake whom, for how long, and what a flood costs the others."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fakes import fake_engine, solo_answer, stub_engine
from hypothesis import given
from hypothesis import strategies as st
from pressure_machine import inversions

from minibatcher.ahead import AheadEngine
from minibatcher.engine import Engine
from minibatcher.request import Request, SamplingParams

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # of Sheng et al., OSDI 2024; what fair share counts


def request(name: str, prompt: int, output: int, at: float = 0.0, **who) -> Request:
    return Request(name, range(prompt), SamplingParams(max_tokens=output, ignore_eos=True), arrival_time=at, **who)


def poisson(tenant: str, rate: float, prompt: int, output: int, seconds: float, seed: int, start=0.0) -> list[Request]:
    """A tenant's traffic: `rate` requests a second, sizes spread evenly around `prompt` and `output`."""
    rng, now, made = random.Random(seed), start, []
    while (now := now + rng.expovariate(rate)) < start + seconds:
        lengths = rng.randint(1 + prompt // 2, prompt + prompt // 2), rng.randint(1 + output // 2, output + output // 2)
        made.append(request(f"{tenant}{len(made)}", *lengths, at=now, tenant=tenant))
    return made


# bounded wait


rows = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt
        st.integers(1, 12),  # output
        st.floats(0, 0.3),  # arrival
        st.integers(0, 3),  # priority
        st.sampled_from("abc"),  # tenant
    ),
    min_size=2,
    max_size=14,
)
machines = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 40),
        "num_blocks": st.integers(13, 40),
        "ageing_s": st.sampled_from([0.02, 0.2, 30.0]),
        "enable_prefix_caching": st.booleans(),
        "preemption": st.sampled_from(["recompute", "swap"]),
    }
)


def make(rows) -> list[Request]:
    return [
        Request(f"r{i}", range(n), SamplingParams(max_tokens=m), arrival_time=t, priority=p, tenant=tenant)
        for i, (n, m, t, p, tenant) in enumerate(sorted(rows, key=lambda row: row[2]))
    ]


def head_start(ordering: str, first: Request, other: Request, ageing_s: float) -> float:
    """Seconds by which `first` may arrive later than `other` and still be served before it."""
    if ordering == "priority":
        return (other.priority - first.priority) * ageing_s
    if ordering == "shortest-prompt":
        return (other.num_prompt_tokens - first.num_prompt_tokens) / 1000 * ageing_s
    return 0.0


@pytest.mark.parametrize("name", ["continuous", "chunked"])
@pytest.mark.parametrize("ordering", ["fcfs", "shortest-prompt", "priority"])
@given(rows=rows, machine=machines)
def test_nobody_is_overtaken_by_those_who_come_too_late(name, ordering, rows, machine):
    """So however much keeps coming, a request waits for a set of others that is closed at a known time."""
    todo = make(rows)
    engine = fake_engine(name, ordering=ordering, max_model_len=52, **machine)
    engine.run(todo)
    for other in todo:
        for first in todo:
            if other.arrival_time <= first.first_scheduled_time < other.first_scheduled_time:
                late = first.arrival_time - other.arrival_time
                assert late <= head_start(ordering, first, other, machine["ageing_s"]) + 1e-9
    assert all(r.finish_reason == "length" for r in todo)


def service(engine, todo, start: float, end: float) -> dict[str, float]:
    """Weighted tokens that each tenant was served from `start` to `end`, counted from the record."""
    served = dict.fromkeys({r.tenant for r in todo}, 0.0)
    for r in todo:
        if r.first_scheduled_time is not None and start <= r.first_scheduled_time < end:
            served[r.tenant] += PROMPT_WEIGHT * r.num_prompt_tokens
        served[r.tenant] += OUTPUT_WEIGHT * sum(start <= t < end for t in r.token_times)
    return served


@pytest.mark.parametrize("name", ["continuous", "chunked"])
@given(rows=rows, machine=machines)
def test_fair_share_a_wait_is_bounded_by_what_the_own_tenant_asked_before(name, rows, machine):
    """While a request waits, no other tenant gets more than its own does, but for the bound of the paper's theorem 4.4.

    That is 2 U, where U bounds how far one that waits lags behind: by one prompt, charged to the other at once when it
    was let in as the lowest, and by the answers that can be under way. Its own tenant gets at most what it asked for
    before, so all together get a known amount of service, and the wait ends.
    """
    todo = make(rows)
    engine = fake_engine(name, ordering="fair-share", max_model_len=52, **machine)
    engine.run(todo)
    u = PROMPT_WEIGHT * 40 + OUTPUT_WEIGHT * 12 * machine["max_num_seqs"]
    for other in todo:
        window = other.arrival_time, other.first_scheduled_time
        served = service(engine, todo, *window)
        before = [
            r for r in todo if r.tenant == other.tenant and r.arrival_time <= other.arrival_time and r is not other
        ]
        asked = sum(PROMPT_WEIGHT * r.num_prompt_tokens + OUTPUT_WEIGHT * r.num_output_tokens for r in before)
        assert served[other.tenant] <= asked + 1e-9
        for tenant in served.keys() - {other.tenant}:
            assert served[tenant] <= served[other.tenant] + 2 * u


def test_background_work_comes_through_endless_paid_traffic():
    """Half as much again as the machine can serve keeps coming from the most urgent class. Background: class 3."""
    ageing_s, seconds = 2.0, 40.0
    paid = poisson("paid", 90, 60, 20, seconds, seed=1)
    background = [request(f"background{i}", 200, 30, at=5.0 + i, priority=3, tenant="background") for i in range(5)]
    engine = stub_engine("chunked", ordering="priority", ageing_s=ageing_s, max_num_seqs=16, max_num_batched_tokens=256)
    engine.run([*paid, *background])
    capacity = sum(r.num_tokens for r in paid if r.finish_time < seconds) / seconds
    asked = sum(r.num_tokens for r in paid) / seconds
    assert asked > 1.3 * capacity  # the queue only grows
    for r in background:
        let_in = r.arrival_time + 3 * ageing_s
        before = [p for p in paid if p.first_scheduled_time < r.first_scheduled_time]
        assert max(p.arrival_time for p in before) <= let_in
        assert r.finish_time < seconds  # long before the traffic ends
        # It waits until nobody new can overtake it, and for what had come by then.
        backlog = sum(p.num_tokens for p in paid if p.arrival_time <= let_in and p.finish_time > r.arrival_time)
        assert r.first_scheduled_time - r.arrival_time <= 3 * ageing_s + backlog / (0.9 * capacity)


# priority


@pytest.mark.parametrize("name", ["continuous", "chunked"])
@given(rows=rows, machine=machines, admission=st.sampled_from(["worst-case", "optimistic", "preempt"]))
def test_nobody_waits_for_what_a_less_urgent_request_holds(name, rows, machine, admission):
    engine = fake_engine(name, ordering="priority", admission=admission, max_model_len=52, **machine)
    scheduler = engine.scheduler
    schedule, looked = scheduler.schedule, []

    def watched(now):
        plan = schedule(now)
        if scheduler.waiting:
            looked.append(plan)
            assert not inversions(scheduler, plan)
        return plan

    scheduler.schedule = watched
    todo = make(rows)
    engine.run(todo)
    for r in todo:
        assert r.output_token_ids == solo_answer(list(r.prompt_token_ids), r.params.max_tokens)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("short_of", ["slots", "blocks"])
def test_lower_classes_make_way_and_come_back(preemption, short_of):
    knobs = {"max_num_seqs": 2, "num_blocks": 60} if short_of == "slots" else {"max_num_seqs": 9, "num_blocks": 10}
    engine = fake_engine("chunked", ordering="priority", preemption=preemption, **knobs)
    low = [engine.add([i, 1, 2, 3, 4, 5], SamplingParams(max_tokens=14), priority=2 + i) for i in range(2)]
    for _ in range(8):
        engine.step()
    urgent = engine.add(list(range(16)), SamplingParams(max_tokens=4), priority=0)
    engine.step()
    assert urgent.num_output_tokens == 1  # at once
    assert [r.num_preemptions for r in low] == [0, 1]  # the least urgent one alone, for it was enough
    record = engine.timeline.steps[-1]
    assert record.preempted == [low[1].request_id] and record.admitted == [urgent.request_id]
    while engine.scheduler.has_work():
        engine.step()
    assert low[0].num_preemptions == 0 and urgent.finish_time < low[1].finish_time
    for r in [*low, urgent]:
        assert r.output_token_ids == solo_answer(r.prompt_token_ids, r.params.max_tokens)
    assert low[1].num_lost_tokens == (0 if preemption == "swap" else 6 + 7)


def test_equals_do_not_push_each_other_out():
    engine = fake_engine("chunked", ordering="priority", max_num_seqs=1, ageing_s=0.01)
    first = engine.add([1, 2], SamplingParams(max_tokens=30), priority=1)
    engine.step()
    equal = engine.add([3], SamplingParams(max_tokens=2), priority=1)
    engine.step()
    assert first.num_preemptions == 0 and first.num_output_tokens == 2
    engine.abort(equal.request_id)
    soon = engine.add([4], SamplingParams(max_tokens=2), priority=0)  # less than ageing_s after the first
    engine.clock.advance(1.0)
    late = engine.add([5], SamplingParams(max_tokens=2), priority=0)
    engine.step()
    assert first.num_preemptions == 1 and soon.num_output_tokens == 1
    while engine.scheduler.has_work():
        engine.step()
    assert first.num_preemptions == 1  # more urgent is not enough: `late` came more than ageing_s after it
    assert first.finish_time < late.finish_time


# shortest prompt first


def test_short_prompts_overtake_long_ones_for_a_while():
    def times(ageing_s):
        engine = fake_engine(
            "chunked", ordering="shortest-prompt", ageing_s=ageing_s, max_num_seqs=1, max_model_len=256, num_blocks=99
        )
        todo = [request("long", 200, 2, at=0.001)]
        todo += [request(f"short{i}", 5, 4, at=0.008 * i) for i in range(100)]
        engine.run(todo)
        return [r.request_id for r in sorted(todo, key=lambda r: r.first_scheduled_time)].index("long")

    # (200 - 5) / 1,000 x 1 s: what comes in the first 0.196 s overtakes it, and that is 25 requests.
    assert times(1.0) == 25
    assert times(1e-6) == 1  # as fcfs
    assert times(1e6) == 100


# fair share


def shares(rows_of, *, steps: int, name="chunked", warm_up: int = 0, **knobs) -> dict[str, float]:
    """Each tenant's service in `steps` steps after `warm_up` ones; in all of them everybody has requests waiting."""
    engine = stub_engine(name, ordering="fair-share", **knobs)
    todo = sorted(rows_of, key=lambda r: r.arrival_time)
    arrivals, start = iter(todo), 0.0
    following = next(arrivals)
    for i in range(warm_up + steps):
        if not engine.scheduler.has_work():
            engine.clock.sleep_until(following.arrival_time)
        while following is not None and following.arrival_time <= engine.clock.now():
            engine.submit(following)
            following = next(arrivals, None)
        if i == warm_up:
            start = engine.clock.now()
        if i >= warm_up:
            assert {r.tenant for r in engine.scheduler.waiting} == {r.tenant for r in todo}, "somebody has no backlog"
        engine.step()
    return service(engine, todo, start, engine.clock.now())


def burst(tenant: str, n: int, prompt: int, output: int, seed: int, at: float = 0.0) -> list[Request]:
    rng = random.Random(seed)
    return [
        request(f"{tenant}{i}", rng.randint(1, 2 * prompt), rng.randint(1, 2 * output), at=at, tenant=tenant)
        for i in range(n)
    ]


@pytest.mark.parametrize("name", ["continuous", "chunked"])
@pytest.mark.parametrize(
    "a, b",
    [
        ((3000, 50, 20), (3000, 50, 20)),
        ((9000, 5, 4), (900, 400, 30)),  # short questions, long documents
        ((9000, 20, 2), (900, 20, 150)),  # short answers, long answers
        ((9000, 8, 8), (600, 300, 120)),
    ],
)
def test_two_saturating_tenants_share_within_five_per_cent(name, a, b):
    rows_of = burst("a", *a, seed=1) + burst("b", *b, seed=2)
    served = shares(rows_of, steps=2_500, name=name, max_num_seqs=16, max_num_batched_tokens=128)
    assert abs(served["a"] - served["b"]) < 0.05 * max(served.values()), served


def test_ten_times_the_requests_buy_nothing():
    rows_of = poisson("a", 40, 60, 30, 30.0, seed=1) + poisson("b", 400, 60, 30, 30.0, seed=2)
    served = shares(rows_of, steps=900, warm_up=100, max_num_seqs=16, max_num_batched_tokens=256)
    assert abs(served["a"] - served["b"]) < 0.05 * max(served.values()), served


def test_who_comes_later_has_no_claim_on_the_past():
    """From when the second tenant comes on they share evenly, though the first has had all until then."""
    rows_of = burst("a", 6_000, 40, 20, seed=1) + burst("b", 3_000, 40, 20, seed=2, at=15.0)
    served = shares(rows_of, steps=800, warm_up=1_200, max_num_seqs=16, max_num_batched_tokens=128)
    assert abs(served["a"] - served["b"]) < 0.05 * max(served.values()), served


def test_who_was_away_has_no_claim_on_the_time_away():
    rows_of = burst("a", 6_000, 40, 20, seed=1) + burst("b", 100, 40, 20, seed=2)
    rows_of += [request(f"again{i}", 40, 20, at=30.0, tenant="b") for i in range(2_000)]
    served = shares(rows_of, steps=700, warm_up=2_400, max_num_seqs=16, max_num_batched_tokens=128)
    assert abs(served["a"] - served["b"]) < 0.05 * max(served.values()), served


@pytest.mark.parametrize(
    "name, engine_class",
    [
        ("continuous", Engine),
        ("chunked", Engine),
        ("continuous", AheadEngine),
        ("chunked", AheadEngine),
    ],
)
def test_every_token_is_charged_once(name, engine_class):
    num_preemptions = 0
    for seed in range(10):
        rng = random.Random(seed)
        todo = [request(f"r{i}", rng.randint(1, 12), rng.randint(1, 20)) for i in range(8)]
        options = {"num_blocks": 9, "max_num_batched_tokens": rng.randint(1, 12)}
        engine = fake_engine(name, engine_class=engine_class, ordering="fair-share", **options)
        engine.run(todo)
        num_preemptions += sum(r.num_preemptions for r in todo)
        asked = sum(PROMPT_WEIGHT * r.num_prompt_tokens + OUTPUT_WEIGHT * r.num_output_tokens for r in todo)
        assert engine.scheduler.waiting.counters == {"default": asked}
    assert num_preemptions > 10


def test_ever_new_tenants_do_not_keep_an_old_one_out():
    engine = stub_engine("chunked", ordering="fair-share", max_num_seqs=4, max_num_batched_tokens=128)
    old = [request(f"old{i}", 40, 30, tenant="old") for i in range(30)]
    for r in old:
        engine.submit(r)
    for _ in range(60):  # it has the machine for itself
        engine.step()
    let_in = []
    for step in range(1500):  # more than can be served, each from somebody never seen before
        if step % 7 == 0:
            engine.submit(request(f"new{step}", 40, 30, at=engine.clock.now(), tenant=f"new{step}"))
        engine.step()
        let_in.append(sum(r.first_scheduled_time is not None for r in old))
    assert len(engine.scheduler.waiting) > 20
    assert let_in[500] < let_in[1000] < let_in[1499] < 30


def p99_ttft(ordering: str, rate_of_b: float) -> float:
    """Tenant a's 99th percentile of TTFT (seconds). It sends 20 requests a second, of the 47 that can be served."""
    todo = poisson("a", 20, 60, 20, 25.0, seed=1)
    todo += poisson("b", rate_of_b, 60, 20, 25.0, seed=2) if rate_of_b else []
    todo.sort(key=lambda r: r.arrival_time)
    engine = stub_engine("chunked", ordering=ordering, max_num_seqs=16, max_num_batched_tokens=256)
    for r in todo:
        while engine.scheduler.has_work() and engine.clock.now() < r.arrival_time:
            engine.step()
        engine.clock.sleep_until(r.arrival_time)
        engine.submit(r)
    mine = [r for r in todo if r.tenant == "a"]
    while not all(r.token_times for r in mine):
        engine.step()
    return float(np.percentile([r.token_times[0] - r.arrival_time for r in mine], 99))


def test_a_flood_from_one_tenant_hardly_moves_the_other():
    """Tenant a stays within its half. Tenant b's normal load, 40 requests a second, is more than what a leaves of the
    machine, so b always has a backlog; the flood is ten times that.

    Against a machine that a has for itself it does wait longer: all slots are held when it comes. A share is no lane.
    """
    alone, normal, flood = (p99_ttft("fair-share", rate) for rate in (0, 40, 400))
    assert abs(flood / normal - 1) < 0.10
    assert 2 * alone < normal < 1.0
    normal, flood = (p99_ttft("fcfs", rate) for rate in (40, 400))
    assert flood > 10 * normal
