"""Attention kernels, one step at a time: naive, tiled, paged. The fourth step, ragged, is in triton_ragged.py.

All compute softmax online: keys are seen a few at a time, and what was summed so far is rescaled whenever a larger
score turns up (Milakov and Gimelshein 2018; in attention, Rabe and Staats 2021, FlashAttention 2022).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import InvalidParameter
from .triton_tiles import LOG2_E, check_heads, head_pad, ladder_tiles, padded


@triton.jit
def naive_attention_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, scale_log2,
    stride_out_token, stride_out_head, stride_q_token, stride_q_head,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """One program for each query and head; it reads one key after another."""
    query = tl.program_id(0).to(tl.int64)  # it is multiplied by strides, and a tensor may have more than 2**31 numbers
    head = tl.program_id(1)
    kv_head = head // GROUP
    d = tl.arange(0, HEAD_PAD)  # HEAD_DIM up to a power of two, the only sizes that Triton has; masks hide the rest
    q = tl.load(q_ptr + query * stride_q_token + head * stride_q_head + d, mask=d < HEAD_DIM, other=0.0)
    # scale_log2 is scale * log2(e): exp(scale * x) = exp2(scale_log2 * x), and exp2 is one instruction of the hardware.
    q = q.to(tl.float32) * scale_log2

    largest = float("-inf")  # score so far
    total = 0.0  # sum of exp2(score - largest)
    acc = tl.zeros([HEAD_PAD], tl.float32)  # sum of exp2(score - largest) * value
    for key in range(0, query + 1):  # causal: a query sees itself and what came before
        k = tl.load(k_ptr + key * stride_k_token + kv_head * stride_k_head + d, mask=d < HEAD_DIM, other=0.0)
        v = tl.load(v_ptr + key * stride_v_token + kv_head * stride_v_head + d, mask=d < HEAD_DIM, other=0.0)
        score = tl.sum(q * k, 0)
        new_largest = tl.maximum(largest, score)
        rescale = tl.exp2(largest - new_largest)
        weight = tl.exp2(score - new_largest)
        total = total * rescale + weight
        acc = acc * rescale + weight * v
        largest = new_largest

    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + query * stride_out_token + head * stride_out_head + d, out, mask=d < HEAD_DIM)


@triton.jit
def tiled_attention_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, scale_log2, num_queries,
    stride_out_token, stride_out_head, stride_q_token, stride_q_head,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program for each tile of BLOCK_M queries and head; it reads a tile of BLOCK_N keys after another.

    A key is loaded once for BLOCK_M queries, and the scores of a tile are one product of matrices.
    """
    first_query = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    kv_head = head // GROUP
    d = tl.arange(0, HEAD_PAD)
    query = first_query + tl.arange(0, BLOCK_M)
    q_at = query[:, None].to(tl.int64) * stride_q_token + head * stride_q_head + d[None, :]
    q_mask = (query[:, None] < num_queries) & (d[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    end = tl.minimum(first_query + BLOCK_M, num_queries)
    for start in range(0, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        kv_mask = (key[:, None] < end) & (d[None, :] < HEAD_DIM)
        k_at = key[:, None].to(tl.int64) * stride_k_token + kv_head * stride_k_head + d[None, :]
        v_at = key[:, None].to(tl.int64) * stride_v_token + kv_head * stride_v_head + d[None, :]
        k = tl.load(k_ptr + k_at, mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + v_at, mask=kv_mask, other=0.0)

        # "ieee" keeps all 24 bits of a float32, which tensor cores would cut to TF32's 11; halves are not concerned.
        scores = tl.dot(q, k.T, input_precision="ieee") * scale_log2
        scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        rescale = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * rescale + tl.sum(weights, 1)
        # Weights, between 0 and 1, are rounded to v's dtype: tensor cores multiply halves by halves, adding in float32.
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest

    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    out_at = query[:, None].to(tl.int64) * stride_out_token + head * stride_out_head + d[None, :]
    tl.store(out_ptr + out_at, out, mask=q_mask)


@triton.jit
def paged_attention_kernel(
    out_ptr, q_ptr, k_cache_ptr, v_cache_ptr, block_table_ptr, scale_log2, num_queries, context_len,
    stride_out_token, stride_out_head, stride_q_token, stride_q_head,
    stride_k_block, stride_k_slot, stride_k_head, stride_v_block, stride_v_slot, stride_v_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As tiled, but keys lie in blocks wherever there was room, and the queries are the last of a longer context."""
    first_query = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    kv_head = head // GROUP
    d = tl.arange(0, HEAD_PAD)
    query = first_query + tl.arange(0, BLOCK_M)
    position = context_len - num_queries + query  # of the query in its request
    q_at = query[:, None].to(tl.int64) * stride_q_token + head * stride_q_head + d[None, :]
    q_mask = (query[:, None] < num_queries) & (d[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    end = tl.minimum(context_len - num_queries + first_query + BLOCK_M, context_len)
    for start in range(0, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
        slot = key % BLOCK_SIZE
        kv_mask = (key[:, None] < end) & (d[None, :] < HEAD_DIM)
        k_at = (block * stride_k_block + slot * stride_k_slot)[:, None] + kv_head * stride_k_head + d[None, :]
        v_at = (block * stride_v_block + slot * stride_v_slot)[:, None] + kv_head * stride_v_head + d[None, :]
        k = tl.load(k_cache_ptr + k_at, mask=kv_mask, other=0.0)
        v = tl.load(v_cache_ptr + v_at, mask=kv_mask, other=0.0)

        scores = tl.dot(q, k.T, input_precision="ieee") * scale_log2
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        rescale = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest

    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    out_at = query[:, None].to(tl.int64) * stride_out_token + head * stride_out_head + d[None, :]
    tl.store(out_ptr + out_at, out, mask=q_mask)


def naive_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one request, q [n, num_heads, head_dim] over k, v [n, num_kv_heads, head_dim].

    Scores are multiplied by scale. Returns [n, num_heads, head_dim] in q's dtype. Raises InvalidParameter, DeviceError.
    """
    _check_solo(q, k, v)
    n, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if n == 0:
        return out
    naive_attention_kernel[(n, num_heads)](
        out, q, k, v, scale * LOG2_E,
        *out.stride()[:2], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        num_heads // k.shape[1], head_dim, padded(head_dim),
        num_warps=1,
    )  # fmt: skip
    return out


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The same as naive_attention, a tile of queries times a tile of keys at once."""
    _check_solo(q, k, v)
    n, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if n == 0:
        return out
    tiles = ladder_tiles(q.dtype, head_dim)
    tiled_attention_kernel[(triton.cdiv(n, tiles.block_m), num_heads)](
        out, q, k, v, scale * LOG2_E, n,
        *out.stride()[:2], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        num_heads // k.shape[1], head_dim, head_pad(head_dim), tiles.block_m, tiles.block_n,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, scale: float, context_len: int
) -> Tensor:
    """The last tokens of one request, q [n, num_heads, head_dim], over its context_len keys and values in the cache.

    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]; block_table: int32 [max_blocks], the request's
    blocks in order. Returns [n, num_heads, head_dim] in q's dtype. Raises InvalidParameter, DeviceError.
    """
    check_heads(q, k_cache, v_cache)
    n, num_heads, head_dim = q.shape
    if not n <= context_len <= len(block_table) * k_cache.shape[1]:
        raise InvalidParameter(
            f"context_len is {context_len}; it must be at least the {n} queries and at most what {len(block_table)} "
            f"blocks of {k_cache.shape[1]} tokens hold"
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if n == 0:
        return out
    tiles = ladder_tiles(q.dtype, head_dim)
    paged_attention_kernel[(triton.cdiv(n, tiles.block_m), num_heads)](
        out, q, k_cache, v_cache, block_table, scale * LOG2_E, n, context_len,
        *out.stride()[:2], *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        num_heads // k_cache.shape[2], head_dim, head_pad(head_dim), k_cache.shape[1], tiles.block_m, tiles.block_n,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def _check_solo(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_heads(q, k, v)
    if len(q) != len(k):
        raise InvalidParameter(f"{len(q)} queries and {len(k)} keys: here each token has one of both")
