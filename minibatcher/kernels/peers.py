"""The same attention by others: PyTorch's SDPA, and flash-attn and flashinfer where they are installed.

Each peer prepares its own layout outside the time that is measured, and returns a function that launches it. The last
two are no dependencies of ours: they are imported by name where they happen to be.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from ..attention.sdpa import share_heads
from .cases import Case

Launch = Callable[[], object]


def peers(case: Case) -> dict[str, Callable[[], Launch]]:
    """Name → a function that prepares a launch of the case; it may raise where the peer can't do this case."""
    found = {"sdpa": lambda: sdpa(case)}
    if find_spec("flash_attn"):
        found["flash-attn"] = lambda: flash_attn(case)
    if find_spec("flashinfer"):
        found["flashinfer"] = lambda: flashinfer(case)
    return found


def contiguous(cache: torch.Tensor, case: Case) -> torch.Tensor:
    """Each request's keys or values without a block table, [R, context, num_kv_heads, head_dim]; equal contexts."""
    length = case.shape.context_lens[0]
    if set(case.shape.context_lens) != {length}:
        raise ValueError("contexts of different lengths do not fit one rectangle")
    blocks = -(-length // case.shape.block_size)
    return torch.stack([cache[table[:blocks]].flatten(0, 1)[:length] for table in case.block_tables.long()])


def sdpa(case: Case) -> Launch:
    """Equal requests as one rectangle, from contiguous keys: SDPA knows neither block tables nor packed rows."""
    shape = case.shape
    query_len = shape.query_lens[0]
    if set(shape.query_lens) != {query_len}:
        raise ValueError("SDPA needs requests of equal length in one call")
    k, v = (contiguous(cache, case).transpose(1, 2) for cache in (case.k_cache, case.v_cache))
    scale = case.scale
    if query_len == 1:
        # Query heads that share a key head become rows of one query, which reads each key once.
        rows = case.q.reshape(len(shape.query_lens), shape.num_kv_heads, -1, shape.head_dim)
        return lambda: F.scaled_dot_product_attention(rows, k, v, scale=scale)
    if query_len != shape.context_lens[0]:
        raise ValueError("SDPA's causal mask is for whole prompts")
    q = case.q.reshape(-1, query_len, shape.num_heads, shape.head_dim).transpose(1, 2).contiguous()
    k, v, gqa = share_heads(q, k, v)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)


def flash_attn(case: Case) -> Launch:
    """flash-attn 2: a contiguous cache for decodes, packed rows for whole prompts."""
    library = import_module("flash_attn")
    shape, scale = case.shape, case.scale
    if set(shape.query_lens) == {1}:
        k, v = contiguous(case.k_cache, case), contiguous(case.v_cache, case)
        q, lens = case.q[:, None].contiguous(), case.context_lens
        return lambda: library.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, softmax_scale=scale, causal=True)
    if shape.query_lens != shape.context_lens:
        raise ValueError("flash-attn's paged cache wants blocks of 256 tokens")
    q, k, v = (x.contiguous() for x in (case.q, case.k, case.v))
    cu, longest = case.cu_seqlens_q, max(shape.query_lens)
    lengths = (cu, cu, longest, longest)
    return lambda: library.flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=scale, causal=True)


def flashinfer(case: Case) -> Launch:
    """flashinfer's paged wrappers, which read the very same cache."""
    library = import_module("flashinfer")
    shape = case.shape
    counts = [-(-length // shape.block_size) for length in shape.context_lens]
    indptr = torch.tensor([0, *counts], dtype=torch.int32, device=case.q.device).cumsum(0, dtype=torch.int32)
    indices = torch.cat([table[:count] for table, count in zip(case.block_tables, counts)])
    last = case.context_lens - (indptr.diff() - 1) * shape.block_size
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=case.q.device)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size)
    options = {"q_data_type": case.q.dtype, "sm_scale": case.scale}
    if set(shape.query_lens) == {1}:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *heads, **options)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(case.cu_seqlens_q, indptr, indices, last, *heads, causal=True, **options)
    q, caches = case.q.contiguous(), (case.k_cache, case.v_cache)
    return lambda: wrapper.run(q, caches)
