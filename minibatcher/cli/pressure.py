"""Short memory, and requests that ask for more than they use: what shows how admission and preemption policies differ.

And limits that no request, or no tenant, could ever meet.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidParameter
from ..limits import OTHERS, Limits
from ..scheduling import strategy
from ..workload import Workload, WorkloadRequest

POOL_SHARE = 0.4  # of what a full batch takes in the end
MOST_TENANTS = 10  # in a sentence


def shorten_memory(
    args: argparse.Namespace,
    workload: Workload,
    options: dict[str, Any],
    *,
    strategies: Sequence[str],
    max_num_seqs: int,
    max_model_len: int,
    max_tokens: int = 1,
) -> tuple[int | None, str]:
    """max_tokens that requests declare (None: exactly what they use), and a sentence on it and on the KV pool.

    Where several admission or preemption policies are compared and nothing else is asked for, requests declare the
    workload's longest output, and options["kv_cache_tokens"] becomes 40 % of what `max_num_seqs` requests hold at their
    end, on average; but no less than the largest request may ask for. max_tokens: of rows that name no output length.
    """
    several = any(len(names or ()) > 1 for names in (args.admission, args.preemption))
    outputs = [row.output_tokens for row in workload if row.output_tokens is not None]
    declared, sentences = args.declared_max_tokens, []
    if declared is None and several and outputs:
        declared = max(outputs)
    if declared is not None and outputs:
        mean = sum(outputs) / len(outputs)
        sentences.append(
            f"Requests declare max_tokens {declared:,}, as far as their context goes, and use {mean:,.0f} on average "
            "(--declared-max-tokens)."
        )
    if several and "kv_cache_tokens" not in options:
        used = [
            (row.prompt_tokens or 0) + (row.output_tokens or _room(row, max_tokens, max_model_len)) for row in workload
        ]
        asked = [(row.prompt_tokens or 0) + _asked(row, declared, max_tokens, max_model_len) for row in workload]
        seats = min(max_num_seqs, len(workload))
        wanted = POOL_SHARE * seats * sum(used) / len(used)
        if args.max_model_len and any(strategy(name).kv_layout == "slots" for name in strategies):
            asked.append(args.max_model_len)
        block_size = options.get("block_size", 16)
        options["kv_cache_tokens"] = -(-max(round(wanted), *asked) // block_size) * block_size
        why = f"{100 * POOL_SHARE:.0f} % of what {seats:,} requests hold at their end, on average"
        if max(asked) > wanted:
            why = "what the largest request may ask for"
        sentences.append(f"KV pool of {options['kv_cache_tokens']:,} tokens: {why} (--kv-cache-tokens).")
    return declared, " ".join(sentences)


def check_limits(
    limits: Limits | None, workload: Workload, declared: int | None, max_model_len: int, max_tokens: int = 1
) -> None:
    """Raise InvalidParameter for a limit of a tenant that no request has, and for one that a request can never meet.

    declared: what shorten_memory returned. max_tokens: of rows that name no output length.
    """
    if limits is None:
        return
    tenants = sorted({row.tenant for row in workload})
    for name in limits.tenants:
        if name not in (OTHERS, *tenants):
            known = ", ".join(tenants[:MOST_TENANTS]) + (", …" if len(tenants) > MOST_TENANTS else "")
            raise InvalidParameter(
                f"--tenant-limit: no request is of tenant {name!r}; tenants of this workload: {known}"
            )
    for row in workload:
        need = (row.prompt_tokens or 0) + _asked(row, declared, max_tokens, max_model_len)
        asks = f"request {row.request_id!r} asks for {need:,} tokens (prompt + max_tokens)"
        if limits.max_waiting_tokens is not None and need > limits.max_waiting_tokens:
            raise InvalidParameter(
                f"{asks}, which alone is more than --max-waiting-tokens {limits.max_waiting_tokens:,}; raise it"
            )
        limit = limits.of(row.tenant)
        if limit is not None and limit.burst_tokens is not None and need > limit.burst_tokens:
            raise InvalidParameter(
                f"{asks} at once, and the bucket of tenant {row.tenant!r} holds {limit.burst_tokens:,.0f}; raise its "
                f"BURST: --tenant-limit {row.tenant}={limit.tokens_per_s:g}:{need}"
            )


def _asked(row: WorkloadRequest, declared: int | None, max_tokens: int, max_model_len: int) -> int:
    """Output tokens that a row's request declares."""
    if row.output_tokens is None:
        return _room(row, max_tokens, max_model_len)
    return max(row.output_tokens, _room(row, declared or row.output_tokens, max_model_len))


def _room(row: WorkloadRequest, num_tokens: int, max_model_len: int) -> int:
    return max(1, min(num_tokens, max_model_len - (row.prompt_tokens or 0)))
