"""Chunked prefill: one token budget a step; decodes take theirs first, prompts are cut to fit the rest.

Source: Agrawal et al., «Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve», OSDI 2024, section 4.
"""

from __future__ import annotations

from ..request import Request
from .base import Scheduler
from .plan import StepPlan, Wait, WaitReason


class ChunkedScheduler(Scheduler):
    """Each step lets requests' computed tokens catch up with their tokens, under a budget of `max_num_batched_tokens`.

    A decode is a request that is one token behind, a prompt one that is many behind. Decodes are served first, so no
    prompt can stall them; `prefill_first` turns that round.
    """

    name = "chunked"
    splits_prompts = True

    def schedule(self, now: float) -> StepPlan:
        plan, budget = StepPlan(), self.config.max_num_batched_tokens
        decodes, prompts = self._split_running()
        if self.config.prefill_first:
            budget = self._serve(prompts, plan, budget)
            budget = self._admit_waiting(plan, budget)
            self._serve(decodes, plan, budget)
        else:
            budget = self._serve(decodes, plan, budget)
            budget = self._serve(prompts, plan, budget)
            self._admit_waiting(plan, budget)
        return plan

    def _split_running(self) -> tuple[list[Request], list[Request]]:
        decodes, prompts = [], []
        for request in self.waiting.in_order(self.running):
            (decodes if request.is_decoding else prompts).append(request)
        return decodes, prompts

    def _serve(self, requests: list[Request], plan: StepPlan, budget: int) -> int:
        """Give running requests their pending tokens, oldest first, as far as the budget goes; returns what is left."""
        for request in requests:
            if budget == 0:
                break
            if request.slot is None:  # preempted a moment ago, for an older one
                continue
            num_tokens = request.num_tokens - request.num_computed_tokens
            if num_tokens > budget:
                num_tokens = budget
            if self._has_room(request, num_tokens) or self._grow(request, num_tokens, plan):
                plan.num_tokens[request] = num_tokens
                budget -= num_tokens
        return budget

    def _admit_waiting(self, plan: StepPlan, budget: int) -> int:
        """Let waiting requests in while budget, slots and KV last; returns what is left of the budget."""
        if plan.preempted:  # blocks have run out in this very step
            return budget
        while self.waiting:
            head = self.waiting.head
            if budget == 0:
                plan.wait = Wait(head.request_id, WaitReason.BUDGET)
                break
            # KV for the whole prompt, though only a piece is computed now: half-admitted prompts evict each other.
            if not self._admit(head, head.num_tokens, plan):
                break
            plan.num_tokens[head] = min(head.num_pending_tokens, budget)
            budget -= plan.num_tokens[head]
        return budget
