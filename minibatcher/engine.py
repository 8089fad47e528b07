"""The engine: one obvious loop around a scheduler, a runner and a clock."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm.auto import tqdm

from .clock import WallClock
from .errors import InvalidParameter, RequestRefused
from .request import FinishReason, Request, SamplingParams
from .runners.base import Runner
from .scheduling.base import Scheduler, StepPlan
from .timeline import RequestRecord, RowRecord, RowState, StepRecord, Timeline


@dataclass(frozen=True)
class Output:
    """What one step brought one request: its new token and the text that is now safe to show."""

    request_id: str
    token_id: int | None
    text: str
    finish_reason: FinishReason | None


class Engine:
    """Requests in, tokens out. Each `step` is one forward pass over whatever the scheduler put together.

    tokenizer: needed for text prompts, text output and stop strings; without it the engine deals in token ids.
    header: provenance for the timeline. `Engine.from_model` builds all of it from a model's name and a strategy's.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock=None,
        *,
        max_model_len: int,
        tokenizer=None,
        eos_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        header: dict[str, Any] | None = None,
    ) -> None:
        self.scheduler, self.runner, self.clock = scheduler, runner, clock or WallClock()
        self.tokenizer, self.eos_token_ids = tokenizer, frozenset(eos_token_ids)
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self._header = header or {}
        self._ids = itertools.count()
        self._wake_at: float | None = None
        self.reset()

    @classmethod
    def from_model(cls, model: str = "bard", **options) -> Engine:
        """An engine on a real model. Options: see minibatcher.build.EngineOptions."""
        from . import build_engine  # through the package, which says so where PyTorch is missing

        return build_engine(model, **options)

    def reset(self) -> None:
        """Forget the past: a new timeline, and time starts at zero. Only an idle engine can be reset."""
        if self.scheduler.has_work():
            raise InvalidParameter("the engine still has requests; finish or abort them before reset")
        self.clock.reset()
        self.requests: dict[str, Request] = {}  # those that have not ended
        self._detokenizers: dict[str, Any] = {}
        scheduler, kv = self.scheduler, self.scheduler.kv
        facts = {
            "strategy": scheduler.name,
            **asdict(scheduler.config),
            "kv_layout": scheduler.kv_layout,
            "block_size": kv.block_size,
            "num_blocks": kv.num_blocks,
            "max_model_len": self.max_model_len,
        }
        self.timeline = Timeline(clock=self.clock.kind, header=facts | self._header)

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        tenant: str = "default",
    ) -> Request:
        """Submit a prompt (text, or token ids). Raises RequestRefused if it can never be served."""
        request = Request(
            request_id if request_id is not None else f"request-{next(self._ids)}",
            self.encode(prompt),
            params or SamplingParams(),
            arrival_time=self.clock.now() if arrival_time is None else arrival_time,
            priority=priority,
            tenant=tenant,
        )
        self.submit(request)
        return request

    def submit(self, request: Request) -> None:
        """Put a request in the queue. Raises RequestRefused or InvalidParameter, and then nothing has changed."""
        self.check(request)
        name = request.request_id
        self.requests[name] = request
        if self.tokenizer is not None:
            self._detokenizers[name] = self.tokenizer.detokenizer(request.params.stop, request.params.min_tokens)
        self.timeline.requests[name] = RequestRecord(
            name,
            request.arrival_time,
            request.num_prompt_tokens,
            priority=request.priority,
            tenant=request.tenant,
            token_times=request.token_times,  # the same lists: the record is live
            output_token_ids=request.output_token_ids,
        )
        self.scheduler.add(request)

    def check(self, request: Request) -> None:
        """Raise RequestRefused if the request could never be served, InvalidParameter if it makes no sense."""
        name, prompt = request.request_id, request.num_prompt_tokens
        if name in self.timeline.requests:
            raise InvalidParameter(f"there is a request {name!r} already; request ids must be unique")
        if request.params.stop and self.tokenizer is None:
            raise InvalidParameter("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        ids = request.prompt_token_ids
        if self.vocab_size is not None and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise InvalidParameter(
                f"request {name!r} has token ids from {min(ids)} to {max(ids)}; "
                f"this model knows 0 to {self.vocab_size - 1}"
            )
        if prompt >= self.max_model_len:
            raise RequestRefused(
                f"the prompt of request {name!r} leaves no room in the context",
                need=prompt + 1,
                have=self.max_model_len,
                unit="tokens",
                hint="shorten the prompt or use a model with a longer context",
            )
        if request.max_total_tokens > self.max_model_len:
            raise RequestRefused(
                f"request {name!r} could outgrow the context ({prompt} prompt, {request.params.max_tokens} max_tokens)",
                need=request.max_total_tokens,
                have=self.max_model_len,
                unit="tokens",
                hint=f"lower max_tokens to {self.max_model_len - prompt}",
            )
        kv = self.scheduler.kv
        if kv.blocks_for(request.max_total_tokens) > kv.num_blocks:
            raise RequestRefused(
                f"request {name!r} can never fit the KV pool ({request.max_total_tokens} tokens at most)",
                need=kv.blocks_for(request.max_total_tokens),
                have=kv.num_blocks,
                unit="blocks",
                hint="lower max_tokens, shorten the prompt or raise kv_cache_tokens",
            )

    def abort(self, request_id: str) -> bool:
        """End a request now, waiting or running. False if it has ended already or never was."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.finish(FinishReason.ABORT, self.clock.now())
        self.scheduler.abort(request)
        self._close(request)
        return True

    def step(self) -> list[Output]:
        """Plan and run one forward pass; returns the new tokens. Where nothing can run yet, nothing happens."""
        plan = self.scheduler.schedule(self.clock.now())
        self._wake_at = plan.wake_at
        if not plan.num_tokens:
            return []
        start = self.clock.now()
        states = {request: _state(request, n) for request, n in plan.num_tokens.items()}
        result = self.runner.run(plan)
        self.clock.advance(result.seconds)
        outputs = self._apply(plan, result.token_ids, start, self.clock.now())
        self._record(plan, states, start, outputs)
        self.scheduler.update()
        return outputs

    def run(self, requests: Iterable[Request], *, progress: bool = False) -> Timeline:
        """Serve requests as they arrive (`arrival_time`, seconds from now) until all have ended; returns the timeline.

        Every request is checked before the first step: one that can never be served is refused, and nothing runs. An
        interrupt (Ctrl-C) aborts what is left and returns what was done so far, with header["interrupted"] set.
        """
        self.reset()
        pending = deque(sorted(requests, key=lambda r: r.arrival_time))  # stable: ties in the order given
        for request in pending:
            self.check(request)
        if len({r.request_id for r in pending}) < len(pending):
            raise InvalidParameter("request ids must be unique within a run")
        bar = tqdm(total=len(pending), desc=self.scheduler.name, unit="request", disable=not progress, leave=False)
        try:
            while pending or self.scheduler.has_work():
                while pending and pending[0].arrival_time <= self.clock.now():
                    self.submit(pending.popleft())
                outputs = self._step_or_wait(pending[0].arrival_time if pending else None)
                bar.update(sum(output.finish_reason is not None for output in outputs))
        except KeyboardInterrupt:
            self.timeline.header["interrupted"] = True
            for name in list(self.requests):
                self.abort(name)
        finally:
            bar.close()
        return self.timeline

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options) -> Iterator[str]:
        """Submit a prompt and yield its text piece by piece. Closing the generator early aborts the request."""
        request = self.add(prompt, params, **options)
        try:
            while not request.finished:
                for output in self._step_or_wait():
                    if output.request_id == request.request_id and output.text:
                        yield output.text
        finally:
            self.abort(request.request_id)

    def _step_or_wait(self, next_arrival: float | None = None) -> list[Output]:
        """One step; or, where nothing can run, sleep until the scheduler or the next arrival wants attention."""
        num_steps = len(self.timeline.steps)
        outputs = self.step()
        if len(self.timeline.steps) == num_steps:
            moments = [moment for moment in (self._wake_at, next_arrival) if moment is not None]
            if not moments:
                raise RuntimeError(
                    f"the scheduler {self.scheduler.name!r} has {len(self.scheduler.waiting)} waiting and "
                    f"{len(self.scheduler.running)} running requests, but plans nothing and names no time to wake at"
                )
            self.clock.sleep_until(min(moments))
        return outputs

    def encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """Token ids of a text prompt; token ids pass through."""
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise InvalidParameter("a text prompt needs a tokenizer, and this model has none; give token ids")
        return self.tokenizer.encode(prompt, add_special_tokens=True)

    def _apply(self, plan: StepPlan, token_ids: dict[Request, int], start: float, now: float) -> list[Output]:
        """Move each request on by what was computed for it."""
        for request, num_tokens in plan.num_tokens.items():
            request.num_computed_tokens += num_tokens
        for request in plan.admitted:
            if request.first_scheduled_time is None:  # else it comes back from a preemption
                request.first_scheduled_time = start
        outputs = []
        for request, token_id in token_ids.items():
            detokenizer = self._detokenizers.get(request.request_id)
            text = request.append(token_id, now, self.eos_token_ids, detokenizer)
            outputs.append(Output(request.request_id, token_id, text, request.finish_reason))
            if request.finished:
                self._close(request)
        return outputs

    def _close(self, request: Request) -> None:
        """Complete the record of a request that has ended, and forget it."""
        name = request.request_id
        del self.requests[name]
        self._detokenizers.pop(name, None)
        record = self.timeline.requests[name]
        record.num_output_tokens = request.num_output_tokens
        record.first_scheduled_time = request.first_scheduled_time
        record.finish_time, record.finish_reason = request.finish_time, request.finish_reason.value
        record.num_preemptions, record.output_text = request.num_preemptions, request.output_text

    def _record(self, plan: StepPlan, states: dict[Request, RowState], start: float, outputs: list[Output]) -> None:
        scheduler, kv = self.scheduler, self.scheduler.kv
        rows = []
        for request in scheduler.running:
            state = states.get(request, RowState.FINISHED if request.finished else RowState.STALLED)
            num_tokens = plan.num_tokens.get(request, 0)
            rows.append(RowRecord(request.slot, request.request_id, state, num_tokens, request.num_computed_tokens))
        self.timeline.steps.append(
            StepRecord(
                index=len(self.timeline.steps),
                start=start,
                duration=self.clock.now() - start,
                rows=rows,
                width=plan.width,
                num_computed_tokens=plan.num_computed_tokens,
                num_waiting=len(scheduler.waiting),
                wait=asdict(plan.wait) | {"reason": plan.wait.reason.value} if plan.wait else None,
                admitted=[request.request_id for request in plan.admitted],
                finished=[output.request_id for output in outputs if output.finish_reason],
                preempted=[request.request_id for request in plan.preempted],
                kv_used_blocks=kv.num_used_blocks,
                kv_free_blocks=kv.num_free_blocks,
                kv_tokens=sum(row.context for row in rows),
            )
        )


def _state(request: Request, num_tokens: int) -> RowState:
    if num_tokens == 0:
        return RowState.FINISHED
    return RowState.DECODE if request.is_decoding else RowState.PREFILL
