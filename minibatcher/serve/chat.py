"""/v1/chat/completions: a conversation goes on, in the words of the model's chat template."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..request import Request
from ..stepping import Output
from .answering import Form, answer
from .asking import Call, check_choices, check_length, sampling_params, submit, tokenize
from .failures import ApiError
from .logprobs import chat_logprobs
from .protocol import ChatBody

LOG = logging.getLogger(__name__)


class ChatForm(Form):
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, request: Request) -> dict[str, Any]:
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = chat_logprobs(self.call.host.tokenizer, request.logprobs)
        content = {"message": {"role": "assistant", "content": request.output_text, "refusal": None}}
        return self._told(index, request, content, logprobs, request.finish_reason, request.output_token_ids)

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, request: Request, output: Output) -> dict[str, Any]:
        logprobs = None
        if output.logprob is not None:
            logprobs = chat_logprobs(self.call.host.tokenizer, [output.logprob])
        token_ids = [] if output.token_id is None else [output.token_id]
        return self._told(
            index, request, {"delta": {"content": output.text}}, logprobs, output.finish_reason, token_ids
        )

    def extra(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.requests[0].prompt_token_ids} if self.body.return_token_ids else {}


async def chat(http: HttpRequest, call: Call, body: ChatBody) -> Response:
    """Without max_tokens the answer may be as long as the context leaves room for. Raises ApiError."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    check_choices(call, 1, body.n or 1)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    [prompt] = await tokenize(call, [await _prompt_text(call, body)], add_special_tokens=False)
    max_tokens = body.max_completion_tokens or body.max_tokens or max(1, call.host.room(call.tenant) - len(prompt))
    stream = await submit(call, body, [prompt], sampling_params(body, max_tokens, logprobs, call.settings))
    return await answer(http, ChatForm(call, body, stream.requests), stream)


async def _prompt_text(call: Call, body: ChatBody) -> str:
    """The conversation by the model's template, which is written by others and may raise whatever it likes."""
    tokenizer = call.host.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise ApiError(
            400, f"model {call.host.name!r} has no chat template; use /v1/completions", code="no_chat_template"
        )
    check_length(call, sum(len(message.text) for message in body.messages))
    roles = {"developer": "system"}  # templates know the older name
    messages = [{"role": roles.get(m.role, m.role), "content": m.text} for m in body.messages]
    try:
        return await asyncio.to_thread(tokenizer.apply_chat_template, messages)
    except Exception as error:
        LOG.warning("a chat template has refused a conversation", exc_info=error)
        raise ApiError(
            400, f"the chat template does not take these messages: {error}", param="messages", code="invalid_messages"
        ) from None
