"""A server in this process, without a socket, and a client of it that can dawdle and leave."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs minibatcher[serve]")

from minibatcher.build import build_engine
from minibatcher.prompts import special_token_ids
from minibatcher.serve.app import create_app
from minibatcher.serve.host import EngineHost
from minibatcher.serve.settings import ServeSettings

JSON = {"content-type": "application/json"}


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        answer = self.json["error"]
        assert set(answer) == {"message", "type", "param", "code"}
        return answer

    @property
    def events(self) -> list[Any]:
        """What the events say; the last must be [DONE]."""
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == "" and lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]


class Client:
    """Speaks ASGI by hand: httpx can neither dawdle nor leave there."""

    def __init__(self, host: EngineHost, **settings: Any) -> None:
        self.host, self.app = host, create_app({host.name: host}, ServeSettings(**settings))

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | list[bytes] = b"",
        headers: dict[str, str] | None = None,
        leaves: asyncio.Event | None = None,
        on_piece: Callable[[bytes], None] = lambda piece: None,
    ) -> Reply:
        """leaves: when the client goes away. A body that is a list comes in pieces, of which the last never comes."""
        pieces = [body] if isinstance(body, bytes) else list(body)
        endless = isinstance(body, list)
        leaves = leaves or asyncio.Event()
        reply = Reply(0, {}, b"")

        async def receive():
            if pieces:
                piece = pieces.pop(0)
                return {"type": "http.request", "body": piece, "more_body": bool(pieces) or endless}
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            elif message["type"] == "http.response.body":
                reply.body += message["body"]
                on_piece(message["body"])

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
        }
        await self.app(scope, receive, send)
        return reply

    async def post(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        leaves, on_piece = fields.pop("leaves", None), fields.pop("on_piece", lambda piece: None)
        body = json.dumps(fields).encode()
        return await self.send("POST", f"/v1/{path}", body, JSON | (headers or {}), leaves, on_piece)

    async def complete(self, prompt: Any = "HAMLET:", **fields: Any) -> Reply:
        return await self.post("completions", prompt=prompt, **{"temperature": 0, "max_tokens": 8} | fields)

    async def chat(self, content: Any = "Who's there?", **fields: Any) -> Reply:
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        return await self.post("chat/completions", messages=messages, **{"temperature": 0, "max_tokens": 8} | fields)


@contextmanager
def served(model, **options: Any) -> Iterator[EngineHost]:
    """An engine that serves, and at the end holds nobody and has all its blocks back."""
    engine = build_engine(model, **{"strategy": "chunked", "enable_prefix_caching": True} | options)
    host = EngineHost("bard", engine, 1_700_000_000, special_token_ids(model.config, model.tokenizer))
    host.start()
    try:
        yield host
        asyncio.run(until(lambda: not host.engine.requests))
    finally:
        host.stop()
    kv = host.engine.scheduler.kv
    assert kv.num_used_blocks == 0 and kv.num_free_blocks + kv.num_cached_blocks == kv.num_blocks


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("what was waited for did not come")


def talk(host: EngineHost, conversation: Callable[[Client], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    return asyncio.run(conversation(Client(host, **settings)))
