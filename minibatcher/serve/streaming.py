"""Server-sent events, and a watch for clients that leave before their answer is done."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .failures import explain
from .host import Stream

if TYPE_CHECKING:
    from .metrics import ServerMetrics

LOG = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One event. Escaped to ASCII: some clients take U+2028 and its like for ends of lines."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"


@asynccontextmanager
async def watched(receive: Receive, stream: Stream, metrics: ServerMetrics | None) -> AsyncIterator[None]:
    """While it lasts, a client that leaves ends its requests, whatever they wait for; and so does its end."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        num_left = stream.abort()
        if metrics is not None:
            metrics.left(stream.host.name, num_left)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        stream.abort()  # nothing is left to end unless something went wrong


class EventStream(Response):
    """An answer whose events are sent as they come."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], stream: Stream, metrics: ServerMetrics | None) -> None:
        self.status_code, self.body, self.background = 200, b"", None
        self.events, self.stream, self.metrics = events, stream, metrics
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})  # proxies pass events on at once
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with watched(receive, self.stream, self.metrics):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for piece in self.events:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except OSError:  # the client has left
                return
            except Exception as error:  # too late for a status
                LOG.exception("a stream has failed")
                await send({"type": "http.response.body", "body": event(explain(error).body), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
