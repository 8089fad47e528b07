"""From logits to the next token, each request by its own parameters and its own random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..request import SamplingParams
from ..transfer import to_device

_MASK = (1 << 64) - 1


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
    banned: Sequence[Sequence[int]] | None = None,
    greedy: Tensor | None = None,
) -> Tensor:
    """The next token of each of N requests. A row's result depends on no other row.

    logits: float32 [N, vocab_size], left unchanged. uniforms: N numbers in [0, 1), see `uniform`; not used by greedy
    rows (temperature 0). banned: for each row, tokens that must not come (min_tokens).
    greedy: int64 [N], the first of each row's largest logits, where they are known already.
    Temperature first, then top-k, then top-p, then the inverse of the cumulative distribution in order of token id.
    Returns int64 [N] on the device of the logits, without waiting for it.
    """
    if banned is not None and any(banned):
        places = [row for row, tokens in enumerate(banned) for _ in tokens]
        logits = logits.clone()
        ban(logits, places, [token for tokens in banned for token in tokens])
        greedy = None
    if greedy is None:
        greedy = logits.argmax(dim=-1)  # the first, so the lowest id, of equal ones
    sampled = [row for row, p in enumerate(params) if p.temperature > 0]
    if not sampled:
        return greedy
    chosen = [params[row] for row in sampled]
    arrays: list[np.ndarray] = [
        np.array(sampled, dtype=np.int64),
        np.array([p.temperature for p in chosen], dtype=np.float32),
        np.array([uniforms[row] for row in sampled], dtype=np.float64),
    ]
    index, temperature, u = to_device(arrays, logits.device)
    rows = logits[index]
    # The largest logit becomes 0 and stays it however small the temperature, so nothing overflows.
    scaled = (rows - rows.amax(dim=-1, keepdim=True)) / temperature.clamp(min=1e-20)[:, None]
    if any(p.top_k or p.top_p < 1 for p in chosen):
        scaled = keep_top(scaled, chosen)
    return greedy.index_copy(0, index, _inverse_cdf(torch.softmax(scaled, dim=-1), u))


def keep_top(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits [N, vocab_size] with all but each row's top-k and top-p tokens at minus infinity.

    Top-p keeps the fewest most probable tokens, of those that top-k left, whose probabilities reach p of their sum.
    Of equally probable tokens the lowest ids are kept. Source of top-p: Holtzman et al., 2019, section 3.1.
    """
    device, vocab_size = logits.device, logits.shape[-1]
    ks = np.array([[min(p.top_k or vocab_size, vocab_size)] for p in params], dtype=np.int64)
    top_k, top_p = to_device([ks, np.array([[p.top_p] for p in params], dtype=np.float64)], device)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(vocab_size, device=device) >= top_k, -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1, dtype=torch.float64)
    before = probabilities.cumsum(dim=-1) - probabilities
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def _inverse_cdf(probabilities: Tensor, u: Tensor) -> Tensor:
    """For each row [N, vocab_size] the first token whose cumulative probability exceeds u [N]. In float64."""
    cumulative = probabilities.double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    token = (cumulative <= u.double()[:, None] * total).sum(dim=-1)
    last = (cumulative < total).sum(dim=-1)  # with any probability, for a u that float32 rounded up to 1
    return torch.minimum(token, last)


def ban(logits: Tensor, rows: Sequence[int], token_ids: Sequence[int]) -> None:
    """Set logits[rows[i], token_ids[i]] to minus infinity, in place."""
    places = [np.array(rows, dtype=np.int64), np.array(token_ids, dtype=np.int64)]
    logits.index_put_(tuple(to_device(places, logits.device)), logits.new_full((), -torch.inf))


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) for a request's output token number `index`.

    Counter-based: it depends on nothing else, so batching and preemption cannot change it. 53 bits.
    Source of the mixing: Steele et al., «Fast Splittable Pseudorandom Number Generators», 2014 (SplitMix64).
    """
    return (_mix(_mix(seed) + 0x9E3779B97F4A7C15 * (index + 1)) >> 11) / (1 << 53)


def request_seed(engine_seed: int, request_id: str) -> int:
    """A seed for a request that brought none: 64 bits from the engine's seed and the request's id."""
    return int.from_bytes(hashlib.blake2b(f"{engine_seed}:{request_id}".encode(), digest_size=8).digest(), "little")


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
