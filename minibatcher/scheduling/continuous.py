"""Continuous (iteration-level) batching: after every step the finished leave and the waiting enter.

Source: Yu et al., «Orca: A Distributed Serving System for Transformer-Based Generative Models», OSDI 2022, section 3.
Prompts go first and whole, as in early vLLM; a step carries either prompts or decodes.
"""

from __future__ import annotations

from .base import Scheduler
from .plan import StepPlan, Wait, WaitReason


class ContinuousScheduler(Scheduler):
    """If anybody can enter, the step computes their whole prompts while all running requests wait; else all decode.

    `max_num_batched_tokens` bounds how many prompts share a step. A single longer prompt runs alone: it can't be cut.
    """

    name = "continuous"

    def schedule(self, now: float) -> StepPlan:
        plan = StepPlan()
        budget = self.config.max_num_batched_tokens
        while self.waiting:
            head = self.waiting.head
            if plan.num_tokens and head.num_pending_tokens > budget:
                plan.wait = Wait(head.request_id, WaitReason.BUDGET, head.num_pending_tokens, budget)
                break
            if not self._admit(head, head.num_tokens, plan):
                break
            plan.num_tokens[head] = head.num_pending_tokens
            budget -= head.num_pending_tokens
        if plan.num_tokens:
            return plan
        for request in list(self.waiting.in_order(self.running)):
            if request.slot is None:  # preempted a moment ago, for an older one
                continue
            if self._has_room(request, 1) or self._grow(request, 1, plan):
                plan.num_tokens[request] = 1
        return plan
