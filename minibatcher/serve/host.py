"""One engine, served in a thread of its own, and the outputs that cross from there to the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from ..background import BackgroundRun
from ..engine import Engine
from ..request import Request
from ..stepping import Output
from .failures import ApiError

LOG = logging.getLogger(__name__)
STOPPED_RETRY_S = 10.0  # until which another server may have taken over


class EngineHost:
    """An engine under the name of its model. created: when, in seconds since 1970.

    `start`, `submit` and the streams belong to one event loop; only the engine's thread touches the engine.
    draining: takes no new requests, and serves those that it has.
    special_token_ids: what a prompt of random tokens must not hold.
    """

    def __init__(self, name: str, engine: Engine, created: int, special_token_ids: Sequence[int] = ()) -> None:
        self.name, self.engine, self.created = name, engine, created
        self.tokenizer, self.max_model_len = engine.tokenizer, engine.max_model_len
        self.special_token_ids = tuple(special_token_ids)
        vocabulary = engine.tokenizer.backend.get_vocab(with_added_tokens=True) if engine.tokenizer else {}
        self.longest_token = max(map(len, vocabulary), default=1)  # characters
        self.draining = False
        self._run = BackgroundRun(engine, observe=lambda _: self._ring(), every_s=0.0, keep_open=True)
        self._outbox: deque[tuple[Stream, Output]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def running(self) -> bool:
        return self._run.running

    @property
    def error(self) -> BaseException | None:
        """What has ended the engine's thread, if anything has before its time."""
        return self._run.error

    @property
    def ordering(self) -> str:
        return self.engine.scheduler.config.ordering

    def room(self, tenant: str) -> int:
        """The most tokens, prompt and output, of a request that this tenant could ever have let in."""
        kv, limits = self.engine.scheduler.kv, self.engine.limits
        bounds: list[float | None] = [self.max_model_len, kv.num_blocks * kv.block_size]
        if limits is not None:
            limit = limits.of(tenant)
            bounds += [limits.max_waiting_tokens, limit.burst_tokens if limit else None]
        return int(min(bound for bound in bounds if bound is not None))

    def start(self) -> None:
        """Begin to serve; call it once."""
        self._run.start()

    def stop(self) -> None:
        """End after the step at hand; requests that are left end with finish_reason abort. Waits for that."""
        self.draining = True
        self._run.stop()

    def check_open(self) -> None:
        """Raise ApiError while it takes no requests."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=STOPPED_RETRY_S)
        if not self.running:
            raise ApiError(500, f"the engine of model {self.name!r} has stopped; the server's log says why")

    async def submit(self, requests: Sequence[Request]) -> Stream:
        """Let in all of these requests, or none; they arrive now.

        Raises what Engine.submit_all does, and ApiError while the server shuts down.
        """
        self.check_open()
        self._loop = loop = asyncio.get_running_loop()
        for request in requests:
            request.arrival_time = self.engine.clock.now()  # a step that is under way counts as waiting
        stream = Stream(self, requests)
        answer: asyncio.Future[None] = loop.create_future()

        def settle(error: BaseException | None) -> None:
            if answer.done():  # whoever waited has been cancelled
                return
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)

        def enter() -> None:
            error: BaseException | None = None
            try:
                self._enter(stream)
            except BaseException as raised:
                error = raised
            loop.call_soon_threadsafe(settle, error)

        self._run.post(enter)
        try:
            await answer
        except asyncio.CancelledError:
            stream.abort()
            raise
        return stream

    def _enter(self, stream: Stream) -> None:
        """In the engine's thread, between two steps."""
        if not self.running:
            self.check_open()
        self.engine.submit_all(stream.requests, self._teller(stream))

    def _teller(self, stream: Stream) -> Callable[[Output], None]:
        """What the engine calls with each output, in its thread."""

        def tell(output: Output) -> None:
            self._outbox.append((stream, output))

        return tell

    def _ring(self) -> None:
        """After a step, in the engine's thread: all that it has brought crosses at once: a crossing is dear."""
        if self.error is not None and not self.running:  # the last time
            LOG.error("the engine of model %r has stopped", self.name, exc_info=self.error)
        if self._outbox and self._loop is not None:
            with suppress(RuntimeError):  # the loop has closed: nobody is left to hear of it
                self._loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        while self._outbox:
            stream, output = self._outbox.popleft()
            stream._take(output)

    def _abort(self, requests: Sequence[Request]) -> None:
        def abort() -> None:
            for request in requests:
                self.engine.abort(request.request_id)

        self._run.post(abort)


class Stream:
    """The outputs of some requests, as they come: `async for output in stream`, until all requests have ended."""

    def __init__(self, host: EngineHost, requests: Sequence[Request]) -> None:
        self.host, self.requests = host, requests
        self._outputs: deque[Output] = deque()
        self._num_left = len(requests)
        self._news = asyncio.Event()
        self._only_end = False
        self._aborted = False

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        while not self._outputs:
            if not self._num_left:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._outputs.popleft()

    async def end(self) -> None:
        """Until all requests have ended, without looking at each output; the requests then hold what they brought."""
        self._only_end = True
        self._outputs.clear()
        while self._num_left:
            self._news.clear()
            await self._news.wait()

    def abort(self) -> int:
        """End the requests that are left: nobody wants them any more. Does not wait; says how many there are."""
        if self._aborted or not self._num_left:
            return 0
        self._aborted = True
        self.host._abort(self.requests)
        return self._num_left

    def _take(self, output: Output) -> None:
        self._num_left -= output.finish_reason is not None
        if not self._only_end:
            self._outputs.append(output)
        if not (self._only_end and self._num_left):
            self._news.set()
