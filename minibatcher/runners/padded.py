"""Padded batching: rectangles of [batch, longest] tokens, with all the work that the padding costs."""

from __future__ import annotations

import torch

from ..scheduling.base import StepPlan
from .base import StepResult
from .model import ModelRunner


class PaddedRunner(ModelRunner):
    """Every row is as wide as the widest and looks at as many keys as the longest; padding stands on the right.

    A row whose request has ended computes its last token again: the batch is fixed, so the device works for it all the
    same. Each request's keys and values lie in one slot, which is one block of the pool.
    """

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        width, pad = plan.width, self.config.pad_token_id or 0
        token_rows, starts, slots, last = [], [], [], []
        for request, num_tokens in plan.num_tokens.items():
            start = request.num_computed_tokens
            if num_tokens == 0:
                start -= 1
            real = request.token_slice(start, start + max(num_tokens, 1))
            token_rows.append(real + [pad] * (width - len(real)))
            starts.append(start)
            slots.append(self.kv.table(request.request_id)[0])
            last.append(len(real) - 1)
        self._clear([slot for slot, start in zip(slots, starts) if start == 0])
        token_ids = torch.tensor(token_rows, device=self.device)  # [B, width]
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        slot_starts = torch.tensor(slots, device=self.device)[:, None] * self.kv.block_size
        slot_mapping = (slot_starts + positions).flatten()
        batch, max_context = len(plan.num_tokens), max(starts) + width

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_cache, v_cache = self.store(layer, k, v, slot_mapping)
            q = q.view(batch, width, *q.shape[1:])
            return self.attention.padded(q, k_cache, v_cache, slots, positions, max_context, self.scale).flatten(0, 1)

        hidden = self.model(token_ids.flatten(), positions.flatten(), attend).view(batch, width, -1)
        newest = hidden[torch.arange(batch, device=self.device), torch.tensor(last, device=self.device)]
        sampled = self.sample(newest, list(plan.num_tokens))
        return StepResult({request: token_id for request, token_id in sampled.items() if plan.num_tokens[request]})

    def _clear(self, slots: list[int]) -> None:
        """Blank slots that change hands: masked attention needs finite numbers there, and an overflow leaves none."""
        for cache in (cache for layer in self.pool for cache in layer if slots):
            cache[slots] = 0
