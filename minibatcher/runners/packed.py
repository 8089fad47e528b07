"""A step's tokens laid end to end, still on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..kv.blocks import BlockKV
from ..request import Request
from ..scheduling.plan import StepPlan


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


class TableArrays:
    """Block tables as int32 arrays, brought up to date by what was added.

    A long context has hundreds of blocks, and turning their lists into arrays at every step would take longer than all
    the rest of packing.
    """

    def __init__(self, kv: BlockKV) -> None:
        self._kv = kv
        self._known: dict[str, tuple[list[int], np.ndarray]] = {}

    def of(self, requests: Iterable[Request]) -> list[np.ndarray]:
        """The whole table of each request, int32. Those of requests that are not asked for are forgotten."""
        known: dict[str, tuple[list[int], np.ndarray]] = {}
        for request in requests:
            table = self._kv.table(request.request_id)
            before = self._known.get(request.request_id)
            if before is None or before[0] is not table:  # the request is new, or came back from a preemption
                array = np.array(table, dtype=np.int32)
            elif len(array := before[1]) < len(table):
                array = np.concatenate([array, np.array(table[len(array) :], dtype=np.int32)])
            known[request.request_id] = table, array
        self._known = known
        return [array for _, array in known.values()]


def pack(plan: StepPlan, tables: TableArrays, block_size: int) -> PackedStep:
    """Lay the tokens of a plan's requests end to end, in the plan's order."""
    token_ids: list[int] = []
    positions: list[Sequence[int] | np.ndarray] = []
    slots: list[Sequence[int] | np.ndarray] = []
    query_lens, context_lens, used = [], [], []
    for (request, num_tokens), table in zip(plan.num_tokens.items(), tables.of(plan.num_tokens)):
        start = request.num_computed_tokens
        stop = start + num_tokens
        if num_tokens == 1:  # most rows are decodes, and plain numbers are faster than arrays of one
            positions.append([start])
            slots.append([int(table[start // block_size]) * block_size + start % block_size])
        else:
            position = np.arange(start, stop)
            positions.append(position)
            slots.append(table[position // block_size].astype(np.int64) * block_size + position % block_size)
        token_ids += request.token_slice(start, stop)
        query_lens.append(num_tokens)
        context_lens.append(stop)
        used.append(table[: -(-stop // block_size)])
    block_tables = np.zeros((len(used), max(map(len, used))), dtype=np.int32)
    for row, table in zip(block_tables, used):
        row[: len(table)] = table
    return PackedStep(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        context_lens=np.array(context_lens, dtype=np.int32),
        block_tables=block_tables,
        query_lens=query_lens,
    )
