"""From an application and its engines to a server: a socket, signals, and an end that leaves nobody hanging."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
from collections.abc import Callable, Collection
from functools import partial
from time import monotonic
from typing import Any, cast

import uvicorn

from ..errors import InvalidParameter
from .connections import BoundedProtocol, Bounds
from .host import EngineHost
from .listening import what_is_in_the_way

TICK_S = 0.02
FLUSH_S = 5.0  # for the last bytes of answers that have ended
BACKLOG = 2048


class Server(uvicorn.Server):
    """uvicorn's server, which also starts the engines, looks after them, and ends them once answers are out."""

    def __init__(
        self,
        config: uvicorn.Config,
        hosts: Collection[EngineHost],
        shutdown_timeout_s: float,
        ready: Callable[[], None],
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__(config)
        self.hosts, self.shutdown_timeout_s, self.ready, self.say = hosts, shutdown_timeout_s, ready, say
        self.failure: str | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for host in self.hosts:
            host.start()
        await super().startup(sockets)
        self.ready()

    async def on_tick(self, counter: int) -> bool:
        for host in self.hosts:
            if not host.running:
                self._note_failure(host)
                self.should_exit = True
        return await super().on_tick(counter)

    def _note_failure(self, host: EngineHost) -> None:
        why = "nobody knows why" if host.error is None else f"{type(host.error).__name__}: {host.error}".rstrip(": ")
        self.failure = self.failure or f"the engine of model {host.name!r} has stopped: {why}"

    def handle_exit(self, sig: int, frame: Any) -> None:
        """The first signal asks for an end, the second for one at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nobody new, let what is here finish in time, then abort what is left."""
        for host in self.hosts:
            host.draining = True
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        num_left = sum(cast(BoundedProtocol, c).is_answering for c in self.server_state.connections)
        if num_left:
            self.say(
                f"stopping; requests under way: {num_left}, which may take {self.shutdown_timeout_s:g} s more "
                "(a second Ctrl-C ends them now)"
            )
        await self._until(lambda: self.force_exit or not self._is_busy(), self.shutdown_timeout_s)
        await self._end_engines()
        await self._until(lambda: not self._is_busy(), FLUSH_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self._until(lambda: not self._is_busy(), FLUSH_S)  # who waited to send learns that nobody is there
        for task in list(self.server_state.tasks):
            task.cancel()
        for host in self.hosts:
            if host.error is not None:
                self._note_failure(host)

    def _is_busy(self) -> bool:
        return bool(self.server_state.connections or self.server_state.tasks)

    async def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        end = monotonic() + timeout_s
        while not done() and monotonic() < end:
            await asyncio.sleep(TICK_S)

    async def _end_engines(self) -> None:
        """Requests that are left end with `abort`. A step can take long: who insists does not wait for it."""
        threads = [threading.Thread(target=host.stop, daemon=True) for host in self.hosts]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            await self._until(lambda: not any(thread.is_alive() for thread in threads), FLUSH_S)
            if self.force_exit:
                return


def run_server(
    app: Any,
    hosts: Collection[EngineHost],
    listener: socket.socket,
    *,
    bounds: Bounds | None = None,
    shutdown_timeout_s: float = 30.0,
    access_log: bool = False,
    ready: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> str | None:
    """Serve until a signal (SIGINT, SIGTERM) or until an engine dies; the sentence that says so, or None.

    ready: called once clients can come. say: takes a sentence for who watches. shutdown_timeout_s: how long requests
    may go on after the signal.
    Raises InvalidParameter if somebody else has begun to listen there.
    """
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise InvalidParameter(what_is_in_the_way(host, port, error)) from error
    _log_to_stderr(access_log)
    gc.collect()
    gc.freeze()  # models and modules stay for good: without them a collection is over at once
    server = Server(configure(app, bounds or Bounds(), access_log), hosts, shutdown_timeout_s, ready, say)
    asyncio.run(server.serve(sockets=[listener]))
    return server.failure


def configure(app: Any, bounds: Bounds, access_log: bool = False) -> uvicorn.Config:
    """What uvicorn is told."""
    return uvicorn.Config(
        app,
        http=cast(Any, partial(BoundedProtocol, bounds=bounds)),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=access_log,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=cast(int, bounds.keep_alive_s),
        h11_max_incomplete_event_size=bounds.max_head_bytes,
    )


def _log_to_stderr(access_log: bool) -> None:
    """Failures of the server's own; of what clients do wrong they are told themselves."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("minibatcher serve: %(message)s"))
    for name, level in (("uvicorn.error", logging.ERROR), ("uvicorn.access", logging.INFO)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    if not access_log:
        logging.getLogger("uvicorn.access").handlers = []
