"""A step's tokens laid end to end, still on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..kv.blocks import BlockKV
from ..scheduling.base import StepPlan


@dataclass(slots=True)
class PackedStep:
    """T tokens of R requests, each with where its key and value go, and where its request's lie."""

    token_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    slot_mapping: np.ndarray  # int64 [T]: block * block_size + offset
    context_lens: np.ndarray  # int32 [R]
    block_tables: np.ndarray  # int32 [R, max_blocks], padded with 0
    query_lens: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def only_decodes(self) -> bool:
        """One token for each request."""
        return len(self.query_lens) == self.num_tokens

    @property
    def cu_seqlens_q(self) -> np.ndarray:
        """int32 [R + 1]: request r owns the tokens cu_seqlens_q[r] : cu_seqlens_q[r + 1]."""
        return np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)


def pack(plan: StepPlan, kv: BlockKV) -> PackedStep:
    """Lay the tokens of a plan's requests end to end, in the plan's order."""
    size = kv.block_size
    token_ids: list[int] = []
    positions, slots, query_lens, context_lens, tables = [], [], [], [], []
    for request, num_tokens in plan.num_tokens.items():
        start = request.num_computed_tokens
        stop = start + num_tokens
        table = np.array(kv.table(request.request_id), dtype=np.int64)[: -(-stop // size)]
        position = np.arange(start, stop)
        token_ids += request.token_slice(start, stop)
        positions.append(position)
        slots.append(table[position // size] * size + position % size)
        query_lens.append(num_tokens)
        context_lens.append(stop)
        tables.append(table)
    block_tables = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for i, table in enumerate(tables):
        block_tables[i, : len(table)] = table
    return PackedStep(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        context_lens=np.array(context_lens, dtype=np.int32),
        block_tables=block_tables,
        query_lens=query_lens,
    )
