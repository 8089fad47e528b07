"""The two-line front door: `LLM("bard").generate(prompts)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from .engine import Engine
from .errors import InvalidParameter
from .request import FinishReason, Request, SamplingParams, TokenLogprob

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """One finished request: its text without special tokens, its token ids with them. error: why it failed, if so.

    logprobs: of its token ids, where its SamplingParams ask for them.
    """

    request_id: str
    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    finish_reason: FinishReason | None  # None where an interrupt came first
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


class LLM:
    """A model behind an engine, for prompts that are all there at once.

    Options are those of `Engine.from_model`: strategy, device, dtype, max_num_seqs, ... Raises ModelError, DeviceError.
    """

    def __init__(self, model: str = "bard", **options: Any) -> None:
        self.engine = Engine.from_model(model, **options)
        self.tokenizer = self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Completions in the order of the prompts (texts, or lists of token ids).

        params: one SamplingParams for all, or one each.
        """
        if isinstance(prompts, str) or (len(prompts) > 0 and _is_token_id(prompts[0])):
            prompts = cast("list[Prompt]", [prompts])
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidParameter(
                f"{len(prompts)} prompts but {len(params)} SamplingParams; give one for all, or one each"
            )
        requests = [
            Request(f"prompt-{i}", self.engine.encode(cast("Prompt", prompt)), param)
            for i, (prompt, param) in enumerate(zip(prompts, params))
        ]
        self.engine.run(requests, progress=progress)
        return [
            Completion(
                r.request_id,
                r.output_text,
                r.output_token_ids,
                r.num_prompt_tokens,
                r.finish_reason,
                r.error,
                r.logprobs,
            )
            for r in requests
        ]


def _is_token_id(value: object) -> bool:
    """An int, or a number of an array or a tensor; not a list of them."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0
