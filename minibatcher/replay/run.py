"""One replay from start to end: find the server, warm it up, send the workload, write the record."""

from __future__ import annotations

import asyncio
import platform
import sys
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, TypeVar

import aiohttp
from tqdm import tqdm

from .. import __version__
from ..metrics import spread
from ..request import SamplingParams
from ..timeline import Timeline
from ..workload import Workload
from .answer import Answer
from .asks import Ask, asks_of, warm_up_asks
from .client import open_session, serve_all
from .keys import check_keys, sendable
from .notes import notes_of
from .server import NoServer, Server, find_server
from .vocabulary import Vocabulary

T = TypeVar("T")
SOURCE = "replay"


def replay(
    read: Callable[[Server, Vocabulary], tuple[Workload, int | None]] | Workload,
    base_url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    tenant_keys: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
    params: SamplingParams | None = None,
    seed: int = 0,
    chat: bool = False,
    as_text: bool = False,
    warm_up: int = 2,
    timeout_s: float = 600.0,
    name: str | None = None,
    progress: bool = False,
) -> Timeline:
    """Send a workload to an OpenAI-compatible server at its recorded times, and note when each token came.

    read: the workload, or a function that reads it once the server is known, and returns it with the longest prompt +
    output in tokens that it was fitted to. tenant_keys: tenant → key, in place of api_key. tokenizer: where the
    vocabulary comes from if the server does not tell it (Vocabulary.of_files). params: sampling of rows that name no
    output length. chat: send text as a user's message. as_text: see asks_of. warm_up: short requests before the clock
    starts, not recorded. timeout_s: longest life of a request. name: what the run is called.
    The timeline has no steps, and its times are the client's. An interrupt keeps what was done: what was under way or
    not sent ends as `abort`, and header["interrupted"] is True. Raises NoServer, InvalidParameter, WorkloadError, and
    KeyboardInterrupt before the clock has started.
    """

    api_key = sendable(api_key, "the API key") if api_key else None

    def headers_of(tenant: str) -> dict[str, str]:
        key = (tenant_keys or {}).get(tenant, api_key)
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def main() -> Timeline:
        async with open_session() as session:
            first_key = next(iter((tenant_keys or {}).values()), api_key)
            first = {"Authorization": f"Bearer {first_key}"} if first_key else {}
            server = await find_server(session, base_url, model, first)
            vocabulary = Vocabulary.of_files(tokenizer) if tokenizer else Vocabulary.of_server(server)
            workload, max_model_len = read(server, vocabulary) if callable(read) else (read, server.max_model_len)
            if tenant_keys and api_key is None:
                check_keys(tenant_keys, workload)
            text = chat or as_text or any(row.prompt is not None for row in workload)
            if warm_up:
                server = await _warm_up(session, server, vocabulary, warm_up, chat, text, first)
            own = params or SamplingParams()
            asks = asks_of(
                workload,
                server,
                vocabulary,
                params=own,
                seed=seed,
                max_model_len=max_model_len,
                chat=chat,
                as_text=as_text,
            )
            label = name or server.name
            with tqdm(total=len(asks), desc=label, unit="req", disable=not progress, file=sys.stderr) as bar:
                answers, interrupted = await serve_all(
                    session,
                    server,
                    asks,
                    chat=chat,
                    headers_of=headers_of,
                    timeout_s=timeout_s,
                    on_end=lambda answer: bar.update() and None,
                )
            header = _header(server, label, workload, seed, own, max_model_len)
            timeline = _timeline(asks, answers, header, chat)
            special_known = tokenizer is not None or bool(vocabulary.special)
            header["client_notes"] = notes_of(asks, answers, timeline, bool(tenant_keys), special_known)
            if interrupted:
                header["interrupted"] = True
            return timeline

    return in_a_thread(main)


async def _warm_up(
    session: aiohttp.ClientSession,
    server: Server,
    vocabulary: Vocabulary,
    count: int,
    chat: bool,
    text: bool,
    headers: dict[str, str],
) -> Server:
    """The server as it is then known: one that minds our extensions gets none. Raises NoServer."""
    for extensions in (server.extensions, {}):
        server = replace(server, extensions=extensions)
        answers, interrupted = await serve_all(
            session,
            server,
            warm_up_asks(server, vocabulary, count, chat=chat, text=text),
            chat=chat,
            headers_of=lambda tenant: headers,
            timeout_s=120.0,
        )
        if interrupted:
            raise asyncio.CancelledError
        failed = [answer for answer in answers if answer.finish_reason == "error"]
        if not failed:
            version = next((answer.version for answer in answers if answer.version), None)
            return replace(server, version=server.version or version)
        if not extensions or any(answer.status not in (400, 422) for answer in failed):
            break
    raise NoServer(f"{server.url} could not answer a short request of ours for {server.model!r}: {failed[0].error}")


def _header(
    server: Server, label: str, workload: Workload, seed: int, params: SamplingParams, max_model_len: int | None
) -> dict[str, Any]:
    """Entries that a run of our engine has too are called the same, so that a comparison sees what differs."""
    told = {"owned_by": server.owned_by, "version": server.version}
    return {
        "strategy": label,
        "source": SOURCE,
        "base_url": server.url,
        "server": {key: value for key, value in told.items() if value is not None},
        "model": server.model,
        "max_model_len": max_model_len,
        "workload": workload.facts(),
        "varied": [],
        "seed": seed,
        "sampling": {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(params).items()},
        "software": {"minibatcher": __version__, "python": platform.python_version(), "aiohttp": aiohttp.__version__},
    }


def _timeline(asks: list[Ask], answers: list[Answer], header: dict[str, Any], chat: bool) -> Timeline:
    timeline = Timeline("measured", header)
    for ask, answer in zip(asks, answers):
        row = ask.row
        timeline.requests[row.request_id] = answer.record(row.request_id, row.arrival_time, row.priority, row.tenant)
    header["endpoint"] = "chat/completions" if chat else "completions"
    header["lateness_ms"] = spread(
        answer.sent - ask.row.arrival_time for ask, answer in zip(asks, answers) if answer.sent is not None
    )
    return timeline


def in_a_thread(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of a coroutine that runs in an event loop of its own: a notebook has one already.

    Ctrl-C, which Python tells the main thread alone, cancels it. Raises KeyboardInterrupt if it ends by that.
    """
    cancel: list[Callable[[], Any]] = []
    asked = False

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
        if asked:  # before there was anything to cancel
            raise asyncio.CancelledError
        return await main()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: asyncio.run(cancellable()))
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                asked = True
                for function in cancel:
                    with suppress(RuntimeError):  # the loop has closed: it is over
                        function()
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None
