"""Static batching: collect a batch, pad it to its longest prompt, decode until *every* request in it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ..request import Request
from .base import Scheduler
from .plan import StepPlan, Wait, WaitReason


class StaticScheduler(Scheduler):
    """Waits for `max_num_seqs` requests, or until the oldest has waited `batch_timeout_s`, then runs them as one block.

    Nobody enters and nobody leaves before the last one is done: a row whose request has ended is computed all the same,
    and its token is thrown away.
    """

    name = "static"
    kv_layout = "slots"

    def schedule(self, now: float) -> StepPlan:
        plan = StepPlan()
        if not self.running and not self._launch(now, plan):
            return plan
        plan.num_tokens = {r: 0 if r.finished else r.num_pending_tokens for r in self.running}
        plan.width = max(plan.num_tokens.values())
        if self.waiting:
            plan.wait = Wait(self.waiting.head.request_id, WaitReason.LAUNCHED)
        return plan

    def update(self, ended: Sequence[Request]) -> None:
        if all(r.finished for r in self.running):
            super().update(list(self.running))

    def _launch(self, now: float, plan: StepPlan) -> bool:
        """Start a batch if it is full or its time is up; else say until when it waits."""
        if not self.waiting:
            return False
        full = len(self.waiting) >= self.config.max_num_seqs
        if not full and now < (launch_at := min(r.arrival_time for r in self.waiting) + self._patience()):
            plan.wake_at = launch_at
            plan.wait = Wait(
                self.waiting.head.request_id, WaitReason.FILLING, self.config.max_num_seqs, len(self.waiting)
            )
            return False
        for request in self._choose():
            if not self._admit(request, request.max_total_tokens, plan):
                break
        return bool(self.running)

    def _patience(self) -> float:
        """Seconds that the oldest request may wait for company."""
        return self.config.batch_timeout_s

    def _choose(self) -> list[Request]:
        """Who should be in the next batch, most urgent first. Here: in order of arrival."""
        return list(islice(self.waiting, self.config.max_num_seqs))
