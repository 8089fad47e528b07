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
    generator = np.random.default_rng([seed, *request_id.encode()])
    return generator.choice(ordinary, size=num_tokens).tolist()


def to_requests(
    workload: Workload,
    *,
    vocab_size: int,
    tokenizer=None,
    special: Iterable[int] = (),
    params: SamplingParams | None = None,
    seed: int = 0,
) -> list[Request]:
    """One Request per row. A row with text is tokenized; a row with lengths alone gets a synthetic prompt.

    A row that names its output length is forced to it (ignore_eos), so that every strategy does the same work; else
    `params` decide when it ends. Raises WorkloadError for a text without a tokenizer.
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
        forced = params
        if row.output_tokens is not None:
            forced = replace(
                params, max_tokens=row.output_tokens, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=()
            )
        requests.append(
            Request(
                row.request_id,
                token_ids,
                forced,
                arrival_time=row.arrival_time,
                priority=row.priority,
                tenant=row.tenant,
            )
        )
    return requests
