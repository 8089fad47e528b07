"""How the engine's steps get into a record: every row of every step, or running sums for a day of traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .request import Request
from .runners.base import StepResult
from .scheduling.base import Scheduler, StepPlan
from .timeline import RequestRecord, RowRecord, RowState, StepRecord, Timeline


class TimelineRecorder:
    """Writes a Timeline: one StepRecord a step, one RequestRecord a request."""

    def __init__(self) -> None:
        self.timeline = Timeline()

    def begin(self, clock: str, header: dict[str, Any]) -> None:
        """Start an empty record."""
        self.timeline = Timeline(clock=clock, header=header)

    def knows(self, request_id: str) -> bool:
        return request_id in self.timeline.requests

    def opened(self, request: Request) -> None:
        """A request has been submitted. Its record shares the request's lists, so that it is live."""
        self.timeline.requests[request.request_id] = RequestRecord(
            request.request_id,
            request.arrival_time,
            request.num_prompt_tokens,
            priority=request.priority,
            tenant=request.tenant,
            token_times=request.token_times,
            output_token_ids=request.output_token_ids,
        )

    def stepped(
        self,
        plan: StepPlan,
        result: StepResult,
        ended: Sequence[Request],
        scheduler: Scheduler,
        start: float,
        end: float,
    ) -> None:
        """A step has run, and the requests have moved on; those that ended still hold their slots."""
        kv, steps = scheduler.kv, self.timeline.steps
        rows = [
            _row(request, plan.num_tokens.get(request), request in result.token_ids) for request in scheduler.running
        ]
        steps.append(
            StepRecord(
                index=len(steps),
                start=start,
                duration=end - start,
                rows=rows,
                width=plan.width,
                num_computed_tokens=result.num_computed_tokens or plan.num_computed_tokens,
                num_waiting=len(scheduler.waiting),
                wait=asdict(plan.wait) | {"reason": plan.wait.reason.value} if plan.wait else None,
                admitted=[request.request_id for request in plan.admitted],
                finished=[request.request_id for request in ended],
                preempted=[request.request_id for request in plan.preempted],
                kv_used_blocks=kv.num_used_blocks,
                kv_free_blocks=kv.num_free_blocks,
                kv_tokens=sum(row.context for row in rows),
            )
        )

    def closed(self, request: Request) -> None:
        """A request has ended, by itself or by an abort."""
        record = self.timeline.requests[request.request_id]
        record.num_output_tokens = request.num_output_tokens
        record.first_scheduled_time = request.first_scheduled_time
        record.finish_time, record.finish_reason = request.finish_time, request.finish_reason.value
        record.num_preemptions, record.output_text = request.num_preemptions, request.output_text


def _row(request: Request, num_tokens: int | None, sampled: bool) -> RowRecord:
    """What a request that holds a slot did in the step. num_tokens: None if it was not in the plan."""
    if num_tokens:
        # A decode computes one token, its newest generated one, and gets the next.
        decode = sampled and num_tokens == 1 and request.num_computed_tokens > request.num_prompt_tokens
        state = RowState.DECODE if decode else RowState.PREFILL
    else:
        state = RowState.FINISHED if request.finished else RowState.STALLED
    return RowRecord(request.slot, request.request_id, state, num_tokens or 0, request.num_computed_tokens)
