"""Whatever arrives, whatever is aborted, however small the pool: nothing is lost, nothing leaks, nobody starves."""

from __future__ import annotations

import pytest
from fakes import fake_engine, next_token, solo_answer
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.ahead import AheadEngine
from minibatcher.engine import Engine
from minibatcher.errors import RequestRefused
from minibatcher.request import Request, SamplingParams
from minibatcher.scheduling import IN_BOOK, STRATEGIES  # whatever lies in scheduling/: a new file is tested unasked

requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 999), min_size=1, max_size=20),  # prompt
        st.integers(1, 15),  # max_tokens
        st.floats(0, 0.2),  # arrival
        st.none() | st.integers(1, 30),  # aborted before this step
    ),
    min_size=1,
    max_size=14,
)
knobs = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 40),
        "batch_timeout_s": st.sampled_from([0.0, 0.05]),
        "max_queue_delay_s": st.sampled_from([0.0, 0.03]),
        "bucket_by_length": st.booleans(),
        "prefill_first": st.booleans(),
    }
)


ENGINES = [*((name, Engine) for name in STRATEGIES), *((name, AheadEngine) for name in ("continuous", "chunked"))]


@pytest.mark.parametrize("name, engine_class", ENGINES)
@given(rows=requests, knobs=knobs, num_blocks=st.integers(9, 30), eos=st.sampled_from([(), tuple(range(0, 100))]))
def test_every_request_ends_once_with_its_solo_answer(name, engine_class, rows, knobs, num_blocks, eos):
    options = {"num_blocks": num_blocks, "block_size": 4, "max_model_len": 36, "eos": eos, **knobs}
    engine = fake_engine(name, engine_class=engine_class, **options)
    kv, scheduler = engine.scheduler.kv, engine.scheduler
    pending = sorted(
        (
            Request(f"r{i}", prompt, SamplingParams(max_tokens=n), arrival_time=t)
            for i, (prompt, n, t, _) in enumerate(rows)
        ),
        key=lambda r: r.arrival_time,
    )
    everybody, aborts = list(pending), {f"r{i}": row[3] for i, row in enumerate(rows) if row[3] is not None}
    ends: list[str] = []
    for iteration in range(3000):
        while pending and pending[0].arrival_time <= engine.clock.now():
            engine.submit(pending.pop(0))
        for request_id, when in aborts.items():
            if iteration == when and engine.abort(request_id):
                ends.append(request_id)
        if not pending and not scheduler.has_work():
            break
        num_steps = len(engine.timeline.steps)
        ends += [out.request_id for out in engine.step() if out.finish_reason is not None]

        kv.check()
        assert sum(kv.blocks_for(r.num_computed_tokens) for r in scheduler.running) <= kv.num_used_blocks
        assert len(scheduler.running) <= scheduler.config.max_num_seqs
        slots = [r.slot for r in scheduler.running]
        assert len(set(slots)) == len(slots) and all(0 <= s < scheduler.config.max_num_seqs for s in slots)
        if len(engine.timeline.steps) == num_steps:
            engine.clock.sleep_until(min([engine._wake_at or 9.0] + [r.arrival_time for r in pending[:1]]))
        else:
            step = engine.timeline.steps[-1]
            assert step.kv_used_blocks + step.kv_free_blocks == kv.num_blocks
            assert step.num_padding_tokens >= 0
            assert len({row.slot for row in step.rows}) == len(step.rows) and None not in {
                row.slot for row in step.rows
            }
            if name == "chunked":
                assert step.num_computed_tokens <= knobs["max_num_batched_tokens"]
    else:
        pytest.fail("requests still unfinished after 3,000 iterations")

    assert sorted(ends) == sorted(r.request_id for r in everybody)  # each exactly once
    assert kv.num_used_blocks == 0
    for request in everybody:
        expected = solo_answer(request.prompt_token_ids, request.params.max_tokens, eos)
        if request.finish_reason == "abort":
            assert request.output_token_ids == expected[: request.num_output_tokens]
        else:
            assert request.output_token_ids == expected
            assert request.finish_reason == ("stop" if expected[-1] in eos else "length")
        record = engine.timeline.requests[request.request_id]
        assert record.finish_reason == request.finish_reason and record.num_output_tokens == request.num_output_tokens
        assert record.token_times == sorted(record.token_times)


@pytest.mark.parametrize("name", ["continuous", "chunked"])
def test_preemption_happens_and_changes_no_answer(name):
    engine = fake_engine(name, num_blocks=9, block_size=4, max_num_seqs=4)
    rows = [Request(f"r{i}", [i, 7, i + 3, 1, 2], SamplingParams(max_tokens=20)) for i in range(4)]
    timeline = engine.run(rows)
    assert sum(r.num_preemptions for r in timeline.requests.values()) > 0
    assert [r.output_token_ids for r in rows] == [solo_answer(r.prompt_token_ids, 20) for r in rows]
    assert timeline.requests["r0"].num_preemptions == 0  # the oldest always gets its way


@pytest.mark.parametrize("name", [cls.name for cls in IN_BOOK])
def test_first_come_is_first_let_in(name):
    engine = fake_engine(name, max_num_seqs=3, num_blocks=20)
    rows = [Request(f"r{i}", list(range(i + 1)), SamplingParams(max_tokens=9 - i)) for i in range(8)]
    engine.run(rows)
    firsts = [r.first_scheduled_time for r in rows]
    assert firsts == sorted(firsts)


def test_a_request_that_can_never_fit_is_refused_with_numbers():
    engine = fake_engine("continuous", num_blocks=5, block_size=4, max_model_len=64)
    with pytest.raises(RequestRefused, match="need 7 blocks, have 5") as refusal:
        engine.add(list(range(10)), SamplingParams(max_tokens=15))
    assert (refusal.value.need, refusal.value.have) == (7, 5)
    with pytest.raises(RequestRefused, match="lower max_tokens to 14"):
        engine.add(list(range(50)), SamplingParams(max_tokens=15))
    with pytest.raises(RequestRefused, match="need 71 tokens, have 64"):
        engine.add(list(range(70)), SamplingParams(max_tokens=1))
    assert not engine.scheduler.has_work() and not engine.timeline.requests


def test_answers_depend_on_every_token():
    assert next_token([1, 2, 3]) != next_token([2, 1, 3])
