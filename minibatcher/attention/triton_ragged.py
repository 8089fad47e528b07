"""Attention for a mixed step: chunks of prompts and decodes of many requests, in one launch.

The fourth step after naive, tiled and paged (triton_ladder.py). What is new:
- The queries of all requests are packed one after another without padding, and each program finds the request that its
  tile belongs to by binary search (find_request).
- The query heads that share a KV head (GQA) are rows of the same tile, so that a key is loaded once for all of them.
- The loop over the keys is split in two: most keys lie before every query of the tile and need no mask, and only the
  last ones, on the diagonal, pay for one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_tiles import LOG2_E, check_heads, head_pad, ragged_tiles


@triton.jit
def find_request(tile, cu_seqlens_q_ptr, num_requests, BLOCK_Q: tl.constexpr):
    """The request that owns a tile, by binary search.

    Request r is given the tiles from cu_seqlens_q[r] // BLOCK_Q + r on: never fewer than it needs, and computed without
    looking at any other request. A tile beyond the request's queries has nothing to do.

    BLOCK_Q = 4 and queries of lengths 3, 1, 9 give cu_seqlens_q 0, 3, 4, 13, and the requests' first tiles are
    0 // 4 + 0 = 0, 3 // 4 + 1 = 1 and 4 // 4 + 2 = 3: one tile for 3 queries, tiles 1 and 2 for 1 query (tile 2 has
    nothing to do), and from tile 3 on there are 9 queries, in tiles 3, 4 and 5.
    """
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(cu_seqlens_q_ptr + middle) // BLOCK_Q + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def attend(
    largest, total, acc, q, position, start, end, kv_head,
    k_cache_ptr, v_cache_ptr, block_table_ptr, scale_log2,
    stride_k_block, stride_k_slot, stride_k_head, stride_v_block, stride_v_slot, stride_v_head,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys start to end. Without MASKED, all are visible to every row and fill whole tiles."""
    d = tl.arange(0, HEAD_PAD)
    for first_key in range(start, end, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        kv_mask = d[None, :] < HEAD_DIM
        if MASKED:
            kv_mask = kv_mask & (key[:, None] < end)
            block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
        else:
            block = tl.load(block_table_ptr + key // BLOCK_SIZE).to(tl.int64)
        slot = key % BLOCK_SIZE
        k_at = (block * stride_k_block + slot * stride_k_slot)[:, None] + kv_head * stride_k_head + d[None, :]
        v_at = (block * stride_v_block + slot * stride_v_slot)[:, None] + kv_head * stride_v_head + d[None, :]
        k = tl.load(k_cache_ptr + k_at, mask=kv_mask, other=0.0)
        v = tl.load(v_cache_ptr + v_at, mask=kv_mask, other=0.0)

        scores = tl.dot(q, k.T, input_precision="ieee") * scale_log2
        if MASKED:
            scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        rescale = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    return largest, total, acc


# What changes from step to step is not specialized: compiling anew for another alignment would hold up a step.
@triton.jit(
    do_not_specialize=["num_requests", "stride_table"],
    do_not_specialize_on_alignment=["block_tables_ptr", "cu_seqlens_q_ptr", "context_lens_ptr"],
)
def ragged_attention_kernel(
    out_ptr, q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, cu_seqlens_q_ptr, context_lens_ptr,
    scale_log2, num_requests, stride_out_token, stride_out_head, stride_q_token, stride_q_head,
    stride_k_block, stride_k_slot, stride_k_head, stride_v_block, stride_v_slot, stride_v_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program for each tile of BLOCK_Q queries of one request and KV head. BLOCK_M >= BLOCK_Q * GROUP rows."""
    # The last tiles of a prompt see the most keys, so they are begun first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request = find_request(tile, cu_seqlens_q_ptr, num_requests, BLOCK_Q)
    first_token = tl.load(cu_seqlens_q_ptr + request)
    num_queries = tl.load(cu_seqlens_q_ptr + request + 1) - first_token
    context_len = tl.load(context_lens_ptr + request)
    first_query = (tile - (first_token // BLOCK_Q + request)) * BLOCK_Q

    if first_query < num_queries:
        row = tl.arange(0, BLOCK_M)
        query = first_query + row // GROUP
        head = kv_head * GROUP + row % GROUP
        earlier = context_len - num_queries  # tokens that earlier steps computed
        position = earlier + query
        d = tl.arange(0, HEAD_PAD)
        row_mask = (query < num_queries) & (row < BLOCK_Q * GROUP)
        q_mask = row_mask[:, None] & (d[None, :] < HEAD_DIM)
        token = (first_token + query).to(tl.int64)
        q = tl.load(
            q_ptr + (token * stride_q_token + head * stride_q_head)[:, None] + d[None, :], mask=q_mask, other=0.0
        )

        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
        block_table_ptr = block_tables_ptr + request.to(tl.int64) * stride_table
        # Up to `clear`, whole tiles of keys lie before every query; only the rest, on the diagonal, needs masks.
        clear = (earlier + first_query + 1) // BLOCK_N * BLOCK_N
        end = tl.minimum(earlier + first_query + BLOCK_Q, context_len)
        largest, total, acc = attend(
            largest, total, acc, q, position, 0, clear, kv_head,
            k_cache_ptr, v_cache_ptr, block_table_ptr, scale_log2,
            stride_k_block, stride_k_slot, stride_k_head, stride_v_block, stride_v_slot, stride_v_head,
            HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_N, MASKED=False,
        )  # fmt: skip
        largest, total, acc = attend(
            largest, total, acc, q, position, clear, end, kv_head,
            k_cache_ptr, v_cache_ptr, block_table_ptr, scale_log2,
            stride_k_block, stride_k_slot, stride_k_head, stride_v_block, stride_v_slot, stride_v_head,
            HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_N, MASKED=True,
        )  # fmt: skip

        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        out_at = (token * stride_out_token + head * stride_out_head)[:, None] + d[None, :]
        tl.store(out_ptr + out_at, out, mask=q_mask)


def ragged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """Each query sees its own request's tokens up to itself; the queries of a request are the last of its context.

    q: [T, num_heads, head_dim], packed; k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], this step's
    keys and values already stored; block_tables: int32 [R, max_blocks]; cu_seqlens_q: int32 [R + 1], request r owns the
    tokens cu_seqlens_q[r] : cu_seqlens_q[r + 1]; context_lens: int32 [R]. Returns [T, num_heads, head_dim] in q's
    dtype; tokens that no request owns are left unwritten. Waits for nothing on the device: the grid follows from the
    shapes. Raises InvalidParameter, DeviceError.
    """
    check_heads(q, k_cache, v_cache)
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_requests = len(context_lens)
    group = num_heads // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_requests == 0:
        return out
    tiles = ragged_tiles(q.dtype, head_dim, group)
    block_q = tiles.block_m // group
    # As many tiles as find_request may hand out, known without reading cu_seqlens_q, which is on the device: request r
    # begins with tile cu_seqlens_q[r] // block_q + r, so R requests end before tile num_tokens // block_q + R.
    ragged_attention_kernel[(num_tokens // block_q + num_requests, num_kv_heads)](
        out, q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens,
        scale * LOG2_E, num_requests, *out.stride()[:2], *q.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3], block_tables.stride(0),
        group, head_dim, head_pad(head_dim), block_size, block_q, tiles.block_m, tiles.block_n,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
