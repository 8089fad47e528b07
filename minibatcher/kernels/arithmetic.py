"""What the kernels must at least read and compute: bytes, FLOPs, and a step's roofline. Plain arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import InvalidParameter
from ..hardware import ModelSpec


def kv_bytes(context_lens: Iterable[int], num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Keys and values that one layer's attention reads when each is read once. context_lens: tokens, a request each."""
    return 2 * sum(context_lens) * num_kv_heads * head_dim * itemsize


def store_bytes(num_tokens: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Keys and values of one layer, read once and written once."""
    return 4 * num_tokens * num_kv_heads * head_dim * itemsize


def attention_flops(query_lens: Sequence[int], context_lens: Sequence[int], num_heads: int, head_dim: int) -> int:
    """QKᵀ and PV of one layer, two FLOPs a multiply-add, counted causally: a query pairs with itself and all before it.

    query_lens: the last tokens of each request's context. Raises InvalidParameter for more queries than context.
    """
    if len(query_lens) != len(context_lens) or any(n > m for n, m in zip(query_lens, context_lens)):
        raise InvalidParameter(
            f"each request needs a context of at least its queries: {list(query_lens)} queries, {list(context_lens)}"
        )
    pairs = sum(n * (m - n) + n * (n + 1) // 2 for n, m in zip(query_lens, context_lens))
    return 4 * num_heads * head_dim * pairs


def decode_step_bytes(model: ModelSpec, context_lens: Iterable[int], dtype: str) -> float:
    """What a decode step of these requests reads: every weight of its products once, and each request's KV cache."""
    return model.linear_bytes(dtype) + sum(context_lens) * model.kv_bytes_per_token(dtype)


def roofline_seconds(num_bytes: float, bandwidth: float, flops: float = 0, rate: float = 1) -> float:
    """The shortest time for so many bytes at `bandwidth` (bytes/s) and FLOPs at `rate` (FLOP/s).

    Source: Williams et al., «Roofline», 2009.
    """
    return max(num_bytes / bandwidth, flops / rate)
