"""An engine that serves in a thread of its own, while others look on, abort requests and stop it."""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from time import perf_counter
from typing import Any

from .engine import Engine
from .errors import InvalidParameter
from .request import Request
from .timeline import Timeline

THREAD_NAME = "minibatcher engine"
LONGEST_SLEEP_S = 0.05  # of an idle engine that somebody observes now and then


class BackgroundRun:
    """Serves `requests` as they arrive, as Engine.run does, without keeping the caller.

    Only the serving thread touches the engine, so whoever else wants something of it hands in a function, which runs
    between two steps (`call`): what it sees is whole. `observe(timeline)` runs there too, at most every `every_s`
    seconds (0: after each step), and once more at the end. keep_open: serve until `stop`, also while there is nothing
    to do. What fails under way costs its own requests and is warned of (keep_going).
    Raises what Engine.run would raise for a request that can't be served, and InvalidParameter for an engine that is at
    work.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Iterable[Request] = (),
        observe: Callable[[Timeline], None] | None = None,
        every_s: float = 0.1,
        *,
        keep_open: bool = False,
    ) -> None:
        self.engine, self.observe, self.every_s, self.keep_open = engine, observe, every_s, keep_open
        self._requests = sorted(requests, key=lambda r: r.arrival_time)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        self._gate = threading.Lock()  # held while `_serving` is read or changed
        self._serving = False
        self._stop = threading.Event()
        self._woken = threading.Event()  # somebody has handed something in, or wants it to stop
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None  # what ended the run, if anything did before its time
        self._prepare()

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def running(self) -> bool:
        return self._serving

    @property
    def timeline(self) -> Timeline:
        """What has happened. While it runs, read it through `call`."""
        return self.engine.timeline

    def start(self) -> None:
        """Begin to serve."""
        if self._thread is not None:
            raise InvalidParameter("this run has been started before; make a new BackgroundRun with new requests")
        self._prepare()
        self._serving = True
        self._thread = threading.Thread(target=self._serve, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        self.engine.reset()
        self.engine.check_all(self._requests)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` between two steps, and return what it returns or raise what it raises."""
        if self._is_mine():
            return function()
        with self._gate:
            if not self._serving:
                return function()
            job = self._hand_in(function)
        return job.result()

    def abort(self, request_id: str) -> bool:
        """End one request. False if it has ended already or has not arrived."""
        return self.call(lambda: self.engine.abort(request_id))

    def post(self, function: Callable[[], Any]) -> None:
        """Run `function` between two steps, without waiting for it: for callers that must not be held up."""
        if not self._is_mine():
            with self._gate:
                if self._serving:
                    self._hand_in(function)
                    return
        function()

    def _hand_in(self, function: Callable[[], Any]) -> Future:
        job: Future = Future()
        self._jobs.put((function, job))
        self._woken.set()
        return job

    def _is_mine(self) -> bool:
        """A callback or a function asks, in the serving thread: it stands between two steps already."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the run after the step at hand; requests that are left are aborted. Returns when it has ended."""
        self.request_stop()
        self.wait()

    def request_stop(self) -> None:
        """The same without waiting."""
        self._stop.set()
        self._woken.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the run has ended, or for `timeout_s` seconds; says whether it has."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._serving

    def _serve(self) -> None:
        engine = self.engine
        keep_going, engine.keep_going = engine.keep_going, True
        try:
            with engine.monitor.watch(engine.timeline) if engine.monitor else nullcontext():
                self._loop()
        except BaseException as error:
            self.error = error
        finally:
            with self._gate:
                self._finish()
                engine.keep_going = keep_going
                self._serving = False
            self._tell()

    def _loop(self) -> None:
        engine, arrivals, told = self.engine, deque(self._requests), 0.0
        while (self.keep_open or arrivals or engine.has_work()) and not self._stop.is_set():
            while arrivals and arrivals[0].arrival_time <= engine.clock.now():
                engine.receive(arrivals.popleft())
            engine.step()
            self._woken.clear()  # whatever comes from here on is found below, or ends the sleep
            if not self._do_jobs() and engine.idle and not self._stop.is_set():
                self._idle(arrivals[0].arrival_time if arrivals else None)
            if self.observe and perf_counter() - told >= self.every_s:
                self.observe(engine.timeline)
                told = perf_counter()

    def _idle(self, next_arrival: float | None) -> None:
        """Nothing could run: sleep until something may, or somebody wants something."""
        clock = self.engine.clock
        # Who observes every round has seen all that there is; who observes now and then may be owed something.
        longest = LONGEST_SLEEP_S if self.observe and self.every_s else math.inf
        if self.keep_open and next_arrival is None and not self.engine.has_work():  # no moment is better than another
            self._woken.wait(None if longest == math.inf else longest)
        else:
            clock.sleep_until(min(self.engine.next_moment(next_arrival), clock.now() + longest), self._woken)

    def _finish(self) -> None:
        """Nobody is left behind, not even whom the last functions have submitted."""
        for act in (self._abort_rest, self._do_jobs, self._abort_rest):
            try:
                act()
            except BaseException as error:  # whoever waits for this thread must get its answer
                self.error = self.error or error

    def _abort_rest(self) -> None:
        if self.engine.requests or self.error:  # else there is nothing to clean up
            self.engine.timeline.header["interrupted"] = True
            self.engine.abort_all()

    def _do_jobs(self) -> bool:
        """Run what has been handed in by now; False if there was nothing. What comes meanwhile waits for a step."""
        num_jobs = self._jobs.qsize()
        for _ in range(num_jobs):
            function, job = self._jobs.get()
            try:
                job.set_result(function())
            except BaseException as error:
                job.set_exception(error)
        return num_jobs > 0

    def _tell(self) -> None:
        """The last observation; what it raises must not hide what ended the run."""
        if self.observe is None:
            return
        try:
            self.observe(self.engine.timeline)
        except Exception as error:
            self.error = self.error or error
