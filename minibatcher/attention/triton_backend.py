"""Attention through the Triton kernels: which kernel serves which step."""

from __future__ import annotations

from torch import Tensor

from . import sdpa
from .cache import PaddedBatch, RaggedBatch
from .triton_decode import decode_attention
from .triton_ragged import ragged_attention as mixed_attention


def ragged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: RaggedBatch, scale: float) -> Tensor:
    """Each query sees its own request's tokens up to itself; shapes as in reference.ragged_attention.

    A step of decodes alone goes to the split-KV kernel, which keeps a GPU busy with few long contexts; a step with any
    chunk of a prompt in it goes, decodes included, through one launch of the mixed kernel.
    """
    if batch.only_decodes:
        return decode_attention(q, k_cache, v_cache, batch.block_tables, batch.context_lens, scale)
    return mixed_attention(q, k_cache, v_cache, batch.block_tables, batch.cu_seqlens_q, batch.context_lens, scale)


def padded_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PaddedBatch, scale: float) -> Tensor:
    """The rectangle as B requests of W queries, padding included; shapes as in reference.padded_attention."""
    return ragged_attention(q.flatten(0, 1), k_cache, v_cache, batch.as_ragged(), scale).view(q.shape)


def ragged_attention_without_tensor_cores(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: RaggedBatch, scale: float
) -> Tensor:
    """For compute capability 7.5, where Triton's matrix product does not use the tensor cores and SDPA's does."""
    attend = ragged_attention if batch.only_decodes else sdpa.ragged_attention
    return attend(q, k_cache, v_cache, batch, scale)


def padded_attention_without_tensor_cores(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PaddedBatch, scale: float
) -> Tensor:
    """The same for a rectangle."""
    attend = padded_attention if q.shape[1] == 1 else sdpa.padded_attention
    return attend(q, k_cache, v_cache, batch, scale)
