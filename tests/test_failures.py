"""Whatever fails, and wherever: the requests that it had to cost end with a sentence, all others get their answers."""

from __future__ import annotations

import gc
import signal
import sys
import warnings
from collections import Counter

import pytest
from fakes import solo_answer
from faulty import (
    CASES,
    ENGINES,
    PAGED,
    SETUPS,
    answer,
    check_others,
    check_usable,
    check_whole,
    faulty_engine,
    requests,
    serve,
)
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.ahead import AheadEngine
from minibatcher.engine import Engine
from minibatcher.errors import OutOfMemory, PlanError, RequestFailed, RequestRefused
from minibatcher.limits import Limits, TenantLimit
from minibatcher.request import Request, SamplingParams
from minibatcher.stepping import Output
from minibatcher.tally import Tally


@pytest.mark.parametrize("name, engine_class, setup", CASES)
@pytest.mark.parametrize("where", ["before", "after", "result"])
def test_a_failing_step_costs_its_own_requests_alone(name, engine_class, setup, where):
    for call in (1, 2, 4, 7, 11):
        faults = {call: (where, ValueError("bad kernel")), call + 3: (where, RuntimeError("the device\nis gone"))}
        engine = faulty_engine(name, engine_class, faults, keep_going=True, **SETUPS[setup])
        todo = requests()
        with pytest.warns(RuntimeWarning, match="the step failed: "):
            ends = serve(engine, todo)
        failed = [r for r in todo if r.error]
        served_before = [r for rows in engine.runner.failed for r in rows if not r.error]  # rows of a static batch
        assert set(failed) | set(served_before) == {r for rows in engine.runner.failed for r in rows} and failed
        assert not served_before or name in ("static", "dynamic", "solo")
        assert {r.error for r in failed} <= {
            "the step failed: ValueError: bad kernel",
            "the step failed: RuntimeError: the device\nis gone",
        }
        check_others(engine, todo, failed, ends)
        check_usable(engine)


@pytest.mark.parametrize("name, engine_class", PAGED)
@pytest.mark.parametrize("error", [ValueError("bad kernel"), OutOfMemory("20 GiB")])
def test_who_was_to_be_swapped_out_by_a_failing_step_is_computed_again(name, engine_class, error):
    """The copy may not have been made, so what lies in host memory is worth nothing."""
    engine = faulty_engine(name, engine_class, keep_going=True, num_blocks=11, preemption="swap", max_model_len=24)
    launch, swapped = engine.runner.launch, []

    def failing(plan):
        if not swapped and any(swap.out for swap in plan.swaps):
            swapped.extend(swap.request for swap in plan.swaps)
            raise error
        return launch(plan)

    engine.runner.launch = failing
    todo = requests(6)
    with pytest.warns(RuntimeWarning):
        ends = serve(engine, todo)
    assert swapped and not any(request.error for request in swapped)
    assert all(request.num_lost_tokens > 0 for request in swapped)
    check_others(engine, todo, [request for request in todo if request.error], ends)
    check_usable(engine)


@pytest.mark.parametrize("name, engine_class", ENGINES)
def test_without_keep_going_a_failure_is_raised_and_the_rest_can_go_on(name, engine_class):
    engine = faulty_engine(name, engine_class, {3: ("after", ValueError("bad kernel"))})
    todo = requests()
    for request in todo:
        engine.submit(request)
    engine.step()
    engine.step()
    with pytest.raises(ValueError, match="bad kernel"):
        engine.step()
    failed = [r for r in engine.runner.failed[0] if r.error]
    assert failed and all(r.finished for r in failed)
    serve(engine, todo, submit=False)
    check_others(engine, todo, failed, Counter(r.request_id for r in todo))
    check_usable(engine)


@pytest.mark.parametrize("name, engine_class", ENGINES)
def test_a_run_raises_it_once_nobody_is_left(name, engine_class):
    engine = faulty_engine(name, engine_class, {3: ("after", ValueError("bad kernel"))})
    todo = requests()
    with pytest.raises(ValueError, match="bad kernel"):
        engine.run(todo)
    records = engine.timeline.requests.values()
    assert {r.finish_reason for r in records} <= {"error", "abort", "length"} and engine.timeline.header["interrupted"]
    assert sum(r.finish_reason == "error" for r in records) > 0
    check_usable(engine)


def test_with_keep_going_a_run_serves_the_others_and_warns_once():
    faults = {call: ("after", ValueError("bad kernel")) for call in (2, 4)} | {6: ("after", TypeError("worse"))}
    engine = faulty_engine("chunked", faults=faults, keep_going=True, max_num_seqs=2)
    todo = requests()
    with pytest.warns(RuntimeWarning) as told:
        timeline = engine.run(todo)
    assert [str(w.message) for w in told] == [
        "the step failed: ValueError: bad kernel (said once in a run)",
        "the step failed: TypeError: worse (said once in a run)",
    ]
    reasons = Counter(record.finish_reason for record in timeline.requests.values())
    assert set(reasons) == {"error", "length"} and sum(reasons.values()) == 7 and "interrupted" not in timeline.header
    check_usable(engine)


@pytest.mark.parametrize("name, engine_class", ENGINES)
@pytest.mark.parametrize("garbage", [None, 5, "tokens"])
def test_a_runner_that_returns_no_result_has_failed(name, engine_class, garbage):
    engine = faulty_engine(name, engine_class, keep_going=True)
    run, launch = engine.runner.run, engine.runner.launch
    engine.runner.run = lambda plan: garbage if len(engine.timeline.steps) == 2 else run(plan)

    def launched(plan):
        promise = launch(plan)
        if len(engine.timeline.steps) == 2:
            promise.result = lambda: garbage
        return promise

    engine.runner.launch = launched
    todo = requests(4)
    with pytest.warns(RuntimeWarning, match="the step failed: AttributeError"):
        serve(engine, todo)
    assert all(r.error or r.output_token_ids == answer(r) for r in todo) and todo[0].error
    check_whole(engine)


# A tokenizer, a client or a recorder that fails


class Words:
    """A detokenizer of numbers that fails where it is told: "add" at a token, "finish" at the end."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.stopped, self.count = fails, None, 0

    def add(self, token_id: int) -> str:
        self.count += 1
        if self.fails == "add" and self.count == 2:
            raise UnicodeError("half a letter")
        return f"{token_id} "

    def finish(self) -> str:
        if self.fails == "finish":
            raise UnicodeError("half a letter")
        return "."


class Tokenizer:
    """Its n-th detokenizer fails as `fails` says."""

    def __init__(self, fails: dict[int, str] | None = None) -> None:
        self.fails, self.count = fails or {}, -1

    def detokenizer(self, stop, min_tokens) -> Words:
        self.count += 1
        if self.fails.get(self.count) == "make":
            raise UnicodeError("no letters")
        return Words(self.fails.get(self.count, ""))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if text == "bad":
            raise UnicodeError("not a letter")
        return [ord(c) for c in text]


@pytest.mark.parametrize("name, engine_class", ENGINES)
@pytest.mark.parametrize("fails", ["add", "finish"])
def test_a_detokenizer_that_fails_costs_its_own_request_alone(name, engine_class, fails):
    engine = faulty_engine(name, engine_class, keep_going=True)
    engine.tokenizer = Tokenizer({1: fails, 4: fails})
    todo = requests(6)
    with pytest.warns(RuntimeWarning, match="its text failed: UnicodeError: half a letter"):
        ends = serve(engine, todo)
    assert todo[1].num_output_tokens == (2 if fails == "add" else 5)
    check_others(engine, todo, [todo[1], todo[4]], ends)
    for request in todo:
        text = "".join(f"{token} " for token in request.output_token_ids) + "."
        assert request.output_text == text or request.error
    engine.tokenizer = None
    check_usable(engine)


def test_text_that_can_not_be_read_is_no_request():
    engine = faulty_engine("chunked")
    engine.tokenizer = Tokenizer({0: "make"})
    with pytest.raises(UnicodeError, match="not a letter"):
        engine.add("bad")
    with pytest.raises(UnicodeError, match="no letters"):
        engine.submit(requests(1)[0])
    assert not engine.timeline.requests
    check_whole(engine)


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_run_ends_a_request_whose_detokenizer_can_not_be_made(keep_going):
    engine = faulty_engine("chunked", keep_going=keep_going)
    engine.tokenizer, todo = Tokenizer({2: "make"}), requests(5)
    if keep_going:
        with pytest.warns(RuntimeWarning, match="its text failed: UnicodeError: no letters"):
            engine.run(todo)
        check_others(engine, todo, [todo[2]], Counter(r.request_id for r in todo))
    else:
        with pytest.raises(UnicodeError):
            engine.run(todo)
    assert engine.timeline.requests["r2"].finish_reason == "error"
    engine.tokenizer = None
    check_usable(engine)


@pytest.mark.parametrize("name, engine_class", ENGINES)
@pytest.mark.parametrize("keep_going", [False, True])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_callback_that_fails_costs_its_own_request_alone(name, engine_class, keep_going, at):
    """Also at its last token (5): then nobody has got it."""
    engine, heard = faulty_engine(name, engine_class, keep_going=keep_going), []

    def fragile(output: Output) -> None:
        heard.append(output)
        if len(heard) == at:
            raise BrokenPipeError("the client is gone")

    todo = requests(5)
    for request in todo:
        engine.submit(request, fragile if request.request_id == "r1" else None)
    raised = 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        while engine.scheduler.has_work():
            try:
                engine.step()
            except BrokenPipeError:
                raised += 1
            engine.scheduler.kv.check()
    assert (raised, len(told)) == ((0, 1) if keep_going else (1, 0))
    assert len(heard) == at  # and then no more
    assert todo[1].error == "its on_output callback failed: BrokenPipeError: the client is gone"
    assert todo[1].num_output_tokens == at
    check_others(engine, todo, [todo[1]], Counter(r.request_id for r in todo))
    check_usable(engine)


@pytest.mark.parametrize("name, engine_class", ENGINES)
def test_a_callback_hears_each_token_and_one_end(name, engine_class):
    engine = faulty_engine(name, engine_class, {9: ("before", ValueError("bad"))}, keep_going=True)
    engine.tokenizer = Tokenizer()
    heard: dict[str, list[Output]] = {}
    todo = requests()
    for request in todo:
        engine.submit(request, lambda output: heard.setdefault(output.request_id, []).append(output))
    engine.step()
    engine.abort("r6")
    with pytest.warns(RuntimeWarning):
        serve(engine, todo, submit=False)
    reasons = set()
    for request in todo:
        outputs = heard[request.request_id]
        assert [o.token_id for o in outputs if o.token_id is not None] == request.output_token_ids
        assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason == request.finish_reason
        assert (outputs[-1].token_id is None) == (request.finish_reason != "length")
        assert "".join(o.text for o in outputs) == request.output_text
        reasons.add(request.finish_reason.value)
    assert reasons == {"length", "error", "abort"}


@pytest.mark.parametrize("name, engine_class", ENGINES)
@pytest.mark.parametrize("act", ["abort itself", "abort another", "abort all", "add", "step", "abort and raise"])
def test_a_callback_may_call_the_engine(name, engine_class, act):
    engine, seen = faulty_engine(name, engine_class, keep_going=True), []
    todo, extra = requests(6), Request("extra", [9, 9], SamplingParams(max_tokens=4))

    def caller(output: Output) -> None:
        seen.append(output)
        if len(seen) != 2:
            return
        if act == "abort itself":
            assert engine.abort("r1")
        elif act == "abort another":
            engine.abort("r2")
        elif act == "abort all":
            engine.abort_all()
        elif act == "add":
            engine.submit(extra)
        elif act == "step":
            engine.step()
        else:
            engine.abort("r1")
            raise ValueError("gone")

    for request in todo:
        engine.submit(request, caller if request.request_id == "r1" else None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        serve(engine, todo, submit=False)
    assert len(told) == (act == "abort and raise")
    gone = {"abort itself": ["r1"], "abort and raise": ["r1"], "abort another": ["r2"]}.get(act, [])
    for request in [*todo, *([extra] if act == "add" else [])]:
        if act == "abort all" and request.finish_reason == "abort":
            continue
        if request.request_id in gone:
            assert request.finish_reason == "abort"
        else:
            assert request.output_token_ids == answer(request)
        assert engine.timeline.requests[request.request_id].finish_reason == request.finish_reason
    check_usable(engine)


@pytest.mark.parametrize("name, engine_class", ENGINES)
def test_what_failed_before_in_the_same_step_is_not_blamed_on_a_callback(name, engine_class):
    engine, heard = faulty_engine(name, engine_class), []

    def failing(output: Output) -> None:
        raise BrokenPipeError("the client is gone")

    def caller(output: Output) -> None:
        heard.append(output)
        engine.abort("r4")

    todo = requests(5)
    for request, callback in zip(todo, [failing, caller, None, None, None]):
        engine.submit(request, callback)
    raised = 0
    while engine.scheduler.has_work():
        try:
            engine.step()
        except BrokenPipeError:
            raised += 1
    assert raised == 1 and len(heard) == 5
    assert [r.finish_reason for r in todo] == ["error", "length", "length", "length", "abort"]
    check_usable(engine)


@pytest.mark.parametrize("name, engine_class", ENGINES)
@pytest.mark.parametrize("act", ["abort", "abort_all"])
def test_at_its_last_token_a_request_can_no_longer_be_aborted(name, engine_class, act):
    engine, closed, ended = faulty_engine(name, engine_class), Counter(), []
    close = engine.recorder.closed
    engine.recorder.closed = lambda request: (closed.update([request.request_id]), close(request))

    def late(output: Output) -> None:
        ended.append(output.finish_reason)
        if output.finish_reason:
            assert engine.abort("r1") is False if act == "abort" else engine.abort_all() is None

    todo = requests(5)
    for request in todo:
        engine.submit(request, late if request.request_id == "r1" else None)
    serve(engine, todo, submit=False)
    assert todo[1].finish_reason == "length" and todo[1].output_token_ids == answer(todo[1]) and len(ended) == 5
    assert closed == {request.request_id: 1 for request in todo}
    check_usable(engine)


def test_abort_all_does_not_raise_what_callbacks_do():
    engine = faulty_engine("chunked")
    for request in requests(3):
        engine.submit(request, lambda output: 1 / 0)
    with pytest.warns(RuntimeWarning, match="its on_output callback failed: ZeroDivisionError") as told:
        engine.abort_all()
    assert len(told) == 1
    check_usable(engine)


@pytest.mark.parametrize("name, engine_class", [("static", Engine), ("chunked", Engine), ("chunked", AheadEngine)])
@pytest.mark.parametrize("recorder", ["timeline", "tally"])
@pytest.mark.parametrize("method", ["opened", "launched", "stepped", "closed"])
@pytest.mark.parametrize("when", [(1,), (3,), tuple(range(1, 400))])
def test_a_recorder_that_fails_costs_nobody_anything(name, engine_class, recorder, method, when):
    engine = faulty_engine(name, engine_class, keep_going=True)
    if recorder == "tally":
        engine.recorder = Tally()
        engine.reset()
    write, calls = getattr(engine.recorder, method), []

    def failing(*args):
        calls.append(args)
        if len(calls) in when:
            raise OSError("disk full")
        return write(*args)

    setattr(engine.recorder, method, failing)
    todo = requests()
    with pytest.warns(RuntimeWarning, match="the recorder failed: OSError: disk full") as told:
        timeline = engine.run(todo)
    assert len(told) == 1 and len(calls) >= min(len(when), 7)
    assert [r.output_token_ids for r in todo] == [answer(r) for r in todo]
    if recorder == "timeline" and when == (3,):
        ended = [r.request_id for r in timeline.requests.values() if r.finish_reason == "length"]
        assert len(ended) == (6 if method == "closed" else 7)  # the record has a gap, and no more than that
        assert [step.index for step in timeline.steps] == list(range(len(timeline.steps)))
        assert len(timeline.steps) == engine.runner.num_calls - (method in ("launched", "stepped"))
    if recorder == "tally" and when == (3,):
        figures, missing = timeline.summary(), method in ("launched", "stepped")
        assert figures["num_steps"] == engine.runner.num_calls - missing
        assert figures["num_finished"]["length"] == 7 - (method == "closed")
    setattr(engine.recorder, method, write)
    check_usable(engine) if recorder == "timeline" else check_whole(engine)


@pytest.mark.parametrize("method", ["opened", "launched", "stepped", "closed"])
def test_a_recorder_that_fails_is_raised_after_the_step(method):
    engine = faulty_engine("chunked")
    todo, raised = requests(3), 0

    def failing(*args):
        raise OSError("disk full")

    setattr(engine.recorder, method, failing)
    for request in todo:
        try:
            engine.submit(request)
        except OSError:
            raised += 1
    while engine.scheduler.has_work():
        try:
            engine.step()
        except OSError:
            raised += 1
    assert raised >= 3 and [r.output_token_ids for r in todo] == [answer(r) for r in todo]
    check_whole(engine)


@pytest.mark.parametrize("name, engine_class", ENGINES)
@pytest.mark.parametrize("when", [1, 4])
def test_a_scheduler_that_fails_is_raised_and_leaves_the_engine_usable(name, engine_class, when):
    engine = faulty_engine(name, engine_class, keep_going=True)
    schedule, calls = engine.scheduler.schedule, []

    def failing(now):
        calls.append(now)
        plan = schedule(now)  # its state has changed by then
        if len(calls) == when:
            raise KeyError("r0")
        return plan

    engine.scheduler.schedule = failing
    todo = requests()
    for request in todo:
        engine.submit(request)
    with pytest.raises(KeyError):
        for _ in range(9):
            engine.step()
    engine.abort_all()
    assert all(r.finish_reason in ("abort", "length") for r in todo)
    assert all(r.output_token_ids == answer(r)[: r.num_output_tokens] for r in todo)
    check_usable(engine)
    calls.clear()
    with pytest.raises(KeyError):
        engine.run(requests())  # cleans up by itself
    check_usable(engine)


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_queue_that_fails_is_raised_and_leaves_the_engine_usable(keep_going):
    engine = faulty_engine("chunked", keep_going=keep_going)
    add = engine.scheduler.add
    engine.scheduler.add = lambda request: 1 / 0 if request.request_id == "r3" else add(request)
    todo = requests()
    with pytest.raises(ZeroDivisionError):
        engine.run(todo)
    assert [r.finish_reason for r in todo] == ["abort"] * 4 + [None] * 3
    engine.scheduler.add = add
    check_usable(engine)


def test_who_can_never_be_served_ends_a_run_of_an_iterator():
    engine = faulty_engine("chunked", keep_going=True)
    with pytest.raises(RequestRefused, match="could outgrow the context"):
        engine.run(iter([*requests(2), Request("big", [1] * 9, SamplingParams(max_tokens=99))]))
    assert "big" not in engine.timeline.requests
    check_usable(engine)


def test_a_plan_that_breaks_the_contract_is_raised_although_it_keeps_going():
    engine = faulty_engine("chunked", keep_going=True)
    engine.scheduler._has_room = lambda request, num_tokens: True
    with pytest.raises(PlanError, match="allocate room for them first"):
        engine.run(requests())
    del engine.scheduler._has_room
    check_usable(engine)


# Interrupts


def interrupting(line: int):
    """A trace function that interrupts before so many more lines of ours have run."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if "minibatcher" not in frame.f_code.co_filename:
            return None
        seen += event == "line"
        if seen == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("name, engine_class, setup", CASES)
@given(data=st.data())
def test_interrupts_anywhere_leave_nobody_behind(name, engine_class, setup, data):
    """Between any two lines, without `run`, in the middle of other failures, and again while all are aborted."""
    errors = st.sampled_from([ValueError("bad"), OutOfMemory("20 GiB")])
    fault = st.tuples(st.sampled_from(["before", "after", "result"]), errors)
    faults = data.draw(st.dictionaries(st.integers(1, 12), fault, max_size=3))
    limits = Limits(tenants={"*": TenantLimit(tokens_per_s=0, burst_tokens=10_000)})
    options = SETUPS[setup] | ({"num_blocks": 14} if "num_blocks" in SETUPS[setup] else {}) | {"limits": limits}
    engine, todo = faulty_engine(name, engine_class, faults, keep_going=True, **options), requests(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sys.settrace(interrupting(data.draw(st.integers(1, 2500))))
            for request in todo:
                engine.submit(request, lambda output: None)
            engine.abort("r2")
            for _ in range(12):
                if engine.scheduler.has_work():
                    engine.step()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        try:
            sys.settrace(interrupting(data.draw(st.integers(1, 200))))
            engine.abort_all()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        engine.abort_all()
    for request in todo:
        if not request.finished:  # it was never let in
            assert request.request_id not in engine.timeline.requests and request.is_fresh
            continue
        record = engine.timeline.requests[request.request_id]
        assert record.finish_reason == request.finish_reason
        assert record.num_output_tokens == request.num_output_tokens == len(request.output_token_ids)
        assert request.output_token_ids == answer(request)[: len(request.token_times)] and request.slot is None
    assert not engine._in_step and not engine._door.queue.charged
    engine.scheduler.kv.check()
    if engine.scheduler.kv.num_blocks * engine.scheduler.kv.block_size >= 32:
        check_usable(engine)
    else:
        check_whole(engine)


def test_a_torn_queue_is_no_obstacle():
    """As an interrupt leaves it between taking a tenant's last request and forgetting its queue."""
    engine = faulty_engine("chunked", ordering="fair-share")
    for request in requests(6):
        engine.submit(request)
    engine.scheduler.waiting._queues["t0"].clear()
    engine.abort_all()
    check_usable(engine)


def test_an_interrupt_inside_a_runner_or_a_callback_aborts_all():
    for where in ("runner", "callback"):
        engine = faulty_engine("chunked", faults={3: ("after", KeyboardInterrupt())} if where == "runner" else {})
        outputs = []

        def interrupted(output, outputs=outputs, where=where):
            outputs.append(output)
            if where == "callback" and len(outputs) == 3:
                signal.raise_signal(signal.SIGINT)

        todo = requests(5)
        for request in todo:
            engine.submit(request, interrupted)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(9):
                engine.step()
        assert {r.finish_reason for r in todo} == {"abort"}
        check_usable(engine)


# Streams


def streaming_engine(**options) -> Engine:
    engine = faulty_engine("chunked", **options)
    engine.tokenizer = Tokenizer()
    return engine


def test_a_stream_that_nobody_reads_is_bounded_and_holds_nobody_up():
    engine = streaming_engine(max_num_seqs=2)
    unread = engine.stream("ab", SamplingParams(max_tokens=6))
    others = [engine.add("cd", SamplingParams(max_tokens=9)) for _ in range(3)]
    while engine.scheduler.has_work():
        engine.step()
    check_whole(engine)
    assert all(r.output_token_ids == solo_answer([99, 100], 9) for r in others)
    assert "".join(unread) == "".join(f"{t} " for t in solo_answer([97, 98], 6)) + "."  # all of it is still there


@pytest.mark.parametrize("how", ["close", "drop"])
@pytest.mark.parametrize("read", [0, 2])
def test_a_stream_that_is_closed_or_dropped_aborts_its_request(how, read):
    engine = streaming_engine()
    stream, other = engine.stream("ab", SamplingParams(max_tokens=9)), engine.stream("ab", SamplingParams(max_tokens=9))
    for _ in range(read):
        next(stream)
    if how == "close":
        stream.close()
    del stream
    gc.collect()
    assert engine.timeline.requests["request-0"].finish_reason == "abort" and list(engine.requests) == ["request-1"]
    assert "".join(other) == "".join(f"{token} " for token in solo_answer([97, 98], 9)) + "."
    check_whole(engine)


def test_a_stream_dropped_in_the_middle_of_a_step_waits_for_its_end():
    """A garbage collection may come at any moment."""
    engine = streaming_engine()
    streams = [engine.stream("ab", SamplingParams(max_tokens=5)) for _ in range(3)]
    schedule = engine.scheduler.schedule

    def dropping(now):
        plan = schedule(now)
        if len(engine.timeline.steps) == 2:
            streams.pop(1).close()
            assert "request-1" in engine.requests  # not yet: the plan has a place for it
        return plan

    engine.scheduler.schedule = dropping
    while engine.scheduler.has_work():
        engine.step()
    assert [r.finish_reason for r in engine.timeline.requests.values()] == ["length", "abort", "length"]
    assert engine.timeline.requests["request-1"].num_output_tokens == 3
    check_whole(engine)


def test_an_old_stream_does_not_abort_the_new_holder_of_its_id():
    engine = streaming_engine()
    old = engine.stream("ab", SamplingParams(max_tokens=3))
    engine.abort_all()
    engine.reset()
    new = engine.add("ab", SamplingParams(max_tokens=3), request_id="request-0")
    old.close()
    assert not new.finished and engine.requests


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_stream_tells_that_its_request_has_failed(keep_going):
    engine = streaming_engine(faults={3: ("after", ValueError("bad kernel"))}, keep_going=keep_going)
    stream = engine.stream("ab", SamplingParams(max_tokens=9))
    text = next(stream) + next(stream)
    assert text.split() == [str(t) for t in solo_answer([97, 98], 2)]
    if keep_going:
        with (
            pytest.warns(RuntimeWarning),
            pytest.raises(RequestFailed, match="the step failed: ValueError: bad kernel"),
        ):
            next(stream)
    else:
        with pytest.raises(ValueError, match="bad kernel"):
            next(stream)
    check_whole(engine)


# All at once


@pytest.mark.parametrize("name, engine_class", ENGINES)
@given(data=st.data())
def test_nothing_is_lost_whatever_fails_in_whatever_order(name, engine_class, data):
    """Random requests, knobs, aborts and failures: each request ends once, with a right answer or a right beginning."""
    knobs = {"max_num_seqs": data.draw(st.integers(1, 5)), "max_num_batched_tokens": data.draw(st.integers(4, 40))}
    if (name, engine_class) in PAGED:
        knobs |= {
            "num_blocks": data.draw(st.integers(9, 24)),
            "enable_prefix_caching": data.draw(st.booleans()),
            "preemption": data.draw(st.sampled_from(["recompute", "swap"])),
            "swap_tokens": data.draw(st.sampled_from([None, 16, 64])),
            "admission": data.draw(st.sampled_from(["worst-case", "optimistic", "preempt"])),
            "ordering": data.draw(st.sampled_from(["fcfs", "shortest-prompt", "priority", "fair-share"])),
        }
    errors = st.sampled_from([ValueError("bad"), OutOfMemory("20 GiB")])
    fault = st.tuples(st.sampled_from(["before", "after", "result"]), errors)
    faults = data.draw(st.dictionaries(st.integers(1, 40), fault, max_size=6))
    aborts = data.draw(st.dictionaries(st.integers(1, 30), st.integers(0, 7), max_size=4))
    engine = faulty_engine(name, engine_class, faults, keep_going=True, **knobs)
    scheduler, todo, ends = engine.scheduler, requests(8), Counter()
    late = data.draw(st.integers(0, 20))

    def heard(output: Output) -> None:
        ends[output.request_id] += output.finish_reason is not None

    for request in todo[:5]:
        engine.submit(request, heard)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3000):
            if step == late:
                for request in todo[5:]:
                    if scheduler.kv.blocks_for(request.max_total_tokens) <= scheduler.kv.num_blocks:
                        engine.submit(request, heard)
            if step > late and not scheduler.has_work():
                break
            if step in aborts:
                engine.abort(f"r{aborts[step]}")
            engine.step()
            scheduler.kv.check()
            if scheduler.host is not None:
                scheduler.host.check()
            held = [r for r in engine.requests.values() if r.slot is not None]
            assert sorted(r.slot for r in held) == sorted(r.slot for r in scheduler.running if not r.finished)
            if engine.idle and scheduler.has_work():
                engine._wait()
        else:
            raise AssertionError("it never ends")
    submitted = [r for r in todo if r.finished]
    assert ends == {r.request_id: 1 for r in submitted} and len(submitted) >= 5
    for request in submitted:
        assert request.output_token_ids == answer(request)[: request.num_output_tokens]
        assert (request.finish_reason == "length") == (request.num_output_tokens == request.params.max_tokens)
        assert (request.error is not None) == (request.finish_reason == "error")
        assert engine.timeline.requests[request.request_id].finish_reason == request.finish_reason
    check_whole(engine)
