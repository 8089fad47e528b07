"""Log-probabilities of output tokens, in the shapes of the two endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..model.tokenizer import Tokenizer
from ..request import TokenLogprob

LOWEST = -9999.0  # stands for minus infinity, and for what is no number: JSON has no words for them


def completion_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
    """Those of /v1/completions, lists with an entry for each token.

    The likeliest tokens always include the one that came. offset: characters of the text before, counted in tokens as
    they are shown alone.
    """
    tokens = [tokenizer.token_text(entry.token_id) for entry in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "tokens": tokens,
        "top_logprobs": [_by_text(tokenizer, token, entry) for token, entry in zip(tokens, logprobs)],
    }


def _by_text(tokenizer: Tokenizer, token: str, entry: TokenLogprob) -> dict[str, float]:
    """By the text of each token; of two that are shown alike (halves of a character) the likelier one is kept."""
    top: dict[str, float] = {}
    for token_id, logprob in entry.top:
        top.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    top.setdefault(token, _finite(entry.logprob))
    return top


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Those of /v1/chat/completions: an object for each token."""
    content = [
        _token(tokenizer, entry.token_id, entry.logprob)
        | {"top_logprobs": [_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top]}
        for entry in logprobs
    ]
    return {"content": content}


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text, spelt = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(spelt)}


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
