"""Planning the next step while the device works: the same answers, and what it changes."""

from __future__ import annotations

import pytest
from fakes import fake_engine, fake_requests, solo_answer

from minibatcher.ahead import AheadEngine
from minibatcher.engine import Engine
from minibatcher.request import Request, SamplingParams

OPTIONS = {"max_num_seqs": 3, "num_blocks": 60, "block_size": 4, "max_model_len": 200}


def requests(outputs: list[int]) -> list[Request]:
    return [Request(f"r{i}", [i, 5, 2 * i], SamplingParams(max_tokens=n)) for i, n in enumerate(outputs)]


def rows_of(timeline) -> list[list[tuple]]:
    return [[tuple(row) for row in step.rows if row.num_tokens] for step in timeline.steps]


@pytest.mark.parametrize("name", ["continuous", "chunked"])
def test_plans_are_the_same_where_lengths_are_known(name):
    """Nobody waits in vain: a request that reaches max_tokens has left when the next step is planned."""
    runs = []
    for engine_class in (Engine, AheadEngine):
        engine = fake_engine(name, engine_class=engine_class, **OPTIONS)
        todo = fake_requests(12, seed=3, longest=40)
        for request in todo:
            request.arrival_time = 0.0
        timeline = engine.run(todo)
        runs.append((rows_of(timeline), [r.output_token_ids for r in todo], timeline.duration))
    assert runs[0] == runs[1]


def test_a_stop_token_costs_the_place_of_one_step():
    eos = tuple(range(0, 1000, 7))
    plain, ahead = (
        fake_engine("continuous", engine_class=cls, eos=eos, **OPTIONS | {"max_num_seqs": 1})
        for cls in (Engine, AheadEngine)
    )
    answers = []
    for engine in (plain, ahead):
        todo = requests([30, 30, 30])
        engine.run(todo)
        answers.append([r.output_token_ids for r in todo])
        assert all(r.finish_reason == "stop" for r in todo)
    assert answers[0] == answers[1] == [solo_answer([i, 5, 2 * i], 30, eos) for i in range(3)]
    # The only slot: its plan is void once the stop token is known, and the next request is planned for afresh.
    assert rows_of(plain.timeline) == rows_of(ahead.timeline)
    plain, ahead = (
        fake_engine("continuous", engine_class=cls, eos=eos, **OPTIONS | {"max_num_seqs": 2})
        for cls in (Engine, AheadEngine)
    )
    for engine in (plain, ahead):
        engine.run(requests([30, 30, 30, 30]))
    entered = [[s.index for s in engine.timeline.steps if "r2" in s.admitted] for engine in (plain, ahead)]
    assert entered[1][0] == entered[0][0] + 1


def test_the_plan_is_made_between_launch_and_result():
    engine = fake_engine("chunked", engine_class=AheadEngine, **OPTIONS)
    told: list[str] = []
    schedule, launch = engine.scheduler.schedule, engine.runner.launch

    def noted_launch(plan):
        told.append("launch")
        promise = launch(plan)
        result = promise.result
        promise.result = lambda: told.append("result") or result()
        return promise

    engine.scheduler.schedule = lambda now: told.append("plan") or schedule(now)
    engine.runner.launch = noted_launch
    engine.run(requests([3]))
    assert told == ["plan", *["launch", "plan", "result"] * 3]


@pytest.mark.parametrize("when", ["launch", "result"])
def test_a_failing_step_ends_its_own_requests_alone(when):
    engine = fake_engine("continuous", engine_class=AheadEngine, **OPTIONS | {"max_num_seqs": 2})
    launch, count = engine.runner.launch, 0

    def failing(plan):
        nonlocal count
        count += 1
        if count < 4:
            return launch(plan)
        if when == "launch":
            raise RuntimeError("the device is gone")
        promise = launch(plan)

        def lost():
            raise RuntimeError("the device is gone")

        promise.result = lost
        return promise

    engine.runner.launch = failing
    todo = requests([4, 9, 5])  # the first would reach its end in the very step that fails
    for request in todo:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    engine.runner.launch = launch
    assert [r.finish_reason for r in todo] == ["error", "error", None]
    assert todo[0].error == "the step failed: RuntimeError: the device is gone"
    while engine.scheduler.has_work():
        engine.step()
    assert todo[2].output_token_ids == solo_answer(list(todo[2].prompt_token_ids), 5)
    engine.scheduler.kv.check()
    assert engine.scheduler.kv.num_used_blocks == 0 and not engine.requests


def test_an_abort_between_steps_strikes_the_plan():
    engine = fake_engine("chunked", engine_class=AheadEngine, **OPTIONS)
    todo = requests([9, 9, 9, 9])
    for request in todo:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    assert engine.abort("r1") and engine.abort("r3")
    while engine.scheduler.has_work():
        engine.step()
    assert [r.finish_reason for r in todo] == ["length", "abort", "length", "abort"]
    assert todo[1].num_output_tokens == 3 and todo[3].num_output_tokens == 0
    assert engine.scheduler.kv.num_used_blocks == 0
