"""Ragged batching: prompts, chunks and decodes of many requests packed into one forward pass, with no padding."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from torch import Tensor

from ..attention import RaggedBatch
from ..scheduling.plan import StepPlan
from ..transfer import to_device
from .graphs import DecodeGraphs
from .model import Launched, ModelRunner
from .packed import TableArrays, pack


class RaggedRunner(ModelRunner):
    """Linear layers see one row per real token; attention finds each request's keys through its block table.

    graphs: if there are any, steps of decodes alone are replayed from them, padded to the next size.
    Source: Yu et al., Orca, OSDI 2022, section 3.2 («selective batching»); Kwon et al., SOSP 2023, section 4.
    """

    graphs: DecodeGraphs | None = None

    @cached_property
    def tables(self) -> TableArrays:
        return TableArrays(self.kv)

    def allocate(self) -> None:
        super().allocate()
        if self.graphs is not None:
            with self.on_device():
                self.graphs.capture(self.forward)

    def release(self) -> None:
        self.graphs = None  # they have the old pool's addresses, and room of their own
        super().release()

    def _launch(self, plan: StepPlan) -> Launched:
        step = pack(plan, self.tables, self.kv.block_size)
        done = [(i, r) for i, (r, n) in enumerate(plan.num_tokens.items()) if n == r.num_pending_tokens]
        last = (np.cumsum(step.query_lens) - 1)[[i for i, _ in done]]
        requests = [request for _, request in done]
        if self.graphs is not None and self.graphs.can_run(step):
            hidden = self.graphs.run(step)
            (newest,) = to_device([last], self.device)
            return self.sample(hidden[newest], requests, num_computed_tokens=len(hidden))
        arrays = [step.token_ids, step.positions, last, step.slot_mapping]
        arrays += [step.cu_seqlens_q, step.context_lens, step.block_tables]
        token_ids, positions, newest, mapping, cu_seqlens_q, context_lens, tables = to_device(arrays, self.device)
        batch = RaggedBatch(mapping, cu_seqlens_q, context_lens, tables, step.query_lens, step.context_lens.tolist())
        if self.compiled is not None:
            return self.run_compiled(token_ids, positions, batch, newest, requests)
        return self.sample(self.forward(token_ids, positions, batch)[newest], requests)

    def forward(self, token_ids: Tensor, positions: Tensor, batch: RaggedBatch) -> Tensor:
        """Hidden states [T, hidden_size] of a step's tokens; their keys and values are in the pool afterwards."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_cache, v_cache = self.store(layer, k, v, batch.slot_mapping)
            return self.attention.ragged(q, k_cache, v_cache, batch, self.scale)

        return self.model(token_ids, positions, attend)
