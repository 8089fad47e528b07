"""Whatever fails, and wherever: the requests that it had to cost end with a sentence, all others get their answers."""

from __future__ import annotations

import gc
import signal
import sys
import warnings
from collections import Counter
from itertools import pairwise

import pytest
from fakes import MemoryRunner, Promise, fake_engine, solo_answer
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.ahead import AheadEngine
from minibatcher.engine import Engine, Output
from minibatcher.errors import OutOfMemory, PlanError, RequestFailed
from minibatcher.kv import BlockKV, PrefixKV, SlotKV
from minibatcher.limits import Limits, TenantLimit
from minibatcher.request import Request, SamplingParams
from minibatcher.tally import Tally

ENGINES = [
    *((name, Engine) for name in ("solo", "static", "dynamic", "continuous", "chunked")),
    *((name, AheadEngine) for name in ("continuous", "chunked")),
]
PAGED = [pair for pair in ENGINES if pair[0] in ("continuous", "chunked")]
SETUPS = {
    "plain": {},
    "short": {"num_blocks": 9},
    "prefix": {"num_blocks": 9, "enable_prefix_caching": True},
    "swap": {"num_blocks": 9, "preemption": "swap"},
    "prefix and swap": {"num_blocks": 9, "enable_prefix_caching": True, "preemption": "swap", "swap_tokens": 24},
    "priority": {"num_blocks": 9, "ordering": "priority", "preemption": "swap"},
    "fair share": {"num_blocks": 9, "ordering": "fair-share", "admission": "optimistic"},
}
CASES = [
    (name, engine_class, setup)
    for name, engine_class in ENGINES
    for setup in (SETUPS if (name, engine_class) in PAGED else ["plain"])
]


class Faulty(MemoryRunner):
    """Fails as told. faults: number of the call (from 1) → (where, exception).

    where: "before" or "after" the tokens are written, or "result", when they are asked for.
    """

    def __init__(self, kv, faults=()) -> None:
        super().__init__(kv)
        self.faults, self.num_calls, self.failed, self.released = dict(faults), 0, [], []

    def run(self, plan):
        return self.launch(plan).result()

    def launch(self, plan) -> Promise:
        self.num_calls += 1
        where, error = self.faults.get(self.num_calls, (None, None))
        if where == "before":
            self._fail(plan, error)
        promise = Promise(super().run(plan))
        if where == "after":
            self._fail(plan, error)
        if where == "result":
            promise.result = lambda: self._fail(plan, error)
        return promise

    def _fail(self, plan, error):
        self.failed.append(list(plan.num_tokens))
        raise error

    def release(self) -> None:
        """What was in the pool is gone, and the new one is as large as `kv` says."""
        self.released.append(self.kv.num_blocks)
        self.pool = [None] * (self.kv.num_blocks * self.kv.block_size)


def requests(n: int = 7) -> list[Request]:
    """They begin alike, so that there is something to share."""
    return [
        Request(
            f"r{i}",
            [1, 2, 3, 4, 5, 6, 7, 8, i % 3],
            SamplingParams(max_tokens=3 + 2 * i),
            priority=i % 3,
            tenant=f"t{i % 2}",
        )
        for i in range(n)
    ]


def faulty_engine(name, engine_class=Engine, faults=(), **options) -> Engine:
    knobs = {"max_num_seqs": 3, "block_size": 4, "max_model_len": 32, "batch_timeout_s": 0.0} | options
    engine = fake_engine(name, engine_class=engine_class, **knobs)
    engine.runner = Faulty(engine.scheduler.kv, faults)
    return engine


def answer(request: Request) -> list[int]:
    return solo_answer(list(request.prompt_token_ids), request.params.max_tokens)


def serve(engine: Engine, todo: list[Request], submit: bool = True) -> Counter:
    """Step until all have ended, checking after each; returns how often each has ended, as its callback was told."""
    ends: Counter = Counter()

    def heard(output: Output) -> None:
        ends[output.request_id] += output.finish_reason is not None

    for request in todo if submit else ():
        engine.submit(request, heard)
    for _ in range(2000):
        if not engine.scheduler.has_work():
            return ends
        engine.step()
        engine.scheduler.kv.check()
        if engine.idle:
            engine._wait()
    raise AssertionError("it never ends")


def check_whole(engine: Engine) -> None:
    scheduler = engine.scheduler
    scheduler.kv.check()
    assert not scheduler.has_work() and not engine.requests and scheduler.kv.num_used_blocks == 0
    assert not engine._callbacks and not engine._detokenizers
    assert scheduler.host is None or scheduler.host.num_used_blocks == 0
    assert sorted(scheduler._free_slots) == list(range(scheduler.config.max_num_seqs))


def check_usable(engine: Engine) -> None:
    check_whole(engine)
    engine.runner.faults = {}
    again = requests(5)
    engine.run(again)
    assert [r.output_token_ids for r in again] == [answer(r) for r in again]
    check_whole(engine)


def check_others(engine: Engine, todo: list[Request], failed: list[Request], ends: Counter) -> None:
    """`failed` ended with an error, having got right tokens until then; the others are served as if nothing was."""
    for request in todo:
        record = engine.timeline.requests[request.request_id]
        assert record.finish_reason == request.finish_reason and record.error == request.error
        if request in failed:
            assert request.finish_reason == "error" and request.error
            assert request.output_token_ids == answer(request)[: request.num_output_tokens]
        else:
            assert request.finish_reason == "length" and request.error is None
            assert request.output_token_ids == answer(request)
    assert ends == {request.request_id: 1 for request in todo}


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
        assert record.finish_reason == request.finish_reason and record.num_output_tokens == request.num_output_tokens
        assert request.output_token_ids == answer(request)[: len(request.token_times)]
    assert not engine._in_step and not engine._door._charged
    engine.scheduler.kv.check()
    if engine.scheduler.kv.num_blocks * engine.scheduler.kv.block_size >= 32:
        check_usable(engine)
    else:
        check_whole(engine)


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


# The device runs out of memory


@pytest.mark.parametrize("name, engine_class, setup", CASES)
@pytest.mark.parametrize("where", ["before", "after", "result"])
def test_out_of_memory_makes_the_pool_smaller_and_changes_no_answer(name, engine_class, setup, where):
    for call in (1, 2, 4, 7, 11):
        faults = {call: (where, OutOfMemory("20 GiB")), call + 1: (where, OutOfMemory("19 GiB"))}
        options = SETUPS[setup] | ({"num_blocks": 14} if "num_blocks" in SETUPS[setup] else {})
        engine = faulty_engine(name, engine_class, faults, max_num_seqs=4, **options | {"max_model_len": 24})
        before = engine.scheduler.kv.num_blocks
        todo = requests(6)
        with pytest.warns(RuntimeWarning, match="the KV pool shrinks from .* blocks: OutOfMemory: ") as told:
            ends = serve(engine, todo)
        assert f"shrinks from {before} to {int(0.8 * before)} blocks: OutOfMemory: 20 GiB" in str(told[0].message)
        check_others(engine, todo, [], ends)
        after = engine.scheduler.kv.num_blocks
        assert engine.runner.released == [int(0.8 * before), after] and after == int(0.8 * int(0.8 * before))
        told = engine.timeline.header["kv_shrunk"]
        sizes = [before, int(0.8 * before), after]
        assert [(t["from_blocks"], t["to_blocks"]) for t in told] == list(pairwise(sizes))
        assert told[0]["error"] == "20 GiB" and told[0]["time_s"] <= engine.clock.now()
        if name in ("static", "dynamic"):
            assert engine.scheduler.config.max_num_seqs == after
        assert all(len(step.rows) <= engine.timeline.num_slots for step in engine.timeline.steps)
        check_usable(engine)
        assert engine.timeline.header["num_blocks"] == after


@pytest.mark.parametrize("name, engine_class", PAGED)
def test_who_no_longer_fits_is_told_and_the_others_go_on(name, engine_class):
    engine = faulty_engine(name, engine_class, {4: ("before", OutOfMemory("20 GiB"))}, num_blocks=8, preemption="swap")
    todo = [*requests(5), Request("big", [5] * 10, SamplingParams(max_tokens=20))]
    with pytest.warns(RuntimeWarning, match="the KV pool shrinks from 8 to 6 blocks: OutOfMemory: 20 GiB"):
        ends = serve(engine, todo)
    assert "the device ran out of memory; request 'big' can never fit the KV pool" in todo[-1].error
    assert "need 8 blocks, have 6" in todo[-1].error
    check_others(engine, todo, todo[-1:], ends)
    check_whole(engine)


@pytest.mark.parametrize("kv", [BlockKV(8, 4), PrefixKV(8, 4), SlotKV(8, 32)])
def test_only_an_empty_pool_changes_its_size(kv):
    kv.allocate("a", 9)
    with pytest.raises(RuntimeError, match="1 requests still own KV blocks; free them before resize"):
        kv.resize(4)
    kv.free("a")
    kv.resize(4)
    kv.check()
    assert kv.num_free_blocks == kv.num_blocks == 4


@pytest.mark.parametrize("name, engine_class", ENGINES)
@pytest.mark.parametrize("keep_going", [False, True])
def test_after_three_such_steps_in_a_row_their_requests_end(name, engine_class, keep_going):
    faults = {call: ("before", OutOfMemory("20 GiB")) for call in (3, 4, 5, 6)}
    engine = faulty_engine(name, engine_class, faults, max_num_seqs=4, keep_going=keep_going)
    todo, raised = requests(), 0
    for request in todo:
        engine.submit(request)
    with pytest.warns(RuntimeWarning):
        while engine.scheduler.has_work():
            try:
                engine.step()
            except OutOfMemory:
                raised += 1
    assert raised == (0 if keep_going else 2)
    failed = [r for r in todo if r.error]
    assert set(failed) == {r for rows in engine.runner.failed[2:] for r in rows}
    assert {r.error for r in failed} == {"the step failed: OutOfMemory: 20 GiB"}
    assert len(engine.timeline.header["kv_shrunk"]) == 2
    check_others(engine, todo, failed, Counter(r.request_id for r in todo))
    check_usable(engine)


def test_a_good_step_between_begins_the_count_anew():
    faults = {call: ("before", OutOfMemory("20 GiB")) for call in (2, 3, 5, 6, 8)}
    engine = faulty_engine("chunked", faults=faults)
    with pytest.warns(RuntimeWarning):
        ends = serve(engine, todo := requests())
    check_others(engine, todo, [], ends)
    assert len(engine.timeline.header["kv_shrunk"]) == 5


def test_a_pool_of_one_block_can_not_shrink():
    engine = faulty_engine("static", faults={1: ("before", OutOfMemory("20 GiB"))}, max_num_seqs=1)
    engine.submit(request := requests(1)[0])
    with pytest.raises(OutOfMemory):
        engine.step()
    assert request.finish_reason == "error" and engine.scheduler.kv.num_blocks == 1
    check_usable(engine)


# The real runners


@pytest.fixture(scope="module")
def bard():
    pytest.importorskip("torch")
    from minibatcher import load_model

    return load_model("bard")


REAL = [
    {"strategy": "static", "max_num_seqs": 3},
    {"strategy": "continuous", "enable_prefix_caching": True, "preemption": "swap", "kv_cache_tokens": 128},
    {"strategy": "chunked", "plan_ahead": True, "kv_cache_tokens": 160},
]


@pytest.mark.parametrize("options", REAL)
def test_a_model_that_runs_out_of_memory_answers_as_ever_from_a_smaller_pool(bard, options):
    import torch

    def serve_all(engine: Engine) -> list[list[int]]:
        todo = [
            Request(
                f"r{i}", engine.encode("ROMEO: what is"[: 10 + i]), SamplingParams(max_tokens=8 + i, ignore_eos=True)
            )
            for i in range(4)
        ]
        engine.run(todo)
        return [request.output_token_ids for request in todo]

    options = {"max_model_len": 64, "batch_timeout_s": 0.0, "keep_going": False, **options}
    expected = serve_all(Engine.from_model(bard, **options))
    engine = Engine.from_model(bard, **options)
    launch, calls, before = engine.runner._launch, [], engine.scheduler.kv.num_blocks
    says = {
        3: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        7: RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    }

    def short(plan):
        calls.append(plan)
        if len(calls) in says:
            raise says[len(calls)]
        assert len(engine.runner.pool[0][0]) == engine.scheduler.kv.num_blocks
        return launch(plan)

    engine.runner._launch = short
    with pytest.warns(RuntimeWarning, match="the KV pool shrinks from .* blocks: OutOfMemory: "):
        assert serve_all(engine) == expected
    told = engine.timeline.header["kv_shrunk"]
    assert [t["from_blocks"] for t in told] == [before, int(0.8 * before)]
    assert "20 GiB" in told[0]["error"] and "DefaultCPUAllocator" in told[1]["error"]
    assert len(engine.runner.pool[0][0]) == int(0.8 * int(0.8 * before))
    check_whole(engine)


def test_what_is_out_of_memory_and_what_is_not(bard):
    import torch

    engine = Engine.from_model(bard, max_model_len=64, strategy="chunked")
    engine.submit(Request("r0", [1, 2, 3], SamplingParams(max_tokens=2)))
    plan = engine.scheduler.schedule(0.0)
    for error, kind in [
        (torch.OutOfMemoryError("CUDA"), OutOfMemory),
        (MemoryError(), OutOfMemory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), OutOfMemory),
        (RuntimeError("CUDA error: out of memory"), OutOfMemory),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
        (ValueError("out of memory"), ValueError),
    ]:
        engine.runner._launch = lambda plan, error=error: (_ for _ in ()).throw(error)
        with pytest.raises(kind) as info:
            engine.runner.launch(plan)
        assert type(info.value) is kind
        assert kind is not OutOfMemory or info.value.__context__ is None  # which would hold the step's tensors
    engine.runner.release()
    engine.scheduler.kv.num_blocks = 2**45
    with pytest.raises(OutOfMemory, match=r"a KV pool of .* GiB does not fit on cpu"):
        engine.runner.allocate()


def test_graphs_of_the_old_pool_are_dropped_with_it(bard):
    engine = Engine.from_model(bard, max_model_len=64, strategy="chunked")
    engine.runner.graphs = object()
    engine.runner.release()
    assert engine.runner.graphs is None and "pool" not in vars(engine.runner)


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
