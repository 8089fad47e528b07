"""Whatever a client does when told of a token, everybody hears each of their tokens, in order, and one right end."""

from __future__ import annotations

import warnings

import pytest
from faulty import ENGINES, PAGED, answer, check_usable, check_whole, faulty_engine, requests

from minibatcher.errors import OutOfMemory
from minibatcher.request import FinishReason, Request, SamplingParams
from minibatcher.stepping import Output

ACTS = {
    "step": lambda engine: engine.step(),
    "steps": lambda engine: [engine.step() for _ in range(5)],
    "steps until all have ended": lambda engine: drain(engine),
    "abort": lambda engine: engine.abort("r3"),
    "abort and step": lambda engine: (engine.abort("r0"), engine.step(), engine.abort("r4")),
    "abort all": lambda engine: engine.abort_all(),
    "abort all and begin anew": lambda engine: (engine.abort_all(), engine.reset()),
}


def drain(engine) -> None:
    for _ in range(500):
        if not engine.has_work():
            return
        engine.step()
        if engine.idle:
            engine._wait()
    raise AssertionError("it never ends")


class Listeners:
    """Hear all requests; whoever hears its `at`-th output acts."""

    def __init__(self, engine, acts: dict[tuple[str, int], object]) -> None:
        self.engine, self.acts = engine, acts
        self.heard: dict[str, list[Output]] = {}

    def __call__(self, output: Output) -> None:
        outputs = self.heard.setdefault(output.request_id, [])
        outputs.append(output)
        act = self.acts.get((output.request_id, len(outputs)))
        if act is not None:
            act(self.engine)

    def check(self, todo: list[Request]) -> None:
        for request in todo:
            outputs = self.heard[request.request_id]
            assert [o.token_id for o in outputs if o.token_id is not None] == request.output_token_ids
            assert request.output_token_ids == answer(request)[: request.num_output_tokens]
            assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)
            assert outputs[-1].finish_reason is request.finish_reason is not None
            assert (outputs[-1].token_id is None) == (request.finish_reason is FinishReason.ABORT)


@pytest.mark.parametrize("name, engine_class", ENGINES)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("at", [1, 2, 5])
def test_nobody_misses_a_token_or_hears_a_wrong_end(name, engine_class, act, at):
    """5 is the last token of r1, so then it has ended."""
    engine, todo = faulty_engine(name, engine_class), requests(6)
    listeners = Listeners(engine, {("r1", at): ACTS[act]})
    for request in todo:
        engine.submit(request, listeners)
    drain(engine)
    listeners.check(todo)
    assert len(listeners.heard["r1"]) >= at
    check_usable(engine)


@pytest.mark.parametrize("name, engine_class", ENGINES)
def test_all_may_step_whenever_they_are_told(name, engine_class):
    """Nor do they pile up on the stack: each is told when the one before has returned."""
    engine, todo, depth = faulty_engine(name, engine_class), requests(6), []
    listeners = Listeners(engine, {})

    def stepping(output: Output) -> None:
        listeners(output)
        assert not depth
        depth.append(output)
        engine.step()
        depth.pop()

    for request in todo:
        engine.submit(request, stepping)
    drain(engine)
    listeners.check(todo)
    check_usable(engine)


@pytest.mark.parametrize("name, engine_class", ENGINES)
def test_a_step_within_a_step_returns_its_own_ends_alone(name, engine_class):
    """What `step` returns says of each request once that it has ended, however steps are nested."""
    engine, todo, returned = faulty_engine(name, engine_class), requests(5), []

    def stepping(output: Output) -> None:
        returned.append(engine.step())

    for request in todo:
        engine.submit(request, stepping if request.request_id == "r1" else None)
    while engine.has_work():
        returned.append(engine.step())
    for request in todo:
        mine = [output for outputs in returned for output in outputs if output.request_id == request.request_id]
        assert sorted(output.token_id for output in mine) == sorted(answer(request))
        ends = [output for output in mine if output.finish_reason is not None]
        assert [(output.token_id, output.finish_reason) for output in ends] == [(answer(request)[-1], "length")]


@pytest.mark.parametrize("name, engine_class", ENGINES)
@pytest.mark.parametrize("at", [1, 2, 5])
def test_one_that_acts_and_fails_is_told_no_more(name, engine_class, at):
    """Also of what a step of its own has brought meanwhile, be it the end: then nobody has got that."""

    def act(engine) -> None:
        for _ in range(6):
            engine.step()
        raise BrokenPipeError("the client is gone")

    engine, todo = faulty_engine(name, engine_class, keep_going=True), requests(6)
    listeners = Listeners(engine, {("r1", at): act})
    for request in todo:
        engine.submit(request, listeners)
    with pytest.warns(RuntimeWarning, match="its on_output callback failed: BrokenPipeError") as told:
        drain(engine)
    assert len(told) == 1 and len(listeners.heard["r1"]) == at
    assert todo[1].finish_reason == "error" and "the client is gone" in todo[1].error
    assert engine.timeline.requests["r1"].finish_reason == "error"
    listeners.check([request for request in todo if request is not todo[1]])
    check_usable(engine)


@pytest.mark.parametrize("name, engine_class", PAGED)
@pytest.mark.parametrize("act", ACTS)
def test_requests_too_large_for_a_pool_that_shrinks_end_once(name, engine_class, act):
    """The callback of the first aborts the others, or goes on with them."""
    engine = faulty_engine(name, engine_class, {3: ("after", OutOfMemory("20 GiB"))}, keep_going=True, num_blocks=8)
    todo = [Request(f"r{i}", [1, 2, 3, i], SamplingParams(max_tokens=25 if i != 1 else 6)) for i in range(5)]
    heard: dict[str, list[Output]] = {}

    def heard_by(output: Output) -> None:
        heard.setdefault(output.request_id, []).append(output)
        if output.finish_reason is FinishReason.ERROR and len(heard[output.request_id]) == 2:
            ACTS[act](engine)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for request in todo:
            engine.submit(request, heard_by)
        drain(engine)
    for request in todo:
        reasons = [output.finish_reason for output in heard[request.request_id] if output.finish_reason]
        assert reasons == [request.finish_reason]
    assert [todo[i].finish_reason for i in (0, 2, 3, 4)] == ["error"] * 4
    check_whole(engine)


def test_failures_of_two_aborts_are_told_when_the_first_has_returned():
    """The second is aborted by the callback of the first, and must not take its failure for its own."""
    engine, heard = faulty_engine("chunked"), []

    def first(output: Output) -> None:
        heard.append(output)
        engine.abort("r1")
        heard.append("went on")

    def second(output: Output) -> None:
        raise BrokenPipeError("the client is gone")

    todo = requests(3)
    for request, callback in zip(todo, [first, second, None]):
        engine.submit(request, callback)
    with pytest.raises(BrokenPipeError):
        engine.abort("r0")
    assert heard[1:] == ["went on"] and [r.finish_reason for r in todo] == ["abort", "abort", None]
    drain(engine)
    check_usable(engine)
