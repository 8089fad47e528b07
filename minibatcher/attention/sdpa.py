"""Attention through PyTorch's scaled_dot_product_attention, one call a request (ragged) or one in all (padded)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import RaggedBatch


def ragged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: RaggedBatch, scale: float) -> Tensor:
    """Each query sees its own request's tokens up to itself; shapes as in reference.ragged_attention."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    start = 0
    for row, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens_list)):
        blocks = batch.block_tables[row, : -(-context_len // block_size)]
        keys = k_cache.index_select(0, blocks).view(-1, num_kv_heads, head_dim)[:context_len].transpose(0, 1)
        values = v_cache.index_select(0, blocks).view(-1, num_kv_heads, head_dim)[:context_len].transpose(0, 1)
        stop = start + query_len
        if query_len == 1:
            # The query heads that share a key head become rows of one query: no mask, no repeated keys.
            rows = q[start].view(num_kv_heads, group, head_dim)
            result = F.scaled_dot_product_attention(rows[None], keys[None], values[None], scale=scale)
            out[start] = result.view(-1, head_dim)
        else:
            first = query_len == context_len
            mask = None if first else _lower_right(query_len, context_len, q.device)
            result = F.scaled_dot_product_attention(
                q[start:stop].transpose(0, 1)[None], keys[None], values[None],
                attn_mask=mask, is_causal=first, scale=scale, enable_gqa=group > 1,
            )  # fmt: skip
            out[start:stop] = result[0].transpose(0, 1)
        start = stop
    return out


def padded_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, slots: list[int], positions: Tensor, max_context: int, scale: float
) -> Tensor:
    """One masked call over the whole rectangle, padding included; shapes as in reference.padded_attention."""
    index = torch.tensor(slots, device=q.device)
    keys = k_cache[:, :max_context].index_select(0, index)
    values = v_cache[:, :max_context].index_select(0, index)
    places = torch.arange(max_context, device=q.device)
    # Never-written or stale entries may hold NaN, and NaN times a weight of zero is NaN: blank what no query sees.
    unseen = places > positions.amax(dim=1, keepdim=True)
    keys.masked_fill_(unseen[:, :, None, None], 0)
    values.masked_fill_(unseen[:, :, None, None], 0)
    mask = places <= positions[:, None, :, None]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2),
        attn_mask=mask, scale=scale, enable_gqa=q.shape[2] != keys.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)


def _lower_right(query_len: int, context_len: int, device: torch.device) -> Tensor:
    """bool [query_len, context_len]: the last query sees all, the one before it all but the last key, and so on."""
    return torch.ones(query_len, context_len, dtype=torch.bool, device=device).tril(context_len - query_len)
