"""Attention through PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import RaggedBatch


def ragged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: RaggedBatch, scale: float) -> Tensor:
    """Each query sees its own request's tokens up to itself; shapes as in reference.ragged_attention.

    Decodes, too, are served one request at a time on a CPU: gathering them into one padded call copies more than it
    saves (measured 2 to 40 times slower where context lengths differ, faster only where all are below about 100).
    On a GPU, where each call costs a launch, all decodes of the step go together.
    """
    query_lens, context_lens = batch.query_lens, batch.context_lens_list
    decodes = [row for row, length in enumerate(query_lens) if length == 1]
    together = q.is_cuda and len(decodes) > 1
    if together and len(decodes) == len(query_lens):
        return _decode_together(q, k_cache, v_cache, batch, decodes, scale)
    out: list[Tensor] = []
    for queries, blocks, context_len in zip(q.split(query_lens), batch.used_blocks(k_cache.shape[1]), context_lens):
        if together and len(queries) == 1:
            out.append(queries)  # its place is kept; filled below
        else:
            keys = k_cache.index_select(0, blocks).flatten(0, 1)[:context_len]
            values = v_cache.index_select(0, blocks).flatten(0, 1)[:context_len]
            out.append(_attend_request(queries, keys, values, scale))
    result = torch.cat(out)
    if together:
        tokens = batch.cu_seqlens_q[torch.tensor(decodes, device=q.device)]
        result[tokens] = _decode_together(q[tokens], k_cache, v_cache, batch, decodes, scale)
    return result


def _attend_request(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The last tokens of one request, q [n, num_heads, head_dim], over its keys, values [m, num_kv_heads, head_dim]."""
    n, m, num_kv_heads = len(q), len(keys), keys.shape[1]
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    if n == 1:
        # The query heads that share a key head become rows of one query: no mask, no repeated keys.
        rows = q.view(1, num_kv_heads, -1, q.shape[-1])
        return F.scaled_dot_product_attention(rows, keys, values, scale=scale).reshape(q.shape)
    # is_causal means the upper left corner, so it serves only where nothing precedes.
    mask = None if n == m else torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    heads = q.transpose(0, 1)[None]
    gqa = q.shape[1] != num_kv_heads
    out = F.scaled_dot_product_attention(
        heads, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )
    return out[0].transpose(0, 1)


def _decode_together(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: RaggedBatch, rows: list[int], scale: float
) -> Tensor:
    """One query for each of `rows`, q [len(rows), num_heads, head_dim], over keys padded to the longest context."""
    num_kv_heads = k_cache.shape[2]
    index = torch.tensor(rows, device=q.device)
    longest = max(batch.context_lens_list[row] for row in rows)
    tables = batch.block_tables[index, : -(-longest // k_cache.shape[1])]
    keys = k_cache[tables].flatten(1, 2)
    values = v_cache[tables].flatten(1, 2)
    seen = torch.arange(keys.shape[1], device=q.device) < batch.context_lens[index, None]
    _blank(keys, values, seen)
    grouped = q.view(len(rows), num_kv_heads, -1, q.shape[-1])
    out = F.scaled_dot_product_attention(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=seen[:, None, None], scale=scale
    )
    return out.reshape(q.shape)


def padded_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, slots: list[int], positions: Tensor, max_context: int, scale: float
) -> Tensor:
    """One call over the whole rectangle, padding included; shapes as in reference.padded_attention.

    Entries that no query sees must be finite all the same (a fresh pool is zero): they are multiplied by a weight of 0.
    """
    batch, width, num_heads, head_dim = q.shape
    keys, values = _slices(k_cache, slots, max_context), _slices(v_cache, slots, max_context)
    if width == max_context:
        # All rows begin at position 0, so padding stands to the right of every token and causality hides it.
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=num_heads != keys.shape[1]
        )
        return out.transpose(1, 2)
    visible = torch.arange(max_context, device=q.device) <= positions[:, None, :, None]
    mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, -torch.inf)
    if width == 1:
        # The query heads that share a key head become rows of one query: no repeated keys.
        rows = q.view(batch, keys.shape[1], -1, head_dim)
        mask = mask.expand(-1, -1, rows.shape[2], -1)
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale).view(q.shape)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=num_heads != keys.shape[1]
    )
    return out.transpose(1, 2)


def _slices(cache: Tensor, slots: list[int], length: int) -> Tensor:
    """[B, num_kv_heads, length, head_dim]: the first `length` entries of each slot, uncopied if slots adjoin."""
    if slots == list(range(slots[0], slots[0] + len(slots))):
        chosen = cache[slots[0] : slots[0] + len(slots), :length]
    else:
        chosen = cache[:, :length].index_select(0, torch.tensor(slots, device=cache.device))
    return chosen.transpose(1, 2)


def _blank(keys: Tensor, values: Tensor, seen: Tensor) -> None:
    """Zero, in place, what no query sees: stale entries may hold NaN, and NaN times a weight of zero is still NaN."""
    unseen = ~seen[:, :, None, None]
    keys.masked_fill_(unseen, 0)
    values.masked_fill_(unseen, 0)
