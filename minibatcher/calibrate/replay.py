"""A measured run again, in virtual time: the same requests through the same kind of scheduler on a cost model."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..kv import BlockKV, PrefixKV, SlotKV
from ..request import Request, SamplingParams
from ..runners.roofline import CostModel, RooflineRunner
from ..scheduling import ChunkedScheduler, Scheduler, SchedulerConfig, StepPlan, make_scheduler, strategy
from ..workload import HashedPrompt
from .runs import MeasuredRun


class VllmScheduler(ChunkedScheduler):
    """Chunked prefill with three habits of vLLM's V1 scheduler (vllm/v1/core/sched/scheduler.py, version 0.19).

    whole_prompt_must_fit (`scheduler_reserve_full_isl`): a request is let in only if all its tokens would fit, though
    it gets blocks for its first chunk only. async_scheduling: a step is planned while the one before it runs, so it
    knows nothing of what arrived or ended since that one began. reuses_blocks (`enable_prefix_caching`): a request that
    was preempted computes only what is no longer in the pool. Prefixes shared between requests are not known here.
    """

    def __init__(self, kv: BlockKV, config: SchedulerConfig, run: MeasuredRun) -> None:
        super().__init__(kv, config)
        self._must_fit, self._ahead = run.whole_prompt_must_fit, run.async_scheduling
        self._arrived: deque[Request] = deque()
        self._ended: list[Request] = []
        self._previous_start = 0.0

    def add(self, request: Request) -> None:
        if self._ahead:
            self._arrived.append(request)
        else:
            super().add(request)

    def has_work(self) -> bool:
        return bool(self._arrived) or super().has_work()

    def schedule(self, now: float) -> StepPlan:
        idle = not self.running
        if idle:
            self._release()
        while self._arrived and (idle or self._arrived[0].arrival_time <= self._previous_start):
            super().add(self._arrived.popleft())
        self._previous_start = now
        return super().schedule(now)

    def update(self, ended: Sequence[Request]) -> None:
        if not self._ahead:
            super().update(ended)
            return
        self._release()
        self._ended = list(ended)
        for request in ended:
            self.running.remove(request)

    def _release(self) -> None:
        for request in self._ended:
            self.kv.free(request.request_id)
            assert request.slot is not None  # whoever runs has one
            heapq.heappush(self._free_slots, request.slot)
            request.slot = None
        self._ended = []

    def _admit_waiting(self, plan: StepPlan, budget: int) -> int:
        kv = self.kv
        while self.waiting and budget and self._free_slots and not plan.preempted:
            head = self.waiting.head
            if self._must_fit and kv.blocks_for(head.num_tokens) > kv.num_available_blocks:
                break
            found = len(kv.lookup(head.token_slice, head.num_tokens)) * kv.block_size if kv.shares_prefixes else 0
            num_tokens = min(head.num_tokens - found, budget)
            if not self._admit(head, found + num_tokens, plan):
                break
            plan.num_tokens[head] = num_tokens
            budget -= num_tokens
        return budget


@dataclass(frozen=True)
class Outcome:
    """What a replay predicts for one request, in seconds from the first arrival; None for what lies beyond its end."""

    first_token_time: float | None
    last_token_time: float | None


def scheduler_of(run: MeasuredRun) -> Scheduler:
    """The scheduler that the run had, on a pool of the run's size."""
    if run.engine == "vllm":
        pool = (PrefixKV if run.reuses_blocks else BlockKV)(run.num_blocks, run.block_size)
        return VllmScheduler(pool, run.config, run)
    pool = (SlotKV if strategy(run.strategy).kv_layout == "slots" else BlockKV)(run.num_blocks, run.block_size)
    return make_scheduler(run.strategy, pool, run.config)


def replay(
    run: MeasuredRun,
    cost: CostModel,
    until: float = math.inf,
    watch: Callable[[float, float, StepPlan, Scheduler], None] | None = None,
) -> dict[str, Outcome]:
    """Serve the run's requests in virtual time, up to the moment `until` (seconds from the first arrival).

    watch: called after each step with its start, its end, its plan and the scheduler.
    """
    scheduler, runner = scheduler_of(run), RooflineRunner(cost)
    requests = [
        Request(
            r.request_id,
            HashedPrompt(r.request_id, r.prompt_tokens, (), 1),  # shared with nobody
            _exactly(r.output_tokens),
            arrival_time=r.arrival_time,
        )
        for r in run.requests
    ]
    pending, now = deque(requests), 0.0
    while now < until and (pending or scheduler.has_work()):
        while pending and pending[0].arrival_time <= now:
            scheduler.add(pending.popleft())
        plan = scheduler.schedule(now)
        if not plan.num_tokens:
            moments = [t for t in (plan.wake_at, pending[0].arrival_time if pending else None) if t is not None]
            if not moments:
                break  # a request that this pool can never hold
            now = max(now, min(moments))
            continue
        result = runner.run(plan)
        assert result.seconds is not None  # of virtual time
        now += result.seconds
        for request, num_tokens in plan.num_tokens.items():
            request.num_computed_tokens += num_tokens
        for request, token_id in result.token_ids.items():
            request.append(token_id, now)
        scheduler.computed(plan, result.token_ids)
        if watch:
            watch(now - result.seconds, now, plan, scheduler)
        scheduler.update([request for request in result.token_ids if request.finished])
    return {
        r.request_id: Outcome(r.token_times[0] if r.token_times else None, r.token_times[-1] if r.finished else None)
        for r in requests
    }


def _exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)
