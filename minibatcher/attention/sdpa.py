"""Attention through PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import PaddedBatch, RaggedBatch


def ragged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: RaggedBatch, scale: float) -> Tensor:
    """Each query sees its own request's tokens up to itself; shapes as in reference.ragged_attention.

    Decodes, too, are served one request at a time on a CPU: gathering them into one padded call copies more than it
    saves (measured 2 to 40 times slower where context lengths differ, faster only where all are below about 100).
    On a GPU, where each call costs a launch, all decodes of the step go together.
    """
    block_size = k_cache.shape[1]
    together = q.is_cuda and batch.query_lens.count(1) > 1
    if together and batch.only_decodes:
        return _decode_together(q, k_cache, v_cache, batch.context_lens, batch.block_tables, scale)
    out: list[Tensor] = []
    rows = zip(q.split(batch.query_lens), batch.used_blocks(block_size), batch.context_lens_list)
    for queries, blocks, context_len in rows:
        if together and len(queries) == 1:
            out.append(queries)  # its place is kept; filled below
        else:
            keys = k_cache.index_select(0, blocks).flatten(0, 1)[:context_len]
            values = v_cache.index_select(0, blocks).flatten(0, 1)[:context_len]
            out.append(_attend_request(queries, keys, values, scale))
    result = torch.cat(out)
    if together:
        decodes = batch.decode_rows()
        tokens = batch.cu_seqlens_q[decodes]
        longest = max(n for n, num_queries in zip(batch.context_lens_list, batch.query_lens) if num_queries == 1)
        tables = batch.block_tables[decodes, : -(-longest // block_size)]
        result[tokens] = _decode_together(q[tokens], k_cache, v_cache, batch.context_lens[decodes], tables, scale)
    return result


def _attend_request(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The last tokens of one request, q [n, num_heads, head_dim], over its keys, values [m, num_kv_heads, head_dim]."""
    n, m, num_kv_heads = len(q), len(keys), keys.shape[1]
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    if n == 1:
        # The query heads that share a key head become rows of one query: no mask, no repeated keys.
        rows = q.view(1, num_kv_heads, -1, q.shape[-1])
        if q.shape[1] == num_kv_heads and q.dtype != torch.float32 and not q.is_cuda:
            # For a single row the CPU's kernel takes half precision a way that is about twice as slow as for two.
            rows = rows.expand(-1, -1, 2, -1)
            return F.scaled_dot_product_attention(rows, keys, values, scale=scale)[:, :, 0]
        return F.scaled_dot_product_attention(rows, keys, values, scale=scale).reshape(q.shape)
    # is_causal means the upper left corner, so it serves only where nothing precedes.
    mask = None if n == m else torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    heads = q.transpose(0, 1)[None]
    keys, values, gqa = share_heads(heads, keys, values, mask)
    out = F.scaled_dot_product_attention(
        heads, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )
    return out[0].transpose(0, 1)


def _decode_together(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, context_lens: Tensor, tables: Tensor, scale: float
) -> Tensor:
    """One query for each of R requests, q [R, num_heads, head_dim], over keys padded to the width of `tables`."""
    num_kv_heads = k_cache.shape[2]
    keys = k_cache[tables].flatten(1, 2)
    values = v_cache[tables].flatten(1, 2)
    seen = torch.arange(keys.shape[1], device=q.device) < context_lens[:, None]
    _blank(keys, values, seen)
    grouped = q.view(len(q), num_kv_heads, -1, q.shape[-1])
    out = F.scaled_dot_product_attention(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=seen[:, None, None], scale=scale
    )
    return out.reshape(q.shape)


def padded_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PaddedBatch, scale: float) -> Tensor:
    """One call over the whole rectangle, padding included; shapes as in reference.padded_attention.

    Entries that no query sees must be finite all the same (a fresh pool is zero): they are multiplied by a weight of 0.
    """
    num_rows, width, _, head_dim = q.shape
    max_context, positions = batch.max_context, batch.positions
    keys, values = _slices(k_cache, batch), _slices(v_cache, batch)
    if width == max_context:
        # All rows begin at position 0, so padding stands to the right of every token and causality hides it.
        heads = q.transpose(1, 2)
        keys, values, gqa = share_heads(heads, keys, values)
        out = F.scaled_dot_product_attention(heads, keys, values, is_causal=True, scale=scale, enable_gqa=gqa)
        return out.transpose(1, 2)
    visible = torch.arange(max_context, device=q.device) <= positions[:, None, :, None]
    mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, -torch.inf)
    if width == 1:
        # The query heads that share a key head become rows of one query: no repeated keys.
        rows = q.view(num_rows, keys.shape[1], -1, head_dim)
        mask = mask.expand(-1, -1, rows.shape[2], -1)
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale).view(q.shape)
    heads = q.transpose(1, 2)
    keys, values, gqa = share_heads(heads, keys, values, mask)
    out = F.scaled_dot_product_attention(heads, keys, values, attn_mask=mask, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2)


def share_heads(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, bool]:
    """keys, values [B, num_kv_heads, m, head_dim] as q [B, num_heads, n, head_dim] needs them, and SDPA's enable_gqa.

    On a GPU only flash attention is sure to share key heads, and it takes no mask, no float32 and nothing before 8.0.
    Where it can't run, the keys are repeated: the next best kernel then serves, instead of the plain formula, which
    holds all scores in memory, in float32, and multiplies without tensor cores.
    """
    group = q.shape[1] // keys.shape[1]
    if group == 1 or not q.is_cuda:
        return keys, values, group > 1
    if mask is None and q.dtype != torch.float32 and torch.cuda.get_device_capability(q.device) >= (8, 0):
        return keys, values, True
    return keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1), False


def _slices(cache: Tensor, batch: PaddedBatch) -> Tensor:
    """[B, num_kv_heads, max_context, head_dim]: the first entries of each slot, uncopied if slots adjoin."""
    slots, length = batch.slots_list, batch.max_context
    if slots == list(range(slots[0], slots[0] + len(slots))):
        chosen = cache[slots[0] : slots[0] + len(slots), :length]
    else:
        chosen = cache[:, :length].index_select(0, batch.slots)
    return chosen.transpose(1, 2)


def _blank(keys: Tensor, values: Tensor, seen: Tensor) -> None:
    """Zero, in place, what no query sees: stale entries may hold NaN, and NaN times a weight of zero is still NaN."""
    unseen = ~seen[:, :, None, None]
    keys.masked_fill_(unseen, 0)
    values.masked_fill_(unseen, 0)
