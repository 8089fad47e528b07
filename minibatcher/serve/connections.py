"""One client's connection: uvicorn's, with a bound on whatever a client could make it wait for or hold."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

PARTING_S = 1.0  # for a client to read why it is sent away
SPARE = 64  # connections beyond the bound that are told so; those after them are dropped


@dataclass(frozen=True)
class Bounds:
    """What a client may take. Times in seconds.

    head_timeout_s: from the connection's start, or from the first byte of a further request, until its head is there.
    keep_alive_s: idle time between two requests. send_timeout_s: time in which a client that is sent something reads
    nothing. max_head_bytes: request line and headers. max_connections: open at once.
    """

    head_timeout_s: float = 10.0
    keep_alive_s: float = 30.0  # longer than clients keep theirs: who closes first must not be the one that is asked
    send_timeout_s: float = 60.0
    max_head_bytes: int = 32 << 10
    max_connections: int = 1000


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 on one connection. Bodies are the application's business."""

    def __init__(self, *args: Any, bounds: Bounds, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bounds = bounds
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0  # bytes, when it was set
        self._parted = False  # what still comes is thrown away

    @property
    def is_answering(self) -> bool:
        """A request has come, and its answer is not out yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # writing pauses whenever the client is behind
        if len(self.connections) > self.bounds.max_connections + SPARE:
            transport.abort()
            return
        if len(self.connections) > self.bounds.max_connections:
            self.app = _crowded
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._parted:
            return
        if not self.is_answering:
            self._await_head()
        super().data_received(data)
        if self.is_answering and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _await_head(self) -> None:
        """From its first byte on: more bytes give no more time."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.bounds.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing() or self._parted:
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:  # a part of one is there
            self._part(408, f"the head of the request did not come within {self.bounds.head_timeout_s:g} s")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or too long: h11 says which."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        if self.is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # it has been answered already, or is just being
            self.transport.close()
            return
        if status == 431:
            msg = f"the head of the request is longer than {self.bounds.max_head_bytes:,} bytes"
        self._part(status, f"this is not HTTP/1.1 as it should be: {error}" if status == 400 else msg)

    def _part(self, status: int, message: str) -> None:
        """Say why, and close; but not before the client can have read it, as a closed socket that still gets data
        makes the system throw the answer away."""
        body = error_body(status, message)
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._parted = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has gone already
                self.transport.write_eof()
        self.loop.call_later(PARTING_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()

    def _watch_sending(self) -> None:
        self._num_unsent = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self.bounds.send_timeout_s, self._check_sending)

    def _check_sending(self) -> None:
        """Drop a client that has read nothing since; closing would wait for it for ever."""
        if self.transport.get_write_buffer_size() < self._num_unsent:
            self._watch_sending()
        else:
            self.transport.abort()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_send_timer()
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)


def error_body(status: int, message: str) -> bytes:
    """OpenAI's error object, for what never reaches the application."""
    kind = "server_error" if status >= 500 else "timeout_error" if status == 408 else "invalid_request_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}).encode()


async def _crowded(scope: Any, receive: Any, send: Any) -> None:
    """The application for who finds too many others here."""
    body = error_body(503, "too many connections are open; try again later")
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(b"retry-after", b"1"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
