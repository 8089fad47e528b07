"""The open-loop client: each request goes out when its time has come, whatever became of those before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import aiohttp

from .answer import Answer
from .asks import Ask
from .events import Events
from .server import Server, message_of, parse, plain, read_body, reason

REFUSED = (429, 503)  # the server is there, but lets nobody in now
CONNECT_S = 30
LINGER_S = 1  # for the end of a stream that has said that it is done: a server may mind who leaves before
ANSWER_BYTES, TOKEN_BYTES = 1 << 20, 16 << 10  # the longest answer: that, and so much for each token asked for
ERROR_BYTES = 100_000


def open_session() -> aiohttp.ClientSession:
    """A session without a bound on connections, which notes when each request was written to its own.

    No connection is used twice: a server may drop an idle one just as a request is on its way, which then fails.
    """
    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(_note_sent)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
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
    answers = [Answer(ask.num_prompt_tokens, ask.max_tokens) for ask in asks]
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
            words = await _told_in(response)
            kind = "refused" if response.status in REFUSED else "error"
            answer.fail(words or f"status {response.status}", now(), kind)
            answer.status = response.status
            return
        most = ANSWER_BYTES + TOKEN_BYTES * ask.max_tokens
        if response.content_type == "application/json":  # the whole answer at once, not a stream
            answer.take(await read_body(response, most), now())
            answer.close(now())
            return
        events, size, num_events = Events(), 0, 0
        async for piece in response.content.iter_any():
            size += len(piece)
            if size > most:
                raise ValueError(f"more than {most:,} bytes for {ask.max_tokens:,} tokens")
            moment = now()  # all events of a piece came together
            for data in events.feed(piece):
                num_events += 1
                answer.take(data, moment)
            if answer.done:
                break
        moment = now()
        for data in events.close():
            num_events += 1
            answer.take(data, moment)
        if not num_events:
            answer.fail(f"no event came, in {size:,} bytes of {plain(response.content_type)}", moment)
        answer.close(moment)
        if answer.done:
            await asyncio.wait_for(response.content.read(1), LINGER_S)


async def _told_in(response: aiohttp.ClientResponse) -> str:
    """Why there is no answer."""
    try:
        body = await read_body(response, ERROR_BYTES)
    except ValueError as error:
        return f"status {response.status}, and {reason(error)}"
    try:
        return message_of(parse(body))
    except ValueError:
        return plain(body.decode(errors="replace"))
