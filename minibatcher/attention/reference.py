"""Attention as the formula says: one request and one query at a time, softmax in float32. Slow, and easy to believe."""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import PaddedBatch, RaggedBatch


def ragged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: RaggedBatch, scale: float) -> Tensor:
    """Each query sees its own request's tokens up to itself.

    q: [T, num_heads, head_dim], packed as `batch` says; k_cache, v_cache: [num_blocks, block_size, num_kv_heads,
    head_dim], this step's keys and values already stored. Returns [T, num_heads, head_dim] in q's dtype.
    """
    block_size = k_cache.shape[1]
    out = torch.empty_like(q)
    start = 0
    for row, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens_list)):
        blocks = batch.block_tables[row, : -(-context_len // block_size)].long()
        keys = k_cache[blocks].flatten(0, 1)
        values = v_cache[blocks].flatten(0, 1)
        for i in range(query_len):
            visible = context_len - query_len + i + 1
            out[start + i] = _attend_one(q[start + i], keys[:visible], values[:visible], scale)
        start += query_len
    return out


def padded_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PaddedBatch, scale: float) -> Tensor:
    """The same on a rectangle: q [B, W, num_heads, head_dim]. Returns [B, W, num_heads, head_dim]."""
    out = torch.empty_like(q)
    for b, slot in enumerate(batch.slots_list):
        for w, position in enumerate(batch.positions[b].tolist()):
            visible = position + 1
            out[b, w] = _attend_one(q[b, w], k_cache[slot, :visible], v_cache[slot, :visible], scale)
    return out


def _attend_one(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """q [num_heads, head_dim] over keys, values [n, num_kv_heads, head_dim]."""
    group = q.shape[0] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, dim=1)
    values = values.float().repeat_interleave(group, dim=1)
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q.float(), keys) * scale, dim=-1)
    return torch.einsum("hn,nhd->hd", weights, values).to(q.dtype)
