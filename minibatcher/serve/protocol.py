"""What clients may send: OpenAI's bodies, with the fields that other open engines have added."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..request import MOST_LOGPROBS, PRIORITIES
from .failures import ApiError

LARGEST_SEED = 2**63  # a bound that survives as a double, which the schema makes of it
MOST_TOKENS = 2**31 - 1
LONGEST_STOP = 1_000  # characters of a stop string: the end of a growing text is held against it at each token
# A body of some megabytes can hold a million of anything, and a list of a million faults takes a minute to write.
MOST_PROMPTS, MOST_STOPS, MOST_STOP_TOKENS, MOST_MESSAGES, MOST_PARTS = 4_096, 128, 128, 4_096, 256
TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
SEVERAL = {"type": "array", "minItems": 1, "maxItems": MOST_PROMPTS}


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)


def _as_prompts(value: Any) -> list[str | list[int]]:
    """A prompt in any of its four forms, as a list; by hand, since a list of a million must fail at its first fault."""
    if isinstance(value, str) or _is_token_ids(value):
        return [value]
    items = value if isinstance(value, list) and len(value) <= MOST_PROMPTS else []
    if items and (all(isinstance(item, str) for item in items) or all(_is_token_ids(item) for item in items)):
        return items
    raise PydanticCustomError(
        "prompt",
        "must be a text, token ids, or a list of texts or of lists of token ids; at most "
        f"{MOST_PROMPTS:,} of them, none empty",
    )


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_as_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                SEVERAL | {"items": {"type": "string"}},
                TOKEN_IDS,
                SEVERAL | {"items": TOKEN_IDS},
            ]
        }
    ),
]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class Body(BaseModel):
    """Strict: no "5" for 5, no true for 1. null is the default. Fields that nobody knows are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


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
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
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
    tool_calls: Any = Field(None, description="Not done: null or empty.")
    function_call: Any = Field(None, description="Not done: null or empty.")

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(SamplingBody):
    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MOST_MESSAGES)
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


def check_supported(body: SamplingBody, given: dict[str, Any]) -> None:
    """Raise ApiError, naming the field, for one that asks for what this server does not do. given: the body as sent."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    for name, neutral in (NEUTRAL | {"best_of": (body.n or 1,)}).items():
        value = given.get(name)
        if value is not None and not any(_same(value, other) for other in neutral):
            only = " or ".join(repr(other) for other in neutral)
            raise _unsupported(name, f"{name}; leave it out{f', or give {only}' if only else ''}")
    for message in getattr(body, "messages", ()):
        if message.tool_calls or message.function_call:
            raise _unsupported("messages", "tool_calls and function_call in messages; leave them out")


def _same(value: Any, other: Any) -> bool:
    """Equal, and neither a truth value for a number nor the other way round."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _unsupported(param: str, what: str) -> ApiError:
    return ApiError(400, f"this server does not do {what}", param=param, code="unsupported_parameter")
