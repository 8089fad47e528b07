"""Attention for a step of decodes only: one query a request.

The step after ragged (triton_ragged.py), for steps in which no request is still at its prompt. There is little to
compute and a whole context to read, so what counts is that enough programs read at the same time. With few requests,
each context is split among several programs, and a second kernel merges what they found (Flash-Decoding, Dao et al.
2023). How many splits there are follows from the GPU; in the interpreter it is 1 unless more are asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import InvalidParameter
from .triton_tiles import LOG2_E, check_heads, decode_tiles, default_splits, head_pad, padded


# What changes from step to step is not specialized: compiling anew for another alignment would hold up a step.
@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["block_tables_ptr", "context_lens_ptr"])
def decode_attention_kernel(
    out_ptr, log_sums_ptr, q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, context_lens_ptr, scale_log2,
    stride_out_request, stride_out_split, stride_out_head, stride_q_request, stride_q_head,
    stride_k_block, stride_k_slot, stride_k_head, stride_v_block, stride_v_slot, stride_v_head, stride_table,
    IS_SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_DOT: tl.constexpr,
):  # fmt: skip
    """One program for each request, KV head and split. Its rows are the GROUP query heads that share the KV head."""
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    context_len = tl.load(context_lens_ptr + request)
    share = tl.cdiv(tl.cdiv(context_len, num_splits), BLOCK_N) * BLOCK_N  # keys of a split: whole tiles
    start = split * share
    end = tl.minimum(start + share, context_len)

    row = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + row
    d = tl.arange(0, HEAD_PAD)
    q_mask = (row[:, None] < GROUP) & (d[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + request * stride_q_request + head[:, None] * stride_q_head + d[None, :], mask=q_mask, other=0.0)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    block_table_ptr = block_tables_ptr + request * stride_table
    for first_key in range(start, end, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
        slot = key % BLOCK_SIZE
        kv_mask = (key[:, None] < end) & (d[None, :] < HEAD_DIM)
        k_at = (block * stride_k_block + slot * stride_k_slot)[:, None] + kv_head * stride_k_head + d[None, :]
        v_at = (block * stride_v_block + slot * stride_v_slot)[:, None] + kv_head * stride_v_head + d[None, :]
        k = tl.load(k_cache_ptr + k_at, mask=kv_mask, other=0.0)
        v = tl.load(v_cache_ptr + v_at, mask=kv_mask, other=0.0)

        if USE_DOT:
            scores = tl.dot(q, k.T, input_precision="ieee")
        else:
            scores = tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32)[None, :, :], 2)
        scores = tl.where(key[None, :] < end, scores * scale_log2, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        rescale = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * rescale + tl.sum(weights, 1)
        if USE_DOT:
            acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        else:
            acc = acc * rescale[:, None] + tl.sum(weights[:, :, None] * v.to(tl.float32)[None, :, :], 1)
        largest = new_largest

    total = tl.where(total > 0, total, 1.0)  # without keys (a padding row, an empty split) the output is zeros
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    out_row = request * stride_out_request + split * stride_out_split + head * stride_out_head
    tl.store(out_ptr + out_row[:, None] + d[None, :], out, mask=q_mask)
    if IS_SPLIT:
        # log2 of the sum of all exp2(score): how much this split weighs beside the others; -inf if it had no keys.
        log_sum = largest + tl.log2(total)
        log_sums_at = (request * num_splits + split) * (tl.num_programs(1) * GROUP) + head
        tl.store(log_sums_ptr + log_sums_at, log_sum, mask=row < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(
    out_ptr, parts_ptr, log_sums_ptr, num_splits, stride_out_request, stride_out_head,
    SPLITS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """One program for each request and query head: the mean of its splits' outputs, weighted by their sums."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    split = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, HEAD_PAD)
    part = (request * num_splits + split) * num_heads + head  # parts [R, num_splits, num_heads, HEAD_DIM]
    log_sum = tl.load(log_sums_ptr + part, mask=split < num_splits, other=float("-inf"))
    part_mask = (split[:, None] < num_splits) & (d[None, :] < HEAD_DIM)
    parts = tl.load(parts_ptr + part[:, None] * HEAD_DIM + d[None, :], mask=part_mask, other=0.0)

    largest = tl.max(log_sum, 0)
    weight = tl.exp2(log_sum - tl.where(largest > float("-inf"), largest, 0.0))
    total = tl.sum(weight, 0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    out_at = request * stride_out_request + head * stride_out_head + d
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    num_splits: int | None = None,
) -> Tensor:
    """One query for each request over its whole context.

    q: [R, num_heads, head_dim]; k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]; block_tables: int32
    [R, max_blocks]; context_lens: int32 [R], where 0 marks a padding row and gives zeros. num_splits: into how many
    parts each context is split; None chooses by the GPU and the shapes. Returns [R, num_heads, head_dim] in q's dtype.
    Waits for nothing on the device, and the grid follows from the shapes alone, so that the launch can be captured in a
    CUDA graph and replayed with other contexts. Raises InvalidParameter, DeviceError.
    """
    check_heads(q, k_cache, v_cache)
    num_requests, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    if num_splits is None:
        num_splits = default_splits(num_requests * num_kv_heads, block_tables.shape[1] * block_size)
    elif num_splits < 1:
        raise InvalidParameter(f"num_splits is {num_splits}; it must be at least 1, or None to choose by the GPU")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_requests == 0:
        return out
    if num_splits == 1:
        parts, log_sums = out[:, None], out  # the output is written directly, and there are no sums to merge
    else:
        parts = torch.empty((num_requests, num_splits, num_heads, head_dim), dtype=torch.float32, device=q.device)
        log_sums = torch.empty((num_requests, num_splits, num_heads), dtype=torch.float32, device=q.device)
    tiles = decode_tiles(q.dtype, head_dim, group)
    decode_attention_kernel[(num_requests, num_kv_heads, num_splits)](
        parts, log_sums, q, k_cache, v_cache, block_tables, context_lens, scale * LOG2_E,
        *parts.stride()[:3], *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], block_tables.stride(0),
        num_splits > 1, group, head_dim, head_pad(head_dim), block_size, tiles.block_m, tiles.block_n, tiles.use_dot,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits_kernel[(num_requests, num_heads)](
            out, parts, log_sums, num_splits, *out.stride()[:2],
            max(32, padded(num_splits)), head_dim, padded(head_dim),
            num_warps=4,
        )  # fmt: skip
    return out
