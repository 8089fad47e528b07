"""How a server's steps get into its metrics: added up and forgotten, so that memory does not grow with the traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..metrics import COMPLETED
from ..recorder import TimelineRecorder
from ..request import FinishReason, Request
from ..runners.base import StepResult
from ..scheduling.base import Scheduler, StepPlan
from ..timeline import Timeline
from .metrics import ServerMetrics, Sums


class ServeRecorder:
    """Takes TimelineRecorder's place in an engine that serves for days. Written in the engine's thread.

    scheduler: the engine's; asked for its queue, its slots and its blocks as they are when somebody looks. inner: is
    told everything as well, to keep it. Counters go on when the engine is reset.
    """

    def __init__(
        self, metrics: ServerMetrics, model_name: str, scheduler: Scheduler, inner: TimelineRecorder | None = None
    ) -> None:
        self.model_name, self.scheduler, self.inner = model_name, scheduler, inner
        self.sums = Sums(metrics.longest)
        for reason in ("stop", "length", "abort", "error"):  # a rate needs the zero before the first
            self.sums.add("vllm:request_success", 0, reason)
        self._timeline = Timeline()
        self._plan: tuple[StepPlan, list[Request], float] | None = None  # launched, not stepped: whom it lets in, start
        metrics.watch(self)

    @property
    def timeline(self) -> Timeline:
        """What is kept: the inner recorder's, else a header alone."""
        return self.inner.timeline if self.inner else self._timeline

    def begin(self, clock: str, header: dict[str, Any]) -> None:
        self._timeline, self._plan = Timeline(clock=clock, header=header), None
        if self.inner:
            self.inner.begin(clock, header)

    def knows(self, request_id: str) -> bool:
        return self.inner is not None and self.inner.knows(request_id)

    def opened(self, request: Request) -> None:
        if self.inner:
            self.inner.opened(request)

    def launched(self, plan: StepPlan, scheduler: Scheduler, start: float) -> None:
        if self.inner:
            self.inner.launched(plan, scheduler, start)
        self._plan = plan, [request for request in plan.admitted if request.first_scheduled_time is None], start

    def stepped(self, result: StepResult, ended: Sequence[Request], end: float) -> None:
        if self.inner:
            self.inner.stepped(result, ended, end)
        launched, self._plan = self._plan, None
        if launched is None:  # `launched` has failed
            return
        plan, new, start = launched
        add, observe = self.sums.add, self.sums.observe
        computed, useful = result.num_computed_tokens or plan.num_computed_tokens, plan.num_useful_tokens
        add("minibatcher:steps")
        add("minibatcher:step_seconds", end - start)
        add("minibatcher:computed_tokens", computed)
        add("minibatcher:padding_tokens", computed - useful)
        add("vllm:num_preemptions", len(plan.preempted))
        observe("vllm:iteration_tokens_total", useful)
        for request in new:
            observe("vllm:request_queue_time_seconds", start - request.arrival_time)
            if self.scheduler.kv.shares_prefixes:
                add("vllm:prefix_cache_queries", request.num_prompt_tokens)
                add("vllm:prefix_cache_hits", request.num_cached_tokens)
        self._tokens(result)

    def _tokens(self, result: StepResult) -> None:
        """Each request of a step has one more token."""
        gap = self.sums.histograms["vllm:inter_token_latency_seconds"].observe
        for request in result.token_ids:
            times = request.token_times
            if len(times) > 1:
                gap(times[-1] - times[-2])
            elif times:
                self.sums.observe("vllm:time_to_first_token_seconds", times[0] - request.arrival_time)
                self.sums.add("vllm:prompt_tokens", request.num_prompt_tokens)
                self.sums.add("vllm:prompt_tokens_cached", request.num_cached_tokens)
        self.sums.add("vllm:generation_tokens", len(result.token_ids))

    def closed(self, request: Request) -> None:
        if self.inner:
            self.inner.closed(request)
        reason = request.finish_reason
        if reason is None or reason is FinishReason.REFUSED:  # whoever refuses it says why
            return
        self.sums.add("vllm:request_success", 1, reason.value)
        self.sums.add("minibatcher:tenant_prompt_tokens", request.num_prompt_tokens, request.tenant)
        self.sums.add("minibatcher:tenant_generation_tokens", request.num_output_tokens, request.tenant)
        if reason.value in COMPLETED:
            self._served(request)

    def _served(self, request: Request) -> None:
        """A request has been served to its end."""
        observe, times, scheduled = self.sums.observe, request.token_times, request.first_scheduled_time
        assert scheduled is not None and request.finish_time is not None  # it has been served
        observe("vllm:request_prompt_tokens", request.num_prompt_tokens)
        observe("vllm:request_generation_tokens", request.num_output_tokens)
        observe("vllm:request_params_max_tokens", request.params.max_tokens)
        observe("vllm:request_prefill_kv_computed_tokens", request.num_prompt_tokens - request.num_cached_tokens)
        observe("vllm:request_num_preemptions", request.num_preemptions)
        observe("vllm:e2e_request_latency_seconds", request.finish_time - request.arrival_time)
        observe("vllm:request_prefill_time_seconds", times[0] - scheduled)
        observe("vllm:request_decode_time_seconds", times[-1] - times[0])
        observe("vllm:request_inference_time_seconds", times[-1] - scheduled)
        if len(times) > 1:
            observe("vllm:request_time_per_output_token_seconds", (times[-1] - times[0]) / (len(times) - 1))

    def gauge(self, name: str) -> float:
        """How things stand. Asked in any thread while the engine works: a number may be a moment old."""
        scheduler = self.scheduler
        kv = scheduler.kv
        if name == "vllm:num_requests_running":
            return sum(not request.finished for request in list(scheduler.running))
        if name == "vllm:num_requests_waiting":
            return len(scheduler.waiting)
        if name == "vllm:kv_cache_usage_perc":
            return max(0, kv.num_used_blocks) / kv.num_blocks
        return scheduler.config.max_num_seqs if name == "minibatcher:slots" else kv.num_blocks
