"""Writing a step's keys and values into the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..errors import InvalidParameter
from .triton_tiles import padded


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])  # its alignment changes from step to step
def store_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_kc_block, stride_kc_slot, stride_kc_head, stride_vc_block, stride_vc_slot, stride_vc_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program copies CHUNK numbers of one token's keys and values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:  # a negative slot marks padding
        block = slot // BLOCK_SIZE
        row = slot % BLOCK_SIZE
        i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        head = i // HEAD_DIM
        d = i % HEAD_DIM
        mask = head < NUM_KV_HEADS

        k = tl.load(k_ptr + token * stride_k_token + head * stride_k_head + d, mask=mask)
        v = tl.load(v_ptr + token * stride_v_token + head * stride_v_head + d, mask=mask)
        to_k = block * stride_kc_block + row * stride_kc_slot + head * stride_kc_head + d
        to_v = block * stride_vc_block + row * stride_vc_slot + head * stride_vc_head + d
        tl.store(k_cache_ptr + to_k, k, mask=mask)
        tl.store(v_cache_ptr + to_v, v, mask=mask)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [T, num_kv_heads, head_dim] into the cache at slot_mapping, int64 [T].

    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], in the dtype of k and v; a slot is
    block * block_size + offset, none may occur twice, and a token whose slot is negative is skipped.
    Raises InvalidParameter for shapes, dtypes or strides that do not go together.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    if k.shape != v.shape or k_cache.shape != v_cache.shape or k_cache.shape[2:] != k.shape[1:]:
        raise InvalidParameter(
            f"k {list(k.shape)} and v {list(v.shape)} do not fit a cache of {list(k_cache.shape)} and "
            f"{list(v_cache.shape)}; number and size of the heads must be the same"
        )
    if not (k.dtype == v.dtype == k_cache.dtype == v_cache.dtype):
        raise InvalidParameter(f"keys and values in {k.dtype} and {v.dtype} go into a cache of the same dtype only")
    if any(x.stride(-1) != 1 for x in (k, v, k_cache, v_cache)):
        raise InvalidParameter("the last dimension of k, v and the cache must be contiguous")
    if num_tokens == 0:
        return
    chunk = min(1024, padded(num_kv_heads * head_dim))
    store_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads * head_dim, chunk))](
        k, v, k_cache, v_cache, slot_mapping,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        num_kv_heads, head_dim, k_cache.shape[1], chunk,
        num_warps=4,
    )  # fmt: skip
