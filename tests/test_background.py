"""An engine in a thread of its own: nothing lost, nothing torn, and it ends when told."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
from fakes import fake_engine, solo_answer

from minibatcher.ahead import AheadEngine
from minibatcher.background import LONGEST_SLEEP_S, BackgroundRun
from minibatcher.clock import VirtualClock, WallClock
from minibatcher.engine import Engine
from minibatcher.errors import InvalidParameter, PlanError, RequestRefused
from minibatcher.limits import Limits, TenantLimit
from minibatcher.request import Request, SamplingParams


def requests(n: int = 6, gap: float = 0.0) -> list[Request]:
    return [Request(f"r{i}", [i, 7], SamplingParams(max_tokens=5 + i), arrival_time=i * gap) for i in range(n)]


def slow_engine(name="continuous", seconds=0.002, **options) -> Engine:
    """On the wall's clock, with steps that take a while and let other threads run."""
    engine = fake_engine(name, max_num_seqs=2, **options)
    engine.clock = WallClock()
    run = engine.runner.run
    engine.runner.run = lambda plan: time.sleep(seconds) or run(plan)
    return engine


@pytest.mark.parametrize("name", ["static", "dynamic", "continuous", "chunked"])
def test_it_serves_as_run_does(name):
    engine, todo = fake_engine(name, max_num_seqs=2), requests(gap=0.01)
    run = BackgroundRun(engine, todo)
    run.start()
    assert run.wait(20) and run.error is None and not run.running
    assert [r.output_token_ids for r in todo] == [solo_answer([i, 7], 5 + i) for i in range(6)]
    again = requests(gap=0.01)
    expected = fake_engine(name, max_num_seqs=2).run(again)
    assert [step.rows for step in run.timeline.steps] == [step.rows for step in expected.steps]
    assert "interrupted" not in run.timeline.header


def test_what_is_looked_at_is_whole():
    """Between two steps the record of the steps and that of the requests agree, whoever asks and whenever."""
    engine, torn, looks = slow_engine(seconds=0.0005), [], []

    def look():
        tokens = sum(len(r.output_token_ids) for r in engine.timeline.requests.values())
        sampled = sum(row.context >= 2 for step in engine.timeline.steps for row in step.rows if row.num_tokens)
        looks.append(len(engine.timeline.steps))
        if tokens != sampled or engine.scheduler.kv.num_used_blocks != sum(r.slot is not None for r in todo):
            torn.append((tokens, sampled))

    todo = [Request(f"r{i}", [i, 7], SamplingParams(max_tokens=2)) for i in range(120)]
    run = BackgroundRun(engine, todo, observe=lambda timeline: look(), every_s=0.0)
    run.start()
    askers = [threading.Thread(target=lambda: [run.call(look) for _ in range(40)]) for _ in range(3)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    run.wait()
    assert not torn and run.error is None and len(looks) > 120


def test_observations_are_few_and_the_last_sees_all():
    seen = []
    run = BackgroundRun(slow_engine(), requests(), lambda timeline: seen.append(len(timeline.steps)), every_s=1000.0)
    run.start()
    run.wait()
    assert len(seen) == 2 and seen[-1] == len(run.timeline.steps)


def test_stop_ends_what_is_left_and_keeps_what_was_done():
    engine, todo = slow_engine(), requests(40)
    run = BackgroundRun(engine, todo)
    run.start()
    while run.call(lambda: len(engine.timeline.steps)) < 9:
        time.sleep(0.001)
    run.stop()
    assert not run.running and run.error is None and run.timeline.header["interrupted"]
    reasons = [record.finish_reason for record in run.timeline.requests.values()]
    assert "length" in reasons and "abort" in reasons and None not in reasons
    assert engine.scheduler.kv.num_used_blocks == 0 and not engine.requests
    for request in todo:
        assert request.output_token_ids == solo_answer(list(request.prompt_token_ids), 99)[: request.num_output_tokens]


def test_stop_while_it_waits_for_an_arrival_is_prompt():
    run = BackgroundRun(slow_engine(), [Request("late", [1], SamplingParams(max_tokens=1), arrival_time=60.0)])
    run.start()
    begun = time.perf_counter()
    run.stop()
    assert time.perf_counter() - begun < 5 and not run.running


def test_abort_takes_one_and_leaves_the_others():
    engine, todo = slow_engine(), requests(6)
    run = BackgroundRun(engine, todo)
    run.start()
    assert run.abort("r1") and not run.abort("r1") and not run.abort("nobody")
    run.wait()
    assert [r.finish_reason for r in todo] == ["length", "abort", "length", "length", "length", "length"]
    assert not run.abort("r5")  # it has ended; nobody serves any more, and that is no error


def test_a_failing_step_is_told_and_costs_nobody_else_anything():
    engine, todo = slow_engine(), requests(6)
    working, failures = engine.runner.run, []

    def failing(plan):
        if len(engine.timeline.steps) == 4 and not failures:
            failures.append(plan)
            raise RuntimeError("the device is gone")
        return working(plan)

    engine.runner.run = failing
    with pytest.warns(RuntimeWarning, match="the step failed: RuntimeError: the device is gone"):
        run = BackgroundRun(engine, todo)
        run.start()
        run.wait()
    assert run.error is None and not run.running and "interrupted" not in run.timeline.header
    assert not engine.keep_going  # as it was before
    for i, request in enumerate(todo):
        if request in failures[0].num_tokens:
            assert request.finish_reason == "error" and "the device is gone" in request.error
        else:
            assert request.output_token_ids == solo_answer([i, 7], 5 + i)
    assert 0 < len(failures[0].num_tokens) < 6 and engine.scheduler.kv.num_used_blocks == 0


def test_a_recorder_that_fails_does_not_pass_for_idleness():
    """Steps that leave no record are steps all the same."""
    engine, todo = slow_engine(), requests(6)
    engine.recorder.launched = lambda *_: 1 / 0
    with pytest.warns(RuntimeWarning, match="the recorder failed: ZeroDivisionError"):
        run = BackgroundRun(engine, todo)
        run.start()
        run.wait()
    assert run.error is None and not engine.timeline.steps
    assert [r.output_token_ids for r in todo] == [solo_answer([i, 7], 5 + i) for i in range(6)]


def test_who_finds_the_queue_full_does_not_end_the_run():
    engine, todo = slow_engine(limits=Limits(max_waiting_requests=3)), requests(6)
    run = BackgroundRun(engine, todo)
    run.start()
    run.wait()
    assert run.error is None
    assert [r.finish_reason for r in todo] == ["length"] * 3 + ["refused"] * 3
    assert "the queue has no room for request 'r5'" in run.timeline.requests["r5"].error


def test_a_last_arrival_that_is_refused_does_not_end_the_run_with_an_error():
    engine = fake_engine("continuous", limits=Limits(tenants={"*": TenantLimit(tokens_per_s=0, burst_tokens=10)}))
    todo = [Request(f"r{i}", [1, 2], SamplingParams(max_tokens=8), arrival_time=9.0 * i) for i in range(2)]
    run = BackgroundRun(engine, todo)
    run.start()
    assert run.wait(20) and run.error is None and "interrupted" not in run.timeline.header
    assert [r.finish_reason for r in todo] == ["length", "refused"]


def after_the_last_step(run: BackgroundRun, act) -> None:
    """Have `act` handed in by another thread at the moment when nothing is left to serve."""
    step = run.engine.step

    def stepping():
        outputs = step()
        if all(request.finished for request in run._requests):
            run.engine.step = step
            hander = threading.Thread(target=act)
            hander.start()
            while run._jobs.empty() and hander.is_alive():
                time.sleep(0.001)
        return outputs

    run.engine.step = stepping


@pytest.mark.parametrize("burst", [15, 9])
def test_a_request_that_is_handed_in_at_the_last_moment_is_served(burst):
    """Also if the last to arrive is refused, and nothing was there to run."""
    limits = Limits(tenants={"default": TenantLimit(tokens_per_s=0, burst_tokens=burst)})
    run = BackgroundRun(slow_engine(limits=limits), requests(2, gap=0.05))
    extra = Request("extra", [3, 4], SamplingParams(max_tokens=4), tenant="other")
    after_the_last_step(run, lambda: run.post(lambda: run.engine.submit(extra)))
    run.start()
    assert run.wait(20) and run.error is None
    assert extra.output_token_ids == solo_answer([3, 4], 4) and "interrupted" not in run.timeline.header


def test_a_request_that_is_handed_in_when_all_are_aborted_is_aborted_too():
    """No more steps are coming, so it must not wait for one."""
    engine, extra, heard = slow_engine(), Request("extra", [3, 4], SamplingParams(max_tokens=4)), []
    run, abort_all = BackgroundRun(engine, requests(40)), engine.abort_all

    def aborting():
        engine.abort_all = abort_all
        abort_all()
        run._jobs.put((lambda: engine.submit(extra, heard.append), Future()))

    engine.abort_all = aborting
    run.start()
    run.stop()
    assert run.error is None and extra.finish_reason == "abort" and run.timeline.header["interrupted"]
    assert [output.finish_reason for output in heard] == ["abort"] and not engine.has_work()


def test_callbacks_and_functions_may_use_it_themselves():
    """They run in the serving thread, which must not wait for itself."""
    engine, answers = slow_engine(), []
    run = BackgroundRun(engine, requests(3))

    def nested():
        engine.submit(extra, lambda output: answers.append(run.call(lambda: len(engine.timeline.steps))))
        run.post(lambda: answers.append("posted"))
        return run.call(lambda: "called")

    extra = Request("extra", [3, 4], SamplingParams(max_tokens=4))
    run.start()
    assert run.call(nested) == "called" and "posted" in answers
    assert run.wait(20) and run.error is None and extra.finish_reason == "length" and len(answers) == 5


@pytest.mark.parametrize("raises", [2, 99])
def test_whatever_a_callback_raises_the_run_ends_and_answers(raises):
    engine, heard = slow_engine(), []
    run = BackgroundRun(engine, requests(3))

    def leaving(output):
        heard.append(output)
        if len(heard) <= raises:
            raise SystemExit("gone")

    def submit_some():
        for i in range(4):
            engine.submit(Request(f"extra{i}", [3, i], SamplingParams(max_tokens=4)), leaving)

    run.start()
    run.call(submit_some)
    assert run.wait(20) and isinstance(run.error, SystemExit) and run.call(lambda: 5) == 5
    assert not engine.requests and not engine.scheduler.has_work()
    if raises == 2:  # once in a step, and again while all are aborted: the others hear of their end all the same
        assert sum(output.finish_reason is not None for output in heard) == 4


def test_a_function_that_raises_raises_at_its_caller_alone():
    run = BackgroundRun(slow_engine(), requests())
    run.start()
    with pytest.raises(ZeroDivisionError):
        run.call(lambda: 1 / 0)
    run.wait()
    assert run.error is None


def test_a_scheduler_that_never_plans_ends_the_run_with_a_sentence():
    engine = slow_engine()
    from minibatcher.scheduling import StepPlan

    engine.scheduler.schedule = lambda now: StepPlan()
    run = BackgroundRun(engine, requests())
    run.start()
    assert run.wait(20) and isinstance(run.error, PlanError)


def test_refusals_come_before_the_thread():
    with pytest.raises(RequestRefused):
        BackgroundRun(slow_engine(), [Request("big", [1] * 60, SamplingParams(max_tokens=60))]).start()
    run = BackgroundRun(slow_engine(), requests(1))
    run.start()
    run.wait()
    with pytest.raises(InvalidParameter, match="started before"):
        run.start()


def test_it_plans_ahead_too():
    engine, todo = fake_engine("chunked", engine_class=AheadEngine, max_num_seqs=2), requests()
    run = BackgroundRun(engine, todo)
    run.start()
    run.wait()
    assert run.error is None
    assert [r.output_token_ids for r in todo] == [solo_answer([i, 7], 5 + i) for i in range(6)]


class FakeWait:
    """Stands for the event that ends an idle sleep: nobody sleeps before `let`, and none may poll."""

    def __init__(self, run: BackgroundRun) -> None:
        self.timeouts: list[float | None] = []
        self.asleep = threading.Event()
        self._woken, run._woken = run._woken, self

    def set(self) -> None:
        self._woken.set()

    def clear(self) -> None:
        self._woken.clear()

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        self.asleep.set()
        assert self._woken.wait(15), "nobody has woken it"  # whatever it was told; that ends the run with an error
        self.asleep.clear()
        return True


def kept_open(engine=None, todo=(), **options) -> tuple[BackgroundRun, FakeWait]:
    run = BackgroundRun(engine or slow_engine(), todo, keep_open=True, **options)
    wait = FakeWait(run)
    run.start()
    assert wait.asleep.wait(20)
    return run, wait


@pytest.mark.parametrize("engine_class", [Engine, AheadEngine])
@pytest.mark.parametrize("clock", [WallClock, VirtualClock])
def test_a_run_that_is_kept_open_sleeps_until_it_is_woken(clock, engine_class):
    engine = fake_engine("continuous", engine_class=engine_class, max_num_seqs=2)
    engine.clock = clock()
    run, wait = kept_open(engine)
    done = threading.Event()
    for i in range(3):
        heard, extra = [], Request(f"extra{i}", [i, 7], SamplingParams(max_tokens=4))
        done.clear()
        run.post(lambda: engine.submit(extra, lambda output: heard.append(output) or len(heard) < 4 or done.set()))  # noqa: B023
        assert done.wait(20) and extra.output_token_ids == solo_answer([i, 7], 4)
        assert run.call(lambda: 5 + i) == 5 + i  # noqa: B023
        assert wait.asleep.wait(20) and run.running
    assert set(wait.timeouts) == {None} and len(wait.timeouts) <= 7  # once at first, once after each that was handed in
    run.stop()
    assert not run.running and run.error is None and "interrupted" not in run.timeline.header


def test_stop_wakes_it_and_aborts_what_is_left():
    run, _ = kept_open()
    run.stop()
    assert not run.running and run.error is None and run.call(lambda: 5) == 5
    late = Request("late", [1, 7], SamplingParams(max_tokens=4), arrival_time=1000.0)
    run, wait = kept_open(todo=[late])
    assert 900 < wait.timeouts[0] <= 1000  # until it arrives, and not a moment less
    run.stop()
    assert not run.running and run.error is None and not late.finished  # it has never arrived


def test_a_stop_between_two_sleeps_is_not_lost():
    """It comes while the loop is busy: the loop must look for it before it sleeps."""
    run = BackgroundRun(slow_engine(), keep_open=True)
    wait, step = FakeWait(run), run.engine.step
    run.engine.step = lambda: run.request_stop() or step()
    run.start()
    assert run.wait(20) and not wait.timeouts


def test_it_sleeps_until_the_scheduler_wants_to_be_asked_again():
    """A static batch that is not full waits for its time; what is posted meanwhile is done at once."""
    engine = slow_engine("static", batch_timeout_s=500.0)
    run, wait = kept_open(engine)
    todo = [Request(f"r{i}", [i, 7], SamplingParams(max_tokens=4)) for i in range(2)]
    run.call(lambda: engine.submit(todo[0]))
    while len(wait.timeouts) < 2 or not wait.asleep.is_set():
        time.sleep(0.001)
    assert 400 < wait.timeouts[-1] <= 500 and not todo[0].output_token_ids
    done = threading.Event()
    run.post(lambda: engine.submit(todo[1], lambda output: output.finish_reason and done.set()))
    assert done.wait(20)  # the batch is full
    run.stop()
    assert [request.output_token_ids for request in todo] == [solo_answer([i, 7], 4) for i in range(2)]


def test_an_observer_of_an_idle_run_is_told_again():
    seen = []
    run, wait = kept_open(observe=lambda timeline: seen.append(timeline), every_s=1e-9)
    run.post(lambda: None)
    run.stop()
    assert set(wait.timeouts) == {LONGEST_SLEEP_S} and len(seen) >= 2


def test_who_observes_each_step_wakes_no_idle_run():
    seen = []
    run, wait = kept_open(observe=lambda timeline: seen.append(len(timeline.steps)), every_s=0.0)
    run.call(lambda: run.engine.submit(Request("r", [3, 7], SamplingParams(max_tokens=3))))
    while not run.call(lambda: run.engine.timeline.requests["r"].finish_reason):
        pass
    run.stop()
    assert set(wait.timeouts) == {None} and set(seen) >= {1, 2, 3}


def test_a_flood_of_functions_does_not_keep_requests_waiting():
    """Those that are handed in while others run wait until after the next step."""
    engine, order = slow_engine(seconds=0.0), []
    run, _ = kept_open(engine)
    step = engine.step

    def noted_step():
        order.append("step")
        return step()

    def again():
        order.append("job")
        if order.count("job") < 20:
            run._hand_in(again)  # as another thread would

    def begin():
        engine.step = noted_step
        engine.submit(Request("r", [3, 7], SamplingParams(max_tokens=30)))
        again()

    run.call(begin)
    while run.call(engine.has_work):
        pass
    run.stop()
    first, last = order.index("job"), len(order) - order[::-1].index("job")
    assert order[first:last] == ["job", *["step", "job"] * 19]


def test_it_serves_whom_many_threads_hand_in():
    engine, counts = slow_engine(seconds=0.0), []
    run, _ = kept_open(engine)

    def client(number):
        mine = [Request(f"c{number}-{i}", [number, i], SamplingParams(max_tokens=3)) for i in range(25)]
        done = threading.Semaphore(0)
        for request in mine:
            run.post(lambda r=request: engine.submit(r, lambda output: output.finish_reason and done.release()))
        assert all(done.acquire(timeout=20) for _ in mine)
        counts.append(sum(request.output_token_ids == solo_answer([number, i], 3) for i, request in enumerate(mine)))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(60)
    run.stop()
    assert counts == [25] * 8 and run.error is None and engine.scheduler.kv.num_used_blocks == 0
