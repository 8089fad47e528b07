"""How fast this machine could have run the very steps that were run: the bound per step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..hardware import ModelSpec

WHAT = (
    "bound: for each step that was run, the larger of bytes / measured bandwidth (all weights once, keys and values of "
    "each context) and FLOPs / measured matrix rate (two for each weight and token, and attention), summed; share: "
    "that sum / the seconds of the run, or / those of its steps where requests arrive over time. A model that fits the "
    "processor's cache reads faster than memory gives, and may lie above it"
)


def bound_s(steps: Iterable[Iterable[float]], model: ModelSpec, dtype: str, rates: Mapping[str, float]) -> float:
    """Seconds below which these steps can't be had at the measured rates.

    steps: [tokens computed, rows, sum of contexts, seconds] each. rates: "bandwidth" in bytes/s, "flops" in FLOP/s.
    """
    total = 0.0
    for num_tokens, rows, contexts, *_ in steps:
        num_bytes = model.linear_bytes(dtype) + contexts * model.kv_bytes_per_token(dtype)
        # The last token of each row sees its whole context, each further one of a prompt at least itself: at least so
        # many pairs, and the bound must not be above the truth.
        pairs = contexts + num_tokens - rows
        flops = model.linear_flops(num_tokens, rows) + model.attention_flops(pairs)
        total += max(num_bytes / rates["bandwidth"], flops / rates["flops"])
    return total


def share_of_bound(
    steps: list[list[float]], model: ModelSpec, dtype: str, rates: Mapping[str, float], seconds: float
) -> dict[str, Any]:
    """bound_s; num_steps; steps_s (their measured seconds); of_run: bound / seconds, those from the first arrival to
    the last token; of_steps: bound / steps_s, which leaves out the time between steps (and waiting for arrivals)."""
    bound, steps_s = bound_s(steps, model, dtype, rates), sum(step[3] for step in steps)
    return {
        "num_steps": len(steps),
        "bound_s": bound,
        "steps_s": steps_s,
        "of_run": bound / seconds if seconds else None,
        "of_steps": bound / steps_s if steps_s else None,
    }
