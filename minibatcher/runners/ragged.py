"""Ragged batching: prompts, chunks and decodes of many requests packed into one forward pass, with no padding."""

from __future__ import annotations

import numpy as np
import torch

from ..attention import RaggedBatch
from ..scheduling.base import StepPlan
from .base import StepResult
from .model import ModelRunner


class RaggedRunner(ModelRunner):
    """Linear layers see one row per real token; attention finds each request's keys through its block table.

    Source: Yu et al., Orca, OSDI 2022, section 3.2 («selective batching»); Kwon et al., SOSP 2023, section 4.
    """

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        token_ids, positions, batch = self._pack(plan)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_cache, v_cache = self.store(layer, k, v, batch.slot_mapping)
            return self.attention.ragged(q, k_cache, v_cache, batch, self.scale)

        hidden = self.model(token_ids, positions, attend)

        last = np.cumsum(batch.query_lens) - 1
        done = [(i, r) for i, (r, n) in enumerate(plan.num_tokens.items()) if n == r.num_pending_tokens]
        newest = hidden[self._tensor(last[[i for i, _ in done]])]
        return StepResult(self.sample(newest, [request for _, request in done]))

    def _pack(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor, RaggedBatch]:
        """Lay the rows' tokens end to end: token ids [T], positions [T], and where their keys and values go."""
        size = self.kv.block_size
        token_ids: list[int] = []
        positions, slots, query_lens, context_lens, tables = [], [], [], [], []
        for request, num_tokens in plan.num_tokens.items():
            start = request.num_computed_tokens
            stop = start + num_tokens
            table = np.array(self.kv.table(request.request_id), dtype=np.int64)[: -(-stop // size)]
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
        cu_seqlens_q = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        batch = RaggedBatch(
            slot_mapping=self._tensor(np.concatenate(slots)),
            cu_seqlens_q=self._tensor(cu_seqlens_q),
            context_lens=self._tensor(np.array(context_lens, dtype=np.int32)),
            block_tables=self._tensor(block_tables),
            query_lens=query_lens,
            context_lens_list=context_lens,
        )
        return self._tensor(np.array(token_ids, dtype=np.int64)), self._tensor(np.concatenate(positions)), batch

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
