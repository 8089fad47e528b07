"""What tells the strategies apart, in whole steps and tokens."""

from __future__ import annotations

import pytest
from fakes import fake_engine

from minibatcher.errors import InvalidParameter, UnknownName
from minibatcher.request import Request, SamplingParams
from minibatcher.scheduling import SchedulerConfig, WaitReason, strategy
from minibatcher.timeline import RowState


def run_until(engine, condition):
    while not condition():
        engine.step()


def decode_stall(name: str, **knobs) -> tuple[int, int]:
    """Two decodes run, a 96-token prompt arrives: (steps, tokens) in which the decodes got nothing."""
    engine = fake_engine(name, max_num_batched_tokens=16, max_num_seqs=3, max_model_len=256, num_blocks=99, **knobs)
    running = [engine.add([1, 2, 3], SamplingParams(max_tokens=60)) for _ in range(2)]
    run_until(engine, lambda: all(r.num_output_tokens >= 2 for r in running))
    newcomer = engine.add(list(range(96)), SamplingParams(max_tokens=2))
    before = len(engine.timeline.steps)
    run_until(engine, lambda: newcomer.num_output_tokens > 0)
    stalled = [
        step
        for step in engine.timeline.steps[before:]
        if all(row.state == RowState.STALLED for row in step.rows if row.request_id != newcomer.request_id)
    ]
    return len(stalled), sum(step.num_computed_tokens for step in stalled)


def test_a_long_prompt_stalls_decodes_unless_it_is_chunked_behind_them():
    assert decode_stall("continuous") == (1, 96)  # one step, but as long as 96 tokens take
    assert decode_stall("chunked") == (0, 0)
    assert decode_stall("chunked", prefill_first=True) == (6, 96)  # cut, yet served first: nothing is won


def test_chunked_fills_the_budget_with_decodes_then_prompt():
    engine = fake_engine("chunked", max_num_batched_tokens=16, max_num_seqs=3, max_model_len=256, num_blocks=99)
    for _ in range(2):
        engine.add([1, 2, 3], SamplingParams(max_tokens=60))
    engine.step()
    engine.add(list(range(96)), SamplingParams(max_tokens=2))
    engine.step()
    assert [(row.state, row.num_tokens) for row in engine.timeline.steps[-1].rows] == [
        (RowState.DECODE, 1),
        (RowState.DECODE, 1),
        (RowState.PREFILL, 14),
    ]


def test_static_batch_runs_until_its_last_request_ends():
    engine = fake_engine("static", max_num_seqs=4)
    timeline = engine.run(
        [
            Request(f"r{i}", [5] * p, SamplingParams(max_tokens=n))
            for i, (p, n) in enumerate([(3, 2), (7, 9), (1, 1), (2, 4), (4, 3)])
        ]
    )
    first, second = timeline.steps[:9], timeline.steps[9:]
    assert [step.width for step in first] == [7] + [1] * 8
    assert [step.num_computed_tokens for step in first] == [28] + [4] * 8
    assert first[0].num_padding_tokens == 28 - (3 + 7 + 1 + 2)
    assert [step.num_useful_tokens for step in first[1:]] == [3, 2, 2, 1, 1, 1, 1, 1]
    assert {row.request_id: row.state for row in first[-1].rows} == {
        "r0": RowState.FINISHED,
        "r1": RowState.DECODE,
        "r2": RowState.FINISHED,
        "r3": RowState.FINISHED,
    }
    assert [row.request_id for row in second[0].rows] == ["r4"]
    assert first[3].wait["reason"] == WaitReason.LAUNCHED.value


def test_static_waits_for_company_dynamic_does_not():
    rows = [([1] * 3, 0.0), ([2] * 3, 0.2), ([3] * 3, 5.0)]

    def batches(name, **knobs):
        engine = fake_engine(name, max_num_seqs=4, **knobs)
        timeline = engine.run(
            [Request(f"r{i}", p, SamplingParams(max_tokens=2), arrival_time=t) for i, (p, t) in enumerate(rows)]
        )
        return [(round(s.start, 2), s.admitted) for s in timeline.steps if s.admitted]

    assert batches("static", batch_timeout_s=0.5) == [(0.5, ["r0", "r1"]), (5.5, ["r2"])]
    assert batches("dynamic") == [(0.0, ["r0"]), (0.2, ["r1"]), (5.0, ["r2"])]
    assert batches("dynamic", max_queue_delay_s=0.3) == [(0.3, ["r0", "r1"]), (5.3, ["r2"])]


def test_full_static_batch_launches_before_its_timeout():
    engine = fake_engine("static", max_num_seqs=2, batch_timeout_s=9.0)
    timeline = engine.run([Request(f"r{i}", [1], SamplingParams(max_tokens=1), arrival_time=0.1 * i) for i in range(2)])
    assert timeline.steps[0].start == pytest.approx(0.1)


def test_buckets_lower_padding_but_not_the_wait_for_the_slowest():
    lengths, outputs = [3, 30, 4, 28, 5, 31, 2, 29], [1, 6, 16, 11, 1, 6, 11, 16]

    def padding(bucket):
        engine = fake_engine("dynamic", max_num_seqs=4, max_model_len=64, bucket_by_length=bucket)
        timeline = engine.run(
            [Request(f"r{i}", [9] * n, SamplingParams(max_tokens=m)) for i, (n, m) in enumerate(zip(lengths, outputs))]
        )
        steps = timeline.steps
        return sum(s.num_padding_tokens for s in steps if s.width > 1), len(steps)

    (plain, plain_steps), (bucketed, bucketed_steps) = padding(False), padding(True)
    assert plain == (30 * 4 - 65) + (31 * 4 - 67)
    assert bucketed == (5 * 4 - 14) + (31 * 4 - 118)
    assert plain_steps == bucketed_steps == 32  # each batch still runs as long as its longest answer


def test_continuous_refills_a_slot_in_the_next_step():
    engine = fake_engine("continuous", max_num_seqs=7, num_blocks=60)
    lengths = [9, 3, 9, 3, 9, 3, 9, 2, 2, 2]
    timeline = engine.run([Request(f"r{i}", [i], SamplingParams(max_tokens=n)) for i, n in enumerate(lengths)])
    index = next(i for i, step in enumerate(timeline.steps) if step.finished)
    assert timeline.steps[index].finished == ["r1", "r3", "r5"]
    assert timeline.steps[index + 1].admitted == ["r7", "r8", "r9"]
    slot = {row.request_id: row.slot for step in timeline.steps for row in step.rows}
    assert {slot["r1"], slot["r3"], slot["r5"]} == {slot["r7"], slot["r8"], slot["r9"]}
    assert timeline.steps[0].wait == {"request_id": "r7", "reason": WaitReason.SLOTS.value, "need": 1, "have": 0}


def test_a_short_request_is_done_after_its_own_number_of_iterations_whoever_is_beside_it():
    engine = fake_engine("continuous", max_num_seqs=4, num_blocks=999, max_model_len=500)
    rows = [Request("short", [1, 2], SamplingParams(max_tokens=20))]
    rows += [Request(f"long{i}", [3 + i], SamplingParams(max_tokens=400)) for i in range(3)]
    timeline = engine.run(rows)
    mine = [step for step in timeline.steps if any(row.request_id == "short" for row in step.rows)]
    assert len(mine) == 20


def test_kv_shortage_is_named_as_the_reason_to_wait():
    engine = fake_engine("chunked", num_blocks=4, block_size=4, max_num_seqs=3)
    engine.add([1] * 12, SamplingParams(max_tokens=3))
    engine.add([2] * 8, SamplingParams(max_tokens=2), request_id="second")
    engine.step()
    assert engine.timeline.steps[0].wait == {
        "request_id": "second",
        "reason": WaitReason.KV.value,
        "need": 2,
        "have": 1,
    }
    assert engine.timeline.waiting_at(0) == ["second"]


def test_unknown_strategy_lists_the_known_ones():
    with pytest.raises(UnknownName, match="unknown strategy 'orca'; known: solo, static, dynamic, continuous, chunked"):
        strategy("orca")


@pytest.mark.parametrize(
    "knobs",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": -1},
        {"max_num_seqs": 1.5},
        {"batch_timeout_s": -1.0},
        {"batch_timeout_s": "1"},
        {"max_queue_delay_s": float("nan")},
    ],
)
def test_bad_knobs_are_refused(knobs):
    with pytest.raises(InvalidParameter, match=next(iter(knobs))):
        SchedulerConfig(**knobs)
