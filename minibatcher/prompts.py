"""From a workload's rows (lengths, times, perhaps text) to requests with token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from .errors import InvalidParameter, WorkloadError
from .request import Request, SamplingParams
from .workload import Workload, WorkloadRequest


def synthetic_prompt(
    num_tokens: int,
    vocab_size: int,
    seed: int,
    request_id: str,
    special: Iterable[int] = (),
    *,
    prefix_hashes: Sequence[int] = (),
    tokens_per_hash: int = 512,
) -> list[int]:
    """`num_tokens` token ids, uniform over the vocabulary less the special ones; the same for the same seed and id.

    Each of `prefix_hashes` stands for `tokens_per_hash` tokens at the head, which depend on it and the seed alone: two
    prompts begin alike where their hashes do.
    """
    ordinary = _ordinary(vocab_size, tuple(special))
    token_ids: list[int] = []
    for prefix_hash in prefix_hashes[: -(-num_tokens // tokens_per_hash)]:
        # 256 is no byte of any id
        generator = np.random.default_rng([seed, 256, tokens_per_hash, int(prefix_hash < 0), abs(prefix_hash)])
        token_ids += generator.choice(ordinary, size=tokens_per_hash).tolist()
    generator = np.random.default_rng([seed, *request_id.encode("utf-8", "surrogatepass")])
    token_ids += generator.choice(ordinary, size=max(0, num_tokens - len(token_ids))).tolist()
    return token_ids[:num_tokens]


@lru_cache(maxsize=4)  # the same for all prompts of a workload, and slow to find among 100,000 tokens
def _ordinary(vocab_size: int, special: tuple[int, ...]) -> np.ndarray:
    ids = np.setdiff1d(np.arange(vocab_size), np.array(special, dtype=np.int64))
    ids.flags.writeable = False
    return ids


def to_requests(
    workload: Workload,
    *,
    vocab_size: int,
    tokenizer=None,
    special: Iterable[int] = (),
    params: SamplingParams | None = None,
    seed: int = 0,
    max_model_len: int | None = None,
    declared_max_tokens: int | None = None,
) -> list[Request]:
    """One Request per row. A row with text is tokenized; a row with lengths alone gets a synthetic prompt.

    A row that names its output length is forced to it (`forced`), so that every strategy does the same work; else
    `params` decide when it ends, with max_tokens cut to what the prompt leaves of `max_model_len` tokens, if given.
    Raises WorkloadError for a text without a tokenizer, InvalidParameter for a declared_max_tokens that is no number.
    """
    check_declared(declared_max_tokens)
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
            assert row.prompt_tokens is not None  # a row has text or a length
            token_ids = synthetic_prompt(
                row.prompt_tokens,
                vocab_size,
                seed,
                row.request_id,
                special,
                prefix_hashes=row.prefix_hashes,
                tokens_per_hash=row.tokens_per_hash,
            )
        room = None if max_model_len is None else max_model_len - len(token_ids)
        requests.append(to_request(row, token_ids, params_of(row, params, declared_max_tokens, room)))
    return requests


def params_of(
    row: WorkloadRequest, params: SamplingParams, declared_max_tokens: int | None = None, room: int | None = None
) -> SamplingParams:
    """Of a row that names its output length: `forced`; of any other `params`, with max_tokens cut to `room` tokens."""
    if row.output_tokens is not None:
        return forced(params, row.output_tokens, declared_max_tokens, room)
    return params if room is None else _cut(params, room)


def special_token_ids(config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that a synthetic prompt must not hold: of a model.config.ModelConfig and a Tokenizer, if there is one."""
    ids = {*config.eos_token_ids, config.bos_token_id, config.pad_token_id}
    if tokenizer is not None:
        ids |= tokenizer.special_ids
    return tuple(sorted(i for i in ids if i is not None))


def to_request(row: WorkloadRequest, token_ids: Sequence[int], params: SamplingParams) -> Request:
    return Request(
        row.request_id, token_ids, params, arrival_time=row.arrival_time, priority=row.priority, tenant=row.tenant
    )


def forced(
    params: SamplingParams, output_tokens: int, declared_max_tokens: int | None = None, room: int | None = None
) -> SamplingParams:
    """Parameters with which a request ends after exactly `output_tokens` tokens.

    Without declared_max_tokens they are its max_tokens, and the scheduler knows them. With it the request declares
    that many, or what its prompt leaves of the context (`room`) if that is less, and ends earlier as if the model had
    stopped: as in practice, where nobody knows how long an answer will be.
    """
    never_else: dict[str, Any] = {"min_tokens": 0, "ignore_eos": True, "stop": (), "stop_token_ids": ()}
    if declared_max_tokens is None:
        return replace(params, max_tokens=output_tokens, stop_after=None, **never_else)
    declared = declared_max_tokens if room is None else min(declared_max_tokens, room)
    return replace(params, max_tokens=max(output_tokens, declared), stop_after=output_tokens, **never_else)


def check_declared(declared_max_tokens: int | None) -> None:
    """Raise InvalidParameter for what is no number of tokens."""
    if declared_max_tokens is not None and (type(declared_max_tokens) is not int or declared_max_tokens < 1):
        raise InvalidParameter(
            f"declared_max_tokens must be a whole number of at least 1, or None, not {declared_max_tokens!r}"
        )


def _cut(params: SamplingParams, room: int) -> SamplingParams:
    """At most `room` tokens; a prompt that leaves no room at all is for the engine to refuse."""
    if not 1 <= room < params.max_tokens:
        return params
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
