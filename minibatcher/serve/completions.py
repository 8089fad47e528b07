"""/v1/completions: text or token ids go on."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..request import Request
from ..stepping import Output
from .answering import Form, answer
from .asking import Call, check_choices, sampling_params, submit, tokenize
from .logprobs import completion_logprobs
from .protocol import CompletionBody

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionForm(Form):
    whole_object = chunk_object = "text_completion"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._offsets = [0] * len(self.requests)  # characters of the tokens so far
        self._begun: set[int] = set()  # choices that have had a chunk

    def choice(self, index: int, request: Request) -> dict[str, Any]:
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = completion_logprobs(self.call.host.tokenizer, request.logprobs)
        content = {"text": request.output_text}
        choice = self._told(index, request, content, logprobs, request.finish_reason, request.output_token_ids)
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = request.prompt_token_ids
        return choice

    def piece(self, index: int, request: Request, output: Output) -> dict[str, Any]:
        logprobs = None
        if output.logprob is not None:
            logprobs = completion_logprobs(self.call.host.tokenizer, [output.logprob], self._offsets[index])
            self._offsets[index] += len(logprobs["tokens"][0])
        token_ids = [] if output.token_id is None else [output.token_id]
        choice = self._told(index, request, {"text": output.text}, logprobs, output.finish_reason, token_ids)
        if self.body.return_token_ids and index not in self._begun:
            choice["prompt_token_ids"] = request.prompt_token_ids
        self._begun.add(index)
        return choice


async def complete(http: HttpRequest, call: Call, body: CompletionBody) -> Response:
    """Raises ApiError."""
    check_choices(call, len(body.prompt), body.n or 1)
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    prompts = [prompt for prompt in body.prompt if not isinstance(prompt, str)]
    if texts:  # then all are
        prompts = await tokenize(call, texts, add_special_tokens=True)
    params = sampling_params(body, body.max_tokens or DEFAULT_MAX_TOKENS, body.logprobs, call.settings)
    stream = await submit(call, body, prompts, params)
    return await answer(http, CompletionForm(call, body, stream.requests), stream)
