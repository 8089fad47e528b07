"""The open-loop client: each request goes out when its time has come, whatever became of those before it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence

import aiohttp

from .answer import Answer
from .asks import Ask
from .events import Events
from .server import Server, message_of, reason

REFUSED = (429, 503)  # the server is there, but lets nobody in now
CONNECT_S = 30
# Connections are dropped before the server drops them (uvicorn: after 5 s without a request): else it may do so just as
# a request is on its way, which then fails.
KEEP_ALIVE_S = 2


def open_session() -> aiohttp.ClientSession:
    """A session without a bound on connections, which notes when each request was written to its own."""
    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(_note_sent)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, trace_configs=[trace])


async def _note_sent(session, context, params) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx()


async def serve_all(
    session: aiohttp.ClientSession,
    server: Server,
    asks: Sequence[Ask],
    *,
    chat: bool,
    headers_of: Callable[[str], dict[str, str]],
    timeout_s: float,
    on_end: Callable[[Answer], None] = lambda answer: None,
) -> tuple[list[Answer], bool]:
    """Send each at its arrival time; returns the answers, in the order of `asks`, and whether it was interrupted.

    headers_of: tenant → headers. timeout_s: longest life of a request from when it is sent. on_end: called for each
    that has ended. A cancellation aborts what is under way: it ends as `abort`, and so does what was not sent yet.
    """
    begun = time.perf_counter()
    answers = [Answer(ask.num_prompt_tokens) for ask in asks]
    url = server.url + ("/chat/completions" if chat else "/completions")
    tasks: set[asyncio.Task] = set()

    def now() -> float:
        return time.perf_counter() - begun

    async def one(ask: Ask, answer: Answer) -> None:
        try:
            await asyncio.wait_for(_ask(session, url, ask, answer, headers_of(ask.row.tenant), now), timeout_s)
        except asyncio.TimeoutError:
            answer.fail(f"no complete answer within {timeout_s:g} s", now())
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # of data that another program made
            answer.fail(f"the answer is not as it should be: {reason(error)}", now())
        except (aiohttp.ClientError, OSError) as error:
            answer.fail(f"{'the connection broke' if answer.sent else 'not sent'}: {reason(error)}", now())
        on_end(answer)

    try:
        for ask, answer in zip(asks, answers):
            delay = ask.row.arrival_time - now()
            if delay > 0:
                await asyncio.sleep(delay)
            task = asyncio.create_task(one(ask, answer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await _all_of(tasks)
        interrupted = False
    except asyncio.CancelledError:
        interrupted = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for answer in answers:  # only an interrupt leaves any
        answer.fail("interrupted", now(), "abort")
    return answers, interrupted


async def _all_of(tasks: Iterable[asyncio.Task]) -> None:
    """Wait for all; an error of our own in one of them is raised."""
    while pending := list(tasks):
        await asyncio.gather(*pending)


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    ask: Ask,
    answer: Answer,
    headers: dict[str, str],
    now: Callable[[], float],
) -> None:
    """One request from its first byte to the last one of its answer."""

    def sent() -> None:
        answer.sent = now()

    headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **headers}
    async with session.post(url, data=ask.body, headers=headers, trace_request_ctx=sent) as response:
        if response.status != 200:
            words = _told_in(await response.content.read(100_000))
            kind = "refused" if response.status in REFUSED else "error"
            answer.fail(words or f"status {response.status}", now(), kind)
            answer.status = response.status
            return
        if response.content_type == "application/json":  # the whole answer at once, not a stream
            answer.take(await response.read(), now())
            answer.close(now())
            return
        events = Events()
        async for piece in response.content.iter_any():
            moment = now()  # all events of a piece came together
            for data in events.feed(piece):
                answer.take(data, moment)
        moment = now()
        for data in events.close():
            answer.take(data, moment)
        answer.close(moment)


def _told_in(body: bytes) -> str:
    try:
        return message_of(json.loads(body))
    except ValueError:
        return " ".join(body.decode(errors="replace").split())[:200]
