"""From a workload's rows to the bodies that are sent: the same requests that `compare` serves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..errors import WorkloadError
from ..prompts import params_of, synthetic_prompt
from ..request import SamplingParams
from ..workload import Workload, WorkloadRequest
from .server import COUNTS_EACH_EVENT, TAKES_PRIORITY, Server
from .vocabulary import Vocabulary

WARM_UP_TOKENS, WARM_UP_OUTPUT = 32, 4  # of prompt and answer


@dataclass(frozen=True)
class Ask:
    """One request as it is sent. num_prompt_tokens: None where only the server knows. forced: it names its length."""

    row: WorkloadRequest
    body: bytes
    num_prompt_tokens: int | None
    max_tokens: int
    forced: bool


def asks_of(
    workload: Workload,
    server: Server,
    vocabulary: Vocabulary,
    *,
    params: SamplingParams,
    seed: int,
    max_model_len: int | None,
    chat: bool = False,
    as_text: bool = False,
) -> list[Ask]:
    """One for each row. A row with text is sent as text, a row with lengths alone as synthetic token ids.

    as_text: those ids as the text that they stand for, which a chat needs in any case; a server's tokenizer may make
    other tokens of it. Raises WorkloadError where the vocabulary is not known, or the tokenizer for a text.
    """
    asks = []
    for row in workload:
        prompt = _prompt(row, workload, vocabulary, seed, chat or as_text)
        length = len(prompt) if isinstance(prompt, list) else row.prompt_tokens
        room = None if max_model_len is None or length is None else max_model_len - length
        own = params_of(row, params, room=room)
        forced = row.output_tokens is not None
        body = _body(server, prompt, own, row.priority, chat, forced)
        asks.append(Ask(row, json.dumps(body).encode(), length, own.max_tokens, forced))
    return asks


def warm_up_asks(server: Server, vocabulary: Vocabulary, count: int, *, chat: bool, text: bool) -> list[Ask]:
    """Short requests that have nothing in common with the workload's, so that they leave it no prefix to find."""
    asks = []
    for i in range(count):
        prompt: str | list[int] = f"Warm-up {i}."
        if not text and vocabulary.size is not None:
            prompt = synthetic_prompt(WARM_UP_TOKENS, vocabulary.size, 0, f"warm-up-{i}", vocabulary.special)
        params = SamplingParams(max_tokens=WARM_UP_OUTPUT)
        row = WorkloadRequest(f"warm-up-{i}", 0.0, None, WARM_UP_OUTPUT, prompt="")
        body = _body(server, prompt, params, 0, chat, True)
        asks.append(Ask(row, json.dumps(body).encode(), None, WARM_UP_OUTPUT, True))
    return asks


def _prompt(
    row: WorkloadRequest, workload: Workload, vocabulary: Vocabulary, seed: int, as_text: bool
) -> str | list[int]:
    if row.prompt is not None:
        return row.prompt
    if as_text and vocabulary.tokenizer is None:
        raise WorkloadError(
            f"the requests of {workload.name} have lengths but no text; to send random text (--chat, --as-text), name "
            "the model's tokenizer with --tokenizer (bard, a folder, a tokenizer.json or a .gguf file), or use a "
            "workload with prompts"
        )
    if vocabulary.size is None:
        raise WorkloadError(
            f"the requests of {workload.name} have lengths but no text, so prompts are made of random token ids, and "
            "the server does not tell how many tokens its model has; name its tokenizer with --tokenizer (a folder, a "
            "tokenizer.json or a .gguf file)"
        )
    assert row.prompt_tokens is not None  # a row has text or a length
    token_ids = synthetic_prompt(
        row.prompt_tokens,
        vocabulary.size,
        seed,
        row.request_id,
        vocabulary.special,
        prefix_hashes=row.prefix_hashes,
        tokens_per_hash=row.tokens_per_hash,
    )
    return vocabulary.tokenizer.decode(token_ids) if as_text and vocabulary.tokenizer else token_ids


def _body(
    server: Server, prompt: str | list[int], params: SamplingParams, priority: int, chat: bool, forced: bool
) -> dict[str, Any]:
    options: dict[str, Any] = {"include_usage": True}
    if server.kind in COUNTS_EACH_EVENT:
        options["continuous_usage_stats"] = True
    body: dict[str, Any] = {"model": server.model}
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body |= {"max_tokens": params.max_tokens, "temperature": 0, "stream": True, "stream_options": options}
    body |= {key: value for key, value in server.extensions.items() if forced or key != "ignore_eos"}
    if priority and server.kind in TAKES_PRIORITY:
        body["priority"] = priority
    return body
