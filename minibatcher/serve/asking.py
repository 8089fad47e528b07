"""From a body to requests of the engine: prompts as token ids, sampling parameters, choices, priority."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..intake import check_limits
from ..request import Request, SamplingParams
from .failures import ApiError, explain
from .host import EngineHost, Stream
from .protocol import SamplingBody
from .settings import ServeSettings

if TYPE_CHECKING:
    from .keys import ApiKey

SHORT_TEXT = 4_096  # characters: tokenized on the spot, which takes less time than a way into another thread


@dataclass(frozen=True)
class Call:
    """Who asks which engine, under which id. created: seconds since 1970. prompt_field: of the body."""

    host: EngineHost
    settings: ServeSettings
    key: ApiKey | None
    answer_id: str
    created: int
    prompt_field: str

    @property
    def tenant(self) -> str:
        return "default" if self.key is None else self.key.name

    def too_long(self, what: str) -> ApiError:
        return ApiError(
            400,
            f"{what}, and the context of model {self.host.name!r} has {self.host.max_model_len:,} tokens; shorten it",
            param=self.prompt_field,
            code="context_length_exceeded",
        )


def check_length(call: Call, num_characters: int) -> None:
    """Raise ApiError for a text that can't fit the context however it is cut into tokens: not worth tokenizing."""
    longest = call.host.longest_token
    if num_characters > longest * call.host.max_model_len:
        raise call.too_long(f"the prompt has {num_characters:,} characters, of which a token holds {longest} at most")


async def tokenize(call: Call, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of each text; long ones off the event loop. Raises ApiError for one that can't fit the context."""
    tokenizer = call.host.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer; give token ids", param=call.prompt_field)
    for text in texts:
        check_length(call, len(text))

    def encode() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    return encode() if sum(map(len, texts)) <= SHORT_TEXT else await asyncio.to_thread(encode)


def check_choices(call: Call, num_prompts: int, n: int) -> None:
    most = call.settings.max_choices
    if num_prompts * n > most:
        param = "n" if n > 1 else call.prompt_field
        raise ApiError(
            400, f"{num_prompts:,} prompts × n = {n:,} are more than {most} choices; ask for less", param=param
        )


def sampling_params(
    body: SamplingBody, max_tokens: int, logprobs: int | None, settings: ServeSettings
) -> SamplingParams:
    """temperature and top_p are 1 unless given, as OpenAI has it. Raises ApiError or InvalidParameter."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > settings.max_stop:
        raise ApiError(400, f"stop has {len(stop):,} strings, and may have {settings.max_stop}", param="stop")
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise ApiError(400, f"min_tokens ({body.min_tokens}) exceeds max_tokens ({max_tokens})", param="min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )


def priority_of(call: Call, body: SamplingBody) -> int:
    """What the body asks for, else what its key has. Raises ApiError where it may not ask for that."""
    floor = 0 if call.key is None else call.key.priority
    if body.priority is None:
        return floor
    if body.priority and call.host.ordering != "priority":
        raise ApiError(
            400,
            f"priority {body.priority} means nothing here: this server was started with --ordering "
            f"{call.host.ordering}, and needs --ordering priority; leave it out",
            param="priority",
        )
    if body.priority < floor:
        raise ApiError(
            400,
            f"priority {body.priority} is more urgent than this API key may ask for: {floor} or more",
            param="priority",
        )
    return body.priority


async def submit(call: Call, body: SamplingBody, prompts: Sequence[list[int]], params: SamplingParams) -> Stream:
    """n requests for each prompt, in that order: all of them are let in, or none. Raises ApiError."""
    n, priority = body.n or 1, priority_of(call, body)
    check_choices(call, len(prompts), n)
    # Choices with one seed would be one choice; each prompt's begin with the seed, whatever stands beside it.
    choices = [params if params.seed is None else replace(params, seed=params.seed + i) for i in range(n)]
    host, requests = call.host, list[Request]()
    try:
        for prompt in prompts:
            for choice in choices:
                name = call.answer_id if len(prompts) * n == 1 else f"{call.answer_id}-{len(requests)}"
                requests.append(Request(name, prompt, choice, priority=priority, tenant=call.tenant))
                check_limits(requests[-1], host.max_model_len, host.engine.scheduler.kv)
        return await host.submit(requests)
    except Exception as error:
        known = explain(error, call.prompt_field)
        if known.status == 500 and known is not error:
            raise  # a bug: the log must have it
        if call.settings.metrics is not None:
            call.settings.metrics.refused(host.name, known.code or "other", len(prompts) * n)
        raise known from None
