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
        self._step: StepRecord | None = None  # launched, and not stepped yet

    def begin(self, clock: str, header: dict[str, Any]) -> None:
        """Start an empty record."""
        self.timeline, self._step = Timeline(clock=clock, header=header), None

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

    def launched(self, plan: StepPlan, scheduler: Scheduler, start: float) -> None:
        """A step is about to run. It counts once `stepped` says that it has."""
        kv, steps = scheduler.kv, self.timeline.steps
        for request in plan.admitted:
            record = self._record_of(request)
            if record.first_scheduled_time is None:
                record.first_scheduled_time = start
        rows = [_row(request, plan.num_tokens.get(request)) for request in scheduler.running]
        self._step = StepRecord(
            index=len(steps),
            start=start,
            duration=0.0,
            rows=rows,
            width=plan.width,
            num_computed_tokens=plan.num_computed_tokens,
            num_waiting=len(scheduler.waiting),
            wait=asdict(plan.wait) | {"reason": plan.wait.reason.value} if plan.wait else None,
            admitted=[request.request_id for request in plan.admitted],
            finished=[],
            preempted=[request.request_id for request in plan.preempted],
            kv_used_blocks=kv.num_used_blocks,
            kv_free_blocks=kv.num_free_blocks,
            kv_tokens=sum(row.context for row in rows) - kv.num_shared_blocks * kv.block_size,
            kv_cached_blocks=kv.num_cached_blocks,
            num_swapped_blocks=sum(len(swap.device_blocks) for swap in plan.swaps),
        )

    def stepped(self, result: StepResult, ended: Sequence[Request], end: float) -> None:
        """The step launched last has run, and these requests have ended with it."""
        step, self._step = self._step, None
        if step is None:  # `launched` has failed
            return
        step.duration = end - step.start
        step.finished = [request.request_id for request in ended]
        step.num_computed_tokens = result.num_computed_tokens or step.num_computed_tokens
        self.timeline.steps.append(step)

    def closed(self, request: Request) -> None:
        """A request has ended, by itself or by an abort."""
        record = self._record_of(request)
        record.num_output_tokens = request.num_output_tokens
        record.first_scheduled_time = request.first_scheduled_time
        record.finish_time = request.finish_time
        record.finish_reason = None if request.finish_reason is None else request.finish_reason.value
        record.num_preemptions, record.output_text = request.num_preemptions, request.output_text
        record.num_cached_tokens, record.num_lost_tokens = request.num_cached_tokens, request.num_lost_tokens
        record.error = request.error

    def _record_of(self, request: Request) -> RequestRecord:
        if request.request_id not in self.timeline.requests:  # `opened` has failed
            self.opened(request)
        return self.timeline.requests[request.request_id]


def _row(request: Request, num_tokens: int | None) -> RowRecord:
    """What a request that holds a slot does in the step about to run. num_tokens: None if it is not in the plan."""
    context = request.num_computed_tokens + (num_tokens or 0)
    if num_tokens:
        # A decode computes one token, its newest generated one, and gets the next.
        decode = num_tokens == 1 and context == request.num_tokens > request.num_prompt_tokens
        state = RowState.DECODE if decode else RowState.PREFILL
    else:
        state = RowState.FINISHED if request.finished else RowState.STALLED
    assert request.slot is not None  # whoever is asked for holds one
    return RowRecord(request.slot, request.request_id, state, num_tokens or 0, context)
