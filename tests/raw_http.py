"""HTTP by hand, over plain sockets: requests that no client library would send, and answers held to a shape."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple

PATIENCE_S = 30  # for an answer; a server that says nothing for so long hangs


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@contextmanager
def connection(address: tuple[str, int]) -> Iterator[socket.socket]:
    with closing(socket.create_connection(address, timeout=PATIENCE_S)) as sock:
        yield sock


class Reader:
    """Reads one answer after another from a connection, and keeps what has come of the next."""

    def __init__(self, sock: socket.socket) -> None:
        self._file = sock.makefile("rb")

    def makefile(self, mode: str):
        """What HTTPResponse asks a socket for, and closes after its answer."""
        return _Unclosed(self._file)

    def answer(self, method: str = "POST") -> Answer | None:
        """The next one; None if the server has closed the connection instead. TimeoutError if it does neither."""
        response = HTTPResponse(self, method=method)  # type: ignore[arg-type]
        try:
            response.begin()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        except (ConnectionError, HTTPException):
            return None


class _Unclosed:
    def __init__(self, file) -> None:
        self.read, self.readinto, self.read1, self.readline = file.read, file.readinto, file.read1, file.readline
        self.peek = file.peek

    def flush(self) -> None: ...

    def close(self) -> None: ...


def read_answer(sock: socket.socket, method: str = "POST") -> Answer | None:
    """The only answer, or the last, of a connection; see Reader."""
    return Reader(sock).answer(method)


def exchange(address: tuple[str, int], data: bytes, method: str = "POST") -> Answer | None:
    """What the server answers to these bytes on a connection of their own; None if it just hangs up."""
    with connection(address) as sock:
        with suppress(ConnectionError):  # it did not want to hear it all; its answer may be there
            sock.sendall(data)
        return read_answer(sock, method)


def head(method: str, path: str, *lines: str, version: str = "HTTP/1.1") -> bytes:
    """The head of a request with these header lines, and the empty line after it."""
    return "\r\n".join((f"{method} {path} {version}", "Host: test", *lines, "", "")).encode("latin-1")


def post(path: str, body: bytes | Any, *lines: str, kind: str = "application/json") -> bytes:
    """A whole POST; a body that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", path, f"Content-Type: {kind}", f"Content-Length: {len(data)}", *lines) + data


def check_error(answer: Answer | None, *statuses: int) -> dict[str, Any]:
    """It must be an error of OpenAI's shape with one of these statuses; returns its `error` object."""
    assert answer is not None, "the server hung up without a word"
    assert answer.status in statuses, (answer.status, answer.body[:500])
    assert answer.headers.get("content-type", "").startswith("application/json"), answer.headers
    assert answer.json.keys() == {"error"}, answer.json
    error = answer.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"].strip(), error
    assert isinstance(error["type"], str) and error["type"], error
    assert error["param"] is None or isinstance(error["param"], str), error
    assert error["code"] is None or isinstance(error["code"], (str, int)), error
    assert "Traceback" not in error["message"] and 'File "' not in error["message"], error
    expected = {400: "invalid_request_error", 429: "rate_limit_error", 500: "server_error"}.get(answer.status)
    assert expected in (None, error["type"]), error
    if answer.status in (429, 503):
        assert int(answer.headers["retry-after"]) >= 1
    return error


def check_alive(address: tuple[str, int]) -> None:
    """It still answers, and completes."""
    health = exchange(address, head("GET", "/health", "Connection: close"), "GET")
    assert health is not None and health.status == 200, health
    answer = exchange(address, post("/v1/completions", {"model": "bard", "prompt": "O", "max_tokens": 1}))
    assert answer is not None and answer.status == 200 and answer.json["usage"]["completion_tokens"] == 1, answer
