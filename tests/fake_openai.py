"""A server with OpenAI's interface and no model: its manners and its faults are chosen, for tests of the client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any]], AsyncIterator[bytes]]  # body → pieces of the stream, as they are to be written

MODEL = {"id": "fake", "object": "model", "owned_by": "minibatcher", "vocab_size": 100, "special_token_ids": [0, 1]}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def token(i: int, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The choice of output token i: its id is i + 10, its text " i"."""
    last = i == body["max_tokens"] - 1
    return {"index": 0, "text": f" {i}", "finish_reason": "length" if last else None} | fields


def usage(body: dict[str, Any], n: int) -> dict[str, Any]:
    prompt = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 7
    return {"prompt_tokens": prompt, "completion_tokens": n, "total_tokens": prompt + n}


async def well_behaved(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """As ours and vLLM's: an event a token, with its id, and the usage at the end."""
    for i in range(body["max_tokens"]):
        yield event(choices=[token(i, body, token_ids=[i + 10])])
    yield event(choices=[], usage=usage(body, body["max_tokens"]))
    yield b"data: [DONE]\n\n"


class FakeServer:
    """url, and what came in: `bodies` and `headers` of completions, in order of arrival."""

    def __init__(self, answer: Answer, models: Any, status: Callable[[dict[str, Any]], web.Response | None]) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._answer, self._models, self._status = answer, models, status

    @property
    def recorded(self) -> list[dict[str, Any]]:
        """Bodies without those of the warm-up, which ask for four tokens."""
        return [body for body in self.bodies if body["max_tokens"] != 4]

    async def models(self, request: web.Request) -> web.StreamResponse:
        if self._models is None:
            return web.json_response({"error": {"message": "no such path"}}, status=404)
        return web.json_response({"object": "list", "data": self._models})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        refusal = self._status(body)
        if refusal is not None:
            return refusal
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for piece in self._answer(body):
            if piece == b"BREAK":
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(piece)
            await asyncio.sleep(0)
        await response.write_eof()
        return response


@contextmanager
def fake_server(
    answer: Answer = well_behaved,
    models: Any = (MODEL,),
    status: Callable[[dict[str, Any]], web.Response | None] = lambda body: None,
) -> Iterator[FakeServer]:
    """A server in a thread of its own, on a free port."""
    server = FakeServer(answer, None if models is None else list(models), status)
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_post("/v1/completions", server.complete)
        app.router.add_post("/v1/chat/completions", server.complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
