"""Padded batching: rectangles of [batch, longest] tokens, with all the work that the padding costs."""

from __future__ import annotations

import numpy as np
import torch

from ..attention import PaddedBatch
from ..scheduling.plan import StepPlan
from ..transfer import to_device
from .model import Launched, ModelRunner


class PaddedRunner(ModelRunner):
    """Every row is as wide as the widest and looks at as many keys as the longest; padding stands on the right.

    A row whose request has ended computes its last token again: the batch is fixed, so the device works for it all the
    same. Each request's keys and values lie in one slot, which is one block of the pool.
    """

    def _launch(self, plan: StepPlan) -> Launched:
        assert plan.width is not None, "a padded step has a width"
        width, num_rows = plan.width, len(plan.num_tokens)
        padded = np.full((num_rows, width), self.config.pad_token_id or 0, dtype=np.int64)
        starts, slots, ends, sampled = [], [], [], []
        for row, (request, num_tokens) in enumerate(plan.num_tokens.items()):
            start = request.num_computed_tokens
            if num_tokens == 0:
                start -= 1
            real = request.token_slice(start, start + max(num_tokens, 1))
            padded[row, : len(real)] = real
            starts.append(start)
            slots.append(self.kv.table(request.request_id)[0])
            if num_tokens:
                ends.append(row * width + len(real) - 1)
                sampled.append(request)
        places = np.array(starts)[:, None] + np.arange(width)
        mapping = (np.array(slots)[:, None] * self.kv.block_size + places).ravel()
        blank = np.array([slot for slot, start in zip(slots, starts) if start == 0], dtype=np.int64)
        arrays = [padded.ravel(), places, mapping, np.array(slots), np.array(ends, dtype=np.int64), blank]
        token_ids, positions, slot_mapping, rows, newest, fresh = to_device(arrays, self.device)
        batch = PaddedBatch(rows, positions, slot_mapping, slots, max(starts) + width)
        self._clear(fresh)
        if self.compiled is not None:
            return self.run_compiled(token_ids, positions.flatten(), batch.as_ragged(), newest, sampled)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_cache, v_cache = self.store(layer, k, v, batch.slot_mapping)
            q = q.view(num_rows, width, *q.shape[1:])
            return self.attention.padded(q, k_cache, v_cache, batch, self.scale).flatten(0, 1)

        hidden = self.model(token_ids, positions.flatten(), attend)
        return self.sample(hidden[newest], sampled)

    def _clear(self, slots: torch.Tensor) -> None:
        """Blank slots that change hands: masked attention needs finite numbers there, and an overflow leaves none."""
        if len(slots):
            for cache in (cache for layer in self.pool for cache in layer):
                cache.index_fill_(0, slots, 0)
