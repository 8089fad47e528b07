"""What all attention backends share: the step's row structure, and writing into the KV cache.

The cache of one layer is two tensors, k_cache and v_cache, each [num_blocks, block_size, num_kv_heads, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..transfer import to_device


@dataclass(slots=True)
class RaggedBatch:
    """Who owns which of a step's T packed tokens, and where their keys and values lie. R requests, in any order.

    The queries of a request are the last `query_len` tokens of its context, and each sees all tokens up to itself.
    Tensors are on the device of the cache; the lists say the same on the host, so that no path has to wait for it.
    """

    slot_mapping: Tensor  # int64 [T]: block * block_size + offset, where each token's key and value go
    cu_seqlens_q: Tensor  # int32 [R + 1]: request r owns the tokens cu_seqlens_q[r] : cu_seqlens_q[r + 1]
    context_lens: Tensor  # int32 [R]: tokens in the cache for each request, this step's included
    block_tables: Tensor  # int32 [R, max_blocks], padded with 0
    query_lens: list[int]
    context_lens_list: list[int]
    _used: list[Tensor] | None = field(default=None, repr=False)
    _decodes: Tensor | None = field(default=None, repr=False)

    @property
    def only_decodes(self) -> bool:
        """Every request has one query: its newest token."""
        return len(self.query_lens) == len(self.slot_mapping)

    def used_blocks(self, block_size: int) -> list[Tensor]:
        """Each request's blocks without the padding; made once a step, used by every layer."""
        if self._used is None:
            counts = [-(-length // block_size) for length in self.context_lens_list]
            self._used = [table[:count] for table, count in zip(self.block_tables.unbind(0), counts)]
        return self._used

    def decode_rows(self) -> Tensor:
        """int64: the requests with one query; made once a step, used by every layer."""
        if self._decodes is None:
            rows = np.flatnonzero(np.array(self.query_lens) == 1)
            (self._decodes,) = to_device([rows], self.slot_mapping.device)
        return self._decodes


@dataclass(slots=True)
class PaddedBatch:
    """A step's rectangle: B rows of W tokens, and the cache of a row is one block of the pool, its slot.

    Padding stands to the right: a row's last real token may be followed by tokens that nobody will ask for.
    """

    slots: Tensor  # int64 [B]
    positions: Tensor  # int64 [B, W]: a query at position p sees the keys 0..p of its slot
    slot_mapping: Tensor  # int64 [B * W]: where each token's key and value go
    slots_list: list[int]
    max_context: int  # above every position
    _ragged: RaggedBatch | None = field(default=None, repr=False)

    def as_ragged(self) -> RaggedBatch:
        """The same step as B requests of W queries each; made once a step, used by every layer."""
        if self._ragged is None:
            num_rows, width = self.positions.shape
            starts = torch.arange(num_rows + 1, dtype=torch.int32, device=self.positions.device) * width
            self._ragged = RaggedBatch(
                slot_mapping=self.slot_mapping,
                cu_seqlens_q=starts,
                context_lens=(self.positions[:, -1] + 1).int(),
                block_tables=self.slots[:, None].int(),
                query_lens=[width] * num_rows,
                context_lens_list=[self.max_context] * num_rows,
            )
        return self._ragged


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [T, num_kv_heads, head_dim] into the cache at slot_mapping, int64 [T] with no slot twice."""
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)
