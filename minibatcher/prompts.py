"""From a workload's rows (lengths, times, perhaps text) to requests with token ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from .errors import WorkloadError
from .request import Request, SamplingParams
from .workload import Workload


def synthetic_prompt(
    num_tokens: int, vocab_size: int, seed: int, request_id: str, special: Iterable[int] = ()
) -> list[int]:
    """`num_tokens` token ids, uniform over the vocabulary less the special ones; the same for the same seed and id."""
    ordinary = np.setdiff1d(np.arange(vocab_size), np.fromiter(special, dtype=np.int64))
    generator = np.random.default_rng([seed, *request_id.encode("utf-8", "surrogatepass")])
    return generator.choice(ordinary, size=num_tokens).tolist()


def to_requests(
    workload: Workload,
    *,
    vocab_size: int,
    tokenizer=None,
    special: Iterable[int] = (),
    params: SamplingParams | None = None,
    seed: int = 0,
    max_model_len: int | None = None,
) -> list[Request]:
    """One Request per row. A row with text is tokenized; a row with lengths alone gets a synthetic prompt.

    A row that names its output length is forced to it (ignore_eos), so that every strategy does the same work; else
    `params` decide when it ends, with max_tokens cut to what the prompt leaves of `max_model_len` tokens, if given.
    Raises WorkloadError for a text without a tokenizer.
    """
    params, special = params or SamplingParams(), tuple(special)
    requests = []
    for row in workload:
        if row.prompt is not None:
            if tokenizer is None:
                raise WorkloadError(
                    f"request {row.request_id!r} of {workload.name} has text, but the model has no tokenizer"
                )
            token_ids = tokenizer.encode(row.prompt, add_special_tokens=True)
        else:
            token_ids = synthetic_prompt(row.prompt_tokens, vocab_size, seed, row.request_id, special)
        own = params
        if row.output_tokens is not None:
            own = replace(
                params, max_tokens=row.output_tokens, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=()
            )
        elif max_model_len is not None:
            own = _cut(params, max_model_len - len(token_ids))
        requests.append(
            Request(
                row.request_id,
                token_ids,
                own,
                arrival_time=row.arrival_time,
                priority=row.priority,
                tenant=row.tenant,
            )
        )
    return requests


def _cut(params: SamplingParams, room: int) -> SamplingParams:
    """At most `room` tokens; a prompt that leaves no room at all is for the engine to refuse."""
    if not 1 <= room < params.max_tokens:
        return params
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
