"""The engine: one obvious loop around a scheduler, a runner and a clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from operator import index
from typing import Any, NamedTuple

from tqdm import tqdm

from .clock import WallClock
from .errors import InvalidParameter, PlanError
from .intake import check_limits, check_token_ids
from .interrupt import Interrupts
from .recorder import TimelineRecorder
from .request import FinishReason, Request, SamplingParams
from .runners.base import Runner
from .scheduling.base import Scheduler, StepPlan, check_plan
from .timeline import Timeline

SHORTEST_WAIT_S = 1e-4  # so that a time to wake at that has passed does not spin


class Output(NamedTuple):
    """What one step brought one request: its new token and the text that is now safe to show."""

    request_id: str
    token_id: int
    text: str
    finish_reason: FinishReason | None


class _Done(NamedTuple):
    """What a step did: sampled tokens, new texts, requests that ended."""

    sampled: dict[Request, int]
    texts: dict[Request, str]
    ended: list[Request]


class Engine:
    """Requests in, tokens out. Each `step` is one forward pass over whatever the scheduler put together.

    tokenizer: needed for text prompts, text output and stop strings; without it the engine deals in token ids.
    header: provenance for the timeline. recorder: what keeps the record (a TimelineRecorder unless told otherwise).
    check_plans: hold every plan against the scheduler's contract; a large simulation can do without.
    monitor: samples the device while `run` serves (monitor.GpuMonitor, on the engine's clock).
    `Engine.from_model` builds all of it from a model's name and a strategy's.
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
        recorder=None,
        check_plans: bool = True,
        monitor=None,
    ) -> None:
        self.scheduler, self.runner, self.clock = scheduler, runner, clock or WallClock()
        self.tokenizer, self.eos_token_ids = tokenizer, frozenset(eos_token_ids)
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self._header = header or {}
        self.recorder = recorder or TimelineRecorder()
        self._check_plans, self.monitor = check_plans, monitor
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
        self.scheduler.clear()
        self.clock.reset()
        self.requests: dict[str, Request] = {}  # those that have not ended
        self._detokenizers: dict[Request, Any] = {}
        scheduler, kv = self.scheduler, self.scheduler.kv
        facts = {
            "strategy": scheduler.name,
            **asdict(scheduler.config),
            "kv_layout": scheduler.kv_layout,
            "block_size": kv.block_size,
            "num_blocks": kv.num_blocks,
            "enable_prefix_caching": kv.shares_prefixes,
            "max_model_len": self.max_model_len,
        }
        self.recorder.begin(self.clock.kind, facts | self._header)

    @property
    def timeline(self) -> Timeline:
        """What has happened since the last reset."""
        return self.recorder.timeline

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "default",
    ) -> Request:
        """Submit a prompt (text, or token ids), which arrives now. Raises RequestRefused if it can never be served."""
        request = Request(
            request_id if request_id is not None else self._new_id(),
            self.encode(prompt),
            params or SamplingParams(),
            arrival_time=self.clock.now(),
            priority=priority,
            tenant=tenant,
        )
        self.submit(request)
        return request

    def submit(self, request: Request) -> None:
        """Put a request in the queue. Raises RequestRefused or InvalidParameter, and then nothing has changed."""
        self.check(request)
        self.recorder.opened(request)
        self.requests[request.request_id] = request
        if self.tokenizer is not None:
            params = request.params
            self._detokenizers[request] = self.tokenizer.detokenizer(params.stop, params.min_tokens)
        self.scheduler.add(request)

    def check(self, request: Request) -> None:
        """Raise RequestRefused if the request could never be served, InvalidParameter if it makes no sense."""
        name = request.request_id
        if name in self.requests or self.recorder.knows(name):
            raise InvalidParameter(f"there is a request {name!r} already; request ids must be unique")
        if not request.is_fresh:
            raise InvalidParameter(f"request {name!r} has been served before; make a new Request of its prompt")
        if request.params.stop and self.tokenizer is None:
            raise InvalidParameter("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        if self.vocab_size is not None:
            check_token_ids(request, self.vocab_size, self.eos_token_ids)
        check_limits(request, self.max_model_len, self.scheduler.kv)

    def abort(self, request_id: str) -> bool:
        """End a request now, waiting or running. False if it has ended already or never was."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.finish(FinishReason.ABORT, self.clock.now())
        self.scheduler.abort(request)
        self._close(request)
        return True

    def abort_all(self) -> None:
        """End every request that is left and start from a clean slate, whatever state an interrupt has left."""
        now = self.clock.now()
        for request in list(self.requests.values()):
            if not request.finished:
                request.finish(FinishReason.ABORT, now)
            self._close(request)
        self.scheduler.clear()

    def step(self) -> list[Output]:
        """Plan and run one forward pass; returns the new tokens. Where nothing can run yet, nothing happens."""
        done = self._step()
        if done is None:
            return []
        return [
            Output(request.request_id, token_id, done.texts.get(request, ""), request.finish_reason)
            for request, token_id in done.sampled.items()
        ]

    def _step(self) -> _Done | None:
        start = self.clock.now()
        plan = self.scheduler.schedule(start)
        if not self._begin(plan, start):
            return None
        try:
            result = self.runner.run(plan)
        except Exception:
            self._abandon(plan)
            raise
        self.clock.advance(result.seconds)
        now = self.clock.now()
        self._advance(plan, start)
        ended, texts = self._append(result.token_ids, now)
        self.scheduler.computed(plan)
        self.recorder.stepped(result, ended, now)
        for request in ended:
            self._close(request)
        self.scheduler.update(ended)
        return _Done(result.token_ids, texts, ended)

    def run(self, requests: Iterable[Request], *, progress: bool = False, total: int | None = None) -> Timeline:
        """Serve requests as they arrive (`arrival_time`, seconds from now) until all have ended; returns the timeline.

        All are checked before the first step: one that can never be served is refused, and nothing runs. Only an
        iterator (of `total` requests in order of arrival) is taken and checked piece by piece, as for traffic too large
        to hold. An interrupt (Ctrl-C) aborts what is left and returns what was done, with header["interrupted"] set.
        """
        self.reset()
        if not isinstance(requests, Iterator):
            requests = sorted(requests, key=lambda r: r.arrival_time)  # stable: ties in the order given
            self.check_all(requests)
            total = len(requests)
        arrivals = iter(requests)
        following = next(arrivals, None)
        interrupts = Interrupts()
        bar = tqdm(total=total, desc=self.scheduler.name, unit="request", disable=not progress, leave=False)
        try:
            with interrupts.held(), self.monitor.watch(self.timeline) if self.monitor else nullcontext():
                while following is not None or self.scheduler.has_work():
                    while following is not None and following.arrival_time <= self.clock.now():
                        self.submit(following)
                        following = next(arrivals, None)
                    done = self._step()
                    with interrupts.open():
                        if done is None:
                            self._wait(following.arrival_time if following else None)
                        elif done.ended:
                            bar.update(len(done.ended))
        except KeyboardInterrupt:
            self.timeline.header["interrupted"] = True
            self.abort_all()
        finally:
            bar.close()
        return self.timeline

    def check_all(self, requests: Sequence[Request]) -> None:
        """Raise what `check` would for any of them, or InvalidParameter if two have the same id."""
        for request in requests:
            self.check(request)
        if len({r.request_id for r in requests}) < len(requests):
            raise InvalidParameter("request ids must be unique within a run")

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options) -> Iterator[str]:
        """Submit a prompt now; yields its text piece by piece. Closing the generator early aborts the request."""
        return self._text_of(self.add(prompt, params, **options))

    def _text_of(self, request: Request) -> Iterator[str]:
        shown = 0
        try:
            while True:
                text = request.output_text[shown:]  # another stream on this engine may have driven the steps
                shown += len(text)
                if text:
                    yield text
                elif request.finished:
                    break
                elif self._step() is None:
                    self._wait()
        finally:
            self.abort(request.request_id)

    def _wait(self, next_arrival: float | None = None) -> None:
        """Nothing could run: sleep until the scheduler or the next arrival wants attention."""
        self.clock.sleep_until(self.next_moment(next_arrival))

    def next_moment(self, next_arrival: float | None = None) -> float:
        """When, on the engine's clock, a step is worth trying again after one in which nothing could run.

        Raises PlanError if nobody will arrive and the scheduler names no time.
        """
        moments = [moment for moment in (self._wake_at, next_arrival) if moment is not None]
        if not moments:
            raise PlanError(
                f"the scheduler {self.scheduler.name!r} has {len(self.scheduler.waiting)} waiting and "
                f"{len(self.scheduler.running)} running requests, but plans nothing and names no time to wake at"
            )
        return max(min(moments), self.clock.now() + SHORTEST_WAIT_S)

    def encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """Token ids of a text prompt. Token ids pass through, as ints; of arrays and tensors too."""
        if isinstance(prompt, range):
            return prompt
        if not isinstance(prompt, str):
            try:
                return [index(token_id) for token_id in prompt]
            except TypeError:
                raise InvalidParameter("a prompt is a text or a sequence of whole numbers, its token ids") from None
        if self.tokenizer is None:
            raise InvalidParameter("a text prompt needs a tokenizer, and this model has none; give token ids")
        return self.tokenizer.encode(prompt, add_special_tokens=True)

    def _begin(self, plan: StepPlan, start: float) -> bool:
        """Check and record a plan that is about to run; False if it has nothing to run."""
        self._wake_at = plan.wake_at
        if not plan.num_tokens:
            self.scheduler.abandon(plan)  # no step, no copies
            return False
        if self._check_plans:
            check_plan(plan, self.scheduler)
        self.recorder.launched(plan, self.scheduler, start)
        return True

    def _abandon(self, plan: StepPlan) -> None:
        """A step has failed: nothing is known of its requests' KV, so they end; the others can go on."""
        self.scheduler.abandon(plan)
        for request in plan.num_tokens:
            self.abort(request.request_id)

    def _advance(self, plan: StepPlan, start: float) -> None:
        """Move each request on by what a step that began at `start` computes for it."""
        for request, num_tokens in plan.num_tokens.items():
            request.num_computed_tokens += num_tokens
        for request in plan.admitted:
            if request.first_scheduled_time is None:  # else it comes back from a preemption
                request.first_scheduled_time = start

    def _append(self, sampled: dict[Request, int], now: float) -> tuple[list[Request], dict[Request, str]]:
        """Give each request its new token; returns those that ended with it, and the new text of each."""
        eos, detokenizers = self.eos_token_ids, self._detokenizers
        ended, texts = [], {}
        for request, token_id in sampled.items():
            text = request.append(token_id, now, eos, detokenizers.get(request) if detokenizers else None)
            if text:
                texts[request] = text
            if request.finish_time is not None:
                ended.append(request)
        return ended, texts

    def _close(self, request: Request) -> None:
        """Complete the record of a request that has ended, and forget it."""
        del self.requests[request.request_id]
        self._detokenizers.pop(request, None)
        self.recorder.closed(request)

    def _new_id(self) -> str:
        while True:
            name = f"request-{next(self._ids)}"
            if name not in self.requests and not self.recorder.knows(name):
                return name
