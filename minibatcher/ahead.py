"""The same engine with the next step's plan made while the device works on this one: what does planning cost?

one after the other    plan 1 | device 1 | plan 2 | device 2 | plan 3 | ...
ahead                  plan 1 | device 1          | device 2          | ...
                              | plan 2            | plan 3
"""

from __future__ import annotations

from collections.abc import Sequence

from .engine import Engine
from .errors import OutOfMemory
from .request import Request
from .runners.base import LaunchingRunner
from .scheduling.plan import StepPlan
from .stepping import Done


class AheadEngine(Engine):
    """An Engine whose plans are one step older than what they plan for.

    When step n + 1 is planned, step n's tokens are on their way: that they will come is known, which they are is not.
    So a request that step n brings to its max_tokens leaves before the plan, as ever; but one that a stop token or a
    stop string ends still has a place in it, which is then left empty, and its slot and blocks are free one step later.
    Answers are the same. For strategies with paged memory, and a runner that has `launch`.
    """

    runner: LaunchingRunner

    def reset(self) -> None:
        self._next: StepPlan | None = None
        super().reset()

    def abort_all(self) -> None:
        self._next = None
        super().abort_all()

    def _forward(self) -> Done | None:
        start = self.clock.now()
        plan = self._take_plan(start)
        if not self._begin(plan, start):
            return None
        try:
            launched = self.runner.launch(plan)
        except OutOfMemory as error:
            return self._shrink(plan, error)
        except Exception as error:
            return self._abandon(plan, error)
        self._advance(plan, start)
        self._plan_next(launched.requests)
        try:
            result = launched.result()
            self.clock.advance(result.seconds)
        except OutOfMemory as error:
            return self._shrink(plan, error)
        except Exception as error:
            return self._abandon(plan, error)
        return self._complete(plan, result)

    def _leave(self, ended: list[Request]) -> None:
        for request in ended:
            self._remove(request)

    def _remove(self, request: Request) -> None:
        self._strike(request)
        super()._remove(request)  # wherever the next plan has put it

    def _restart(self, plan: StepPlan, num_blocks: int) -> None:
        following, self._next = self._next, None
        if following is not None:
            self.scheduler.abandon(following)
        super()._restart(plan, num_blocks)

    def _take_plan(self, now: float) -> StepPlan:
        plan, self._next = self._next, None
        if plan is not None and plan.num_tokens:
            return plan
        fresh = self.scheduler.schedule(now)
        if plan is not None:  # all that it planned for have ended; whom it preempted must not be forgotten
            fresh.preempted[:0], fresh.swaps[:0] = plan.preempted, plan.swaps
        return fresh

    def _plan_next(self, requests: Sequence[Request]) -> None:
        """Plan a step as if each of `requests` had its next token already."""
        last = [request for request in requests if request.num_tokens + 1 >= request.max_total_tokens]
        self.scheduler.update(last)  # the device reads their blocks before any later step can write there
        for request in requests:
            request.num_tokens += 1
        try:
            self._next = self.scheduler.schedule(self.clock.now())
        finally:
            for request in requests:
                request.num_tokens -= 1

    def _strike(self, request: Request) -> None:
        """Take a request out of the next plan."""
        if self._next is not None:
            self._next.num_tokens.pop(request, None)
            if request in self._next.admitted:
                self._next.admitted.remove(request)
