"""What clients may send: OpenAI's bodies, with the fields that other open engines have added."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..request import MOST_LOGPROBS, PRIORITIES
from .failures import ApiError

LARGEST_SEED = 2**63 - 1
MOST_TOKENS = 2**31 - 1
LONGEST_STOP = 1_000  # characters of a stop string: the end of a growing text is held against it at each token
MOST_STOP_TOKENS = 128
MOST_MESSAGES, MOST_PARTS = 4_096, 256
TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)


def _as_prompts(value: Any) -> list[str | list[int]]:
    """A prompt in any of its four forms, as a list; by hand, since a list of a million must fail at its first fault."""
    if isinstance(value, str) or _is_token_ids(value):
        return [value]
    items = value if isinstance(value, list) else []
    if items and (all(isinstance(item, str) for item in items) or all(_is_token_ids(item) for item in items)):
        return items
    raise PydanticCustomError(
        "prompt", "must be a text, a list of texts, a list of token ids, or a list of lists of token ids; none empty"
    )


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_as_prompts),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, TEXTS, TOKEN_IDS, {"type": "array", "items": TOKEN_IDS, "minItems": 1}]}
    ),
]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class Body(BaseModel):
    """Strict: no "5" for 5, no true for 1. null is the default. Fields that nobody knows are ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Body):
    """include_usage: a last chunk counts tokens. continuous_usage_stats: every chunk does."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(Body):
    """What both endpoints take."""

    model: str | None = Field(None, max_length=1_000, description="May be left out where one model is served.")
    n: int | None = Field(None, ge=1, le=MOST_TOKENS)
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    min_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2, description="1 unless given; 0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MOST_TOKENS, description="0 and -1 keep all tokens.")
    seed: int | None = Field(None, ge=0, le=LARGEST_SEED, description="Choice i draws with seed + i.")
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, le=MOST_TOKENS)]] | None = Field(None, max_length=MOST_STOP_TOKENS)
    ignore_eos: bool | None = None
    priority: int | None = Field(
        None, ge=0, le=PRIORITIES[-1], description="0 is served first; others need --ordering priority."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class CompletionBody(SamplingBody):
    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MOST_PARTS)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(SamplingBody):
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS, description="Goes before max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="Needs logprobs: true.")


# Fields of OpenAI's and of other engines that would change the answer, and that we don't do: the values that change
# nothing are accepted, as null is.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    "web_search_options": (),
}


def check_supported(body: SamplingBody) -> None:
    """Raise ApiError, naming the field, for one that asks for what this server does not do."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    extra = body.model_extra or {}
    for name, value in extra.items():
        if value is None or (name not in NEUTRAL and name != "best_of"):
            continue
        neutral = NEUTRAL.get(name, (body.n or 1,))
        if not any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in neutral):
            only = " or ".join(repr(same) for same in neutral)
            raise ApiError(
                400,
                f"this server does not do {name}; leave it out" + (f", or give {only}" if only else ""),
                param=name,
                code="unsupported_parameter",
            )
    for message in getattr(body, "messages", ()):
        for name in ("tool_calls", "function_call", "audio"):
            if (message.model_extra or {}).get(name):
                raise ApiError(
                    400,
                    f"this server does not do {name} in messages; leave it out",
                    param="messages",
                    code="unsupported_parameter",
                )
