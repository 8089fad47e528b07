"""From the outputs of requests to an answer: whole, or event by event."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..request import FinishReason, Request
from ..stepping import Output
from .asking import Call
from .failures import ApiError
from .host import EngineHost, Stream
from .protocol import SamplingBody
from .streaming import DONE, EventStream, event, watched

SMALL_ANSWER = 2_000  # tokens, with their log-probabilities: put into words on the event loop


class Form(ABC):
    """How one endpoint puts an answer; a choice is one request, numbered from 0."""

    whole_object: str
    chunk_object: str

    def __init__(self, call: Call, body: SamplingBody, requests: Sequence[Request]) -> None:
        self.call, self.body, self.requests = call, body, requests

    @abstractmethod
    def choice(self, index: int, request: Request) -> dict[str, Any]:
        """A choice that is complete."""

    @abstractmethod
    def piece(self, index: int, request: Request, output: Output) -> dict[str, Any]:
        """A choice of a chunk."""

    def _told(
        self,
        index: int,
        request: Request,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None,
        reason: FinishReason | None,
        token_ids: list[int],
    ) -> dict[str, Any]:
        """A choice around its content, whole or in pieces. reason: why it has ended, None if it has not."""
        choice = {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": reason.value if reason else None,
            "stop_reason": request.stop_reason if reason else None,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = token_ids
        return choice

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice of the chunk that goes before the first piece, if there is one."""
        return None

    def extra(self) -> dict[str, Any]:
        """Fields of the answer, or of the first chunk, beside the choices."""
        return {}

    def envelope(self, kind: str) -> dict[str, Any]:
        call = self.call
        return {"id": call.answer_id, "object": kind, "created": call.created, "model": call.host.name}


async def answer(http: HttpRequest, form: Form, stream: Stream) -> Response:
    """Raises ApiError if a request has failed before anything was sent."""
    metrics = form.call.settings.metrics
    if form.body.stream:
        return EventStream(_events(form, stream), stream, metrics)
    async with watched(http.receive, stream, metrics):
        await stream.end()
    requests = stream.requests
    for request in requests:
        failure = _failure(request, stream.host)
        if failure:
            raise failure
    size = sum(r.num_output_tokens * (1 + (r.params.logprobs or 0)) for r in requests)
    text = _whole(form, requests) if size <= SMALL_ANSWER else await asyncio.to_thread(_whole, form, requests)
    return Response(text, media_type="application/json")


def _whole(form: Form, requests: Sequence[Request]) -> str:
    """Choice by choice, since nothing else runs in this process while a piece of JSON is written."""
    n = form.body.n or 1
    head = form.envelope(form.whole_object) | form.extra()
    head["usage"] = usage(requests, n, sum(r.num_output_tokens for r in requests))
    choices = ", ".join(json.dumps(form.choice(i, request)) for i, request in enumerate(requests))
    return f'{json.dumps(head)[:-1]}, "choices": [{choices}]}}'


def usage(requests: Sequence[Request], n: int, num_output_tokens: int) -> dict[str, Any]:
    """Tokens of these requests. The n choices of a prompt share it: it counts once, cached as the first found it."""
    prompts = requests[::n]
    num_prompt_tokens = sum(request.num_prompt_tokens for request in prompts)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(request.num_cached_tokens for request in prompts)},
    }


async def _events(form: Form, stream: Stream) -> AsyncIterator[bytes]:
    """An event for each output token; before a choice's first its opening, and in the end the counts, if asked for."""
    options, requests, n = form.body.stream_options, stream.requests, form.body.n or 1
    count_in_end = options is not None and bool(options.include_usage)
    count_always = options is not None and bool(options.continuous_usage_stats)
    index_of = {request.request_id: i for i, request in enumerate(requests)}
    num_tokens = [0] * len(requests)
    opened = [False] * len(requests)
    extra = form.extra()

    def chunk(index: int, choice: dict[str, Any]) -> bytes:
        nonlocal extra
        data = form.envelope(form.chunk_object) | extra | {"choices": [choice]}
        extra = {}
        if count_always:
            data["usage"] = usage([requests[index]], 1, num_tokens[index])
        elif count_in_end:
            data["usage"] = None
        return event(data)

    async for output in stream:
        index = index_of[output.request_id]
        request = requests[index]
        failure = _failure(request, stream.host) if output.finish_reason is not None else None
        if failure:
            yield event(failure.body)
            stream.abort()
            return
        events = b""
        opening = None if opened[index] else form.opening(index)
        opened[index] = True
        if opening is not None:
            events += chunk(index, opening)
        num_tokens[index] += output.token_id is not None
        yield events + chunk(index, form.piece(index, request, output))
    if count_in_end:
        yield event(form.envelope(form.chunk_object) | {"choices": [], "usage": usage(requests, n, sum(num_tokens))})
    yield DONE


def _failure(request: Request, host: EngineHost) -> ApiError | None:
    """Why a request that has ended has no answer; that it was aborted is one, unless the engine has broken down."""
    if request.finish_reason is FinishReason.ERROR:
        return ApiError(500, f"the request failed: {request.error}", code="request_failed")
    if request.finish_reason is FinishReason.ABORT and host.error is not None:
        return ApiError(500, f"the engine of model {host.name!r} has stopped; the server's log says why")
    return None
