"""One step after another: plan, run, hand out the tokens. Whatever fails, everything is in order after each."""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, NamedTuple

from .clock import WallClock
from .errors import InvalidParameter, OutOfMemory, PlanError, RequestRefused
from .intake import check_limits
from .limits import Door, Limits
from .recorder import TimelineRecorder
from .request import FinishReason, Request, TokenLogprob
from .runners.base import Runner, StepResult
from .scheduling.base import Scheduler, check_plan
from .scheduling.plan import StepPlan
from .timeline import Timeline

SHORTEST_WAIT_S = 1e-4  # so that a time to wake at that has passed does not spin
KV_KEPT = 0.8  # share of the KV pool that is left after the device has run out of memory
MOST_OOM_STEPS = 3  # so many in a row, and the step's requests are given up


class Output(NamedTuple):
    """What one step brought one request: its new token and the text that is now safe to show.

    token_id is None where a request ends without a token: aborted, or failed. logprob is None unless its params ask.
    """

    request_id: str
    token_id: int | None
    text: str
    finish_reason: FinishReason | None
    logprob: TokenLogprob | None = None


OnOutput = Callable[[Output], None]


class Done(NamedTuple):
    """What a step did: sampled tokens, new texts, requests that ended in it, well or badly; logprobs of who asked."""

    sampled: dict[Request, int]
    texts: dict[Request, str]
    ended: list[Request]
    logprobs: Mapping[Request, TokenLogprob] = MappingProxyType({})


class Trouble(NamedTuple):
    """A failure that has been dealt with, and is yet to be told: raised, or else warned of."""

    what: str
    error: Exception
    raised: bool


class Stepper:
    """A scheduler, a runner, a clock and a record, and the requests that are being served.

    tokenizer: needed for text prompts, text output and stop strings; without it the engine deals in token ids.
    header: provenance for the timeline. recorder: what keeps the record (a TimelineRecorder unless told otherwise).
    check_plans: hold every plan against the scheduler's contract; a large simulation can do without.
    monitor: samples the device while `run` serves (monitor.GpuMonitor, on the engine's clock).
    limits: how much may wait and how much each tenant may ask for.

    What fails costs as few requests as it can: a step its own, a detokenizer or a callback one, a recorder none. They
    end with FinishReason.ERROR and a sentence in `error`; all others go on. keep_going: False raises the failure once
    everything is in order again, so that a bug is loud; True warns, once for each kind, and goes on. If the device runs
    out of memory, everybody is computed again in a smaller KV pool, which header["kv_shrunk"] tells. An exception from
    the scheduler is a bug there and always raised; `abort_all` then makes the engine usable. An interrupt inside a step
    aborts all requests.
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
        limits: Limits | None = None,
        keep_going: bool = False,
    ) -> None:
        self.scheduler, self.runner, self.clock = scheduler, runner, clock or WallClock()
        self.tokenizer, self.eos_token_ids = tokenizer, frozenset(eos_token_ids)
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self._header = header or {}
        self.recorder = recorder or TimelineRecorder()
        self._check_plans, self.monitor = check_plans, monitor
        self.limits, self.keep_going = limits, keep_going
        self.idle = False  # the last step found nothing that could run
        self._ids = itertools.count()
        self._wake_at: float | None = None
        self._in_step = False  # or telling clients what one has brought
        self._dropped: list[Request] = []  # their streams were closed inside a step
        self._outbox: deque[tuple[OnOutput, Request, Output]] = deque()  # what clients are yet to be told
        self.reset()

    def reset(self) -> None:
        """Forget the past: a new timeline, and time starts at zero. Only an idle engine can be reset."""
        if self.has_work():
            raise InvalidParameter("the engine still has requests; finish or abort them before reset")
        self.scheduler.clear()
        self.clock.reset()
        self.requests: dict[str, Request] = {}  # those that have not ended
        self._detokenizers: dict[Request, Any] = {}
        self._callbacks: dict[Request, OnOutput] = {}
        self._door = Door(self.limits) if self.limits else None
        self._troubles: list[Trouble] = []  # to be told once everything is in order
        self._warned: set[tuple[str, type]] = set()
        self._num_oom_steps = 0  # in a row
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
        if self.limits:
            facts["limits"] = asdict(self.limits)
        self.recorder.begin(self.clock.kind, facts | self._header)

    @property
    def timeline(self) -> Timeline:
        """What has happened since the last reset."""
        return self.recorder.timeline

    def has_work(self) -> bool:
        """Somebody waits or runs: `while engine.has_work(): engine.step()` serves all that were submitted."""
        return self.scheduler.has_work()

    def step(self) -> list[Output]:
        """Plan and run one forward pass; returns the new tokens. Where nothing can run yet, nothing happens.

        A step need not bring a token: it may have computed a part of a prompt. A callback may call it, too: then what
        it brings is told to clients when all have heard of the step before.
        """
        done = self._step()
        if done is None:
            return []
        ended, texts, logprobs = set(done.ended), done.texts, done.logprobs
        return [
            Output(r.request_id, token, texts.get(r, ""), r.finish_reason if r in ended else None, logprobs.get(r))
            for r, token in done.sampled.items()
        ]

    def _step(self) -> Done | None:
        """One step, after which everything is in order whatever has failed; None if nothing could run."""
        while self._dropped:
            self._drop(self._dropped.pop())
        nested = self._in_step  # a callback has asked for a step
        try:
            self._in_step = True
            done = self._forward()
            self._in_step = nested
            self._deliver()
        except Exception:  # the scheduler's
            raise
        except BaseException:  # anything may be half done
            self.abort_all()
            raise
        finally:
            self._in_step = nested
        self.idle = done is None
        self._report()
        return done

    def _forward(self) -> Done | None:
        start = self.clock.now()
        plan = self.scheduler.schedule(start)
        if not self._begin(plan, start):
            return None
        try:
            result = self.runner.run(plan)
            self.clock.advance(result.seconds)
        except OutOfMemory as error:
            return self._shrink(plan, error)
        except Exception as error:
            return self._abandon(plan, error)
        self._advance(plan, start)
        return self._complete(plan, result)

    def _complete(self, plan: StepPlan, result: StepResult) -> Done:
        """A step has run: its tokens go to their requests, and those that end with them leave."""
        now = self.clock.now()
        self._num_oom_steps = 0
        ended, texts = self._append(result, now)
        unheard = [request for request in ended if request not in self._callbacks]
        for request, token_id in result.token_ids.items() if self._callbacks else ():
            self._note(request, token_id, texts.get(request, ""), result.logprobs.get(request))
        self.scheduler.computed(plan, result.token_ids)
        self._record(self.recorder.stepped, result, ended, now)
        self._leave(ended)
        if self._door:
            for request in ended:
                self._door.leave(request, now)
        for request in unheard:  # the others when their clients have heard of it
            self._close(request)
        return Done(result.token_ids, texts, ended, result.logprobs)

    def _begin(self, plan: StepPlan, start: float) -> bool:
        """Check and record a plan that is about to run; False if it has nothing to run."""
        self._wake_at = plan.wake_at
        if not plan.num_tokens:
            self.scheduler.abandon(plan)  # no step, no copies
            return False
        if self._check_plans:
            check_plan(plan, self.scheduler)
        self._record(self.recorder.launched, plan, self.scheduler, start)
        return True

    def _advance(self, plan: StepPlan, start: float) -> None:
        """Move each request on by what a step that began at `start` computes for it."""
        for request, num_tokens in plan.num_tokens.items():
            request.num_computed_tokens += num_tokens
        for request in plan.admitted:
            if request.first_scheduled_time is None:  # else it comes back from a preemption
                request.first_scheduled_time = start

    def _append(self, result: StepResult, now: float) -> tuple[list[Request], dict[Request, str]]:
        """Give each request its new token; returns those that ended with it, and the new text of each."""
        eos, detokenizers, logprobs = self.eos_token_ids, self._detokenizers, result.logprobs
        ended, texts = [], {}
        for request, token_id in result.token_ids.items():
            detokenizer = detokenizers.get(request) if detokenizers else None
            logprob = logprobs.get(request) if logprobs else None
            try:
                text = request.append(token_id, now, eos, detokenizer, logprob)
            except Exception as error:
                text = ""
                self._spoil(request, self._tell("its text failed", error), now)
            if text:
                texts[request] = text
            if request.finish_time is not None:
                ended.append(request)
        return ended, texts

    def next_moment(self, next_arrival: float | None = None) -> float:
        """When, on the engine's clock, a step is worth trying again after one in which nothing could run.

        At once if nobody is left and nobody will arrive. Raises PlanError if somebody waits, nobody will arrive and the
        scheduler names no time.
        """
        moments = [moment for moment in (self._wake_at, next_arrival) if moment is not None]
        if not moments and self.has_work():
            raise PlanError(
                f"the scheduler {self.scheduler.name!r} has {len(self.scheduler.waiting)} waiting and "
                f"{len(self.scheduler.running)} running requests, but plans nothing and names no time to wake at"
            )
        return max(min(moments, default=0.0), self.clock.now() + SHORTEST_WAIT_S)

    def abort(self, request_id: str) -> bool:
        """End a request now, waiting or running. False if it has ended already or never was."""
        request = self.requests.get(request_id)
        if request is None or request.finished:
            return False
        self._end([request], FinishReason.ABORT)
        self._deliver()
        self._report()
        return True

    def abort_all(self) -> None:
        """End every request that is left and start from a clean slate, whatever state an interrupt has left."""
        now, left = self.clock.now(), list(self.requests.values())
        for request in left:
            for half_appended in (request.output_token_ids, request.logprobs):  # a token's time comes last
                del half_appended[len(request.token_times) :]
            request.num_tokens = request.num_prompt_tokens + len(request.output_token_ids)
            request.slot = None
            if not request.finished:
                request.finish(FinishReason.ABORT, now)
        self.scheduler.clear()
        self._in_step = False  # or an interrupt has left it so
        for request in left:
            self._note(request, None, "")
            self._close(request)
        for leftovers in (self._dropped, self._detokenizers, self._callbacks):
            leftovers.clear()
        if self._door:
            self._door.clear(now)
        self._deliver()
        self._troubles = [trouble._replace(raised=False) for trouble in self._troubles]  # this is how others clean up
        self._report()

    def _end(self, requests: Sequence[Request], reason: FinishReason, error: str | None = None) -> None:
        """End these requests, which run or wait."""
        now = self.clock.now()
        for request in requests:
            request.finish(reason, now, error)
            self._remove(request)
        for request in requests:
            self._note(request, None, "")
            self._close(request)

    def _leave(self, ended: list[Request]) -> None:
        """They have ended in the step at hand, and give up their slots and blocks."""
        self.scheduler.update(ended)

    def _remove(self, request: Request) -> None:
        """It has ended between two steps or with a failed one, and leaves wherever it is."""
        self.scheduler.abort(request)

    def _close(self, request: Request) -> None:
        """Complete the record of a request that has ended, and forget it."""
        if self._door:
            self._door.leave(request, self.clock.now())
        if self.requests.get(request.request_id) is request:  # else it has been closed before
            self._record(self.recorder.closed, request)
            del self.requests[request.request_id]
        self._detokenizers.pop(request, None)
        self._callbacks.pop(request, None)

    def _note(self, request: Request, token_id: int | None, text: str, logprob: TokenLogprob | None = None) -> None:
        """Put down what a client is to hear, as it is now; `_deliver` tells it once everything is in order."""
        take = self._callbacks.pop if request.finished else self._callbacks.get  # the end is told once
        callback = take(request, None)
        if callback is not None:
            output = Output(request.request_id, token_id, text, request.finish_reason, logprob)
            self._outbox.append((callback, request, output))

    def _deliver(self) -> None:
        """Tell clients what has been noted for them. One may call the engine: what that brings is told after the rest.

        A client that fails is told no more, and its request ends; one that has heard of its end is done with.
        """
        if self._in_step:  # or somebody is at it already, and will come to the rest
            return
        self._in_step = True
        try:
            while self._outbox:
                callback, request, output = self._outbox.popleft()
                try:
                    callback(output)
                except Exception as error:
                    self._give_up(request, self._tell("its on_output callback failed", error))
                else:
                    if output.finish_reason is not None:
                        self._close(request)
        finally:
            self._in_step = False

    def _give_up(self, request: Request, error: str) -> None:
        """Its client has failed and hears no more of it. What has ended and is closed stays as it is."""
        self._callbacks.pop(request, None)
        self._outbox = deque(entry for entry in self._outbox if entry[1] is not request)
        if self.requests.get(request.request_id) is not request:
            return
        if request.finished:  # what ended it has reached nobody
            self._spoil(request, error, self.clock.now())
            self._close(request)
        else:
            self._end([request], FinishReason.ERROR, error)

    def _spoil(self, request: Request, error: str, now: float) -> None:
        """End a request with an error, also one that has just ended well but is not closed."""
        if request.finished:
            request.finish_reason, request.error = FinishReason.ERROR, error
        else:
            request.finish(FinishReason.ERROR, now, error)

    def _drop(self, request: Request) -> None:
        """Nobody reads its stream any more. After a reset somebody else may have its id."""
        if self.requests.get(request.request_id) is request:
            self.abort(request.request_id)

    def _abandon(self, plan: StepPlan, error: Exception) -> Done:
        """A step has failed: nothing is known of its requests' KV, so they end; the others can go on."""
        sentence = self._tell("the step failed", error)
        self.scheduler.abandon(plan)
        ended = [request for request in plan.num_tokens if not request.finished]
        self._end(ended, FinishReason.ERROR, sentence)
        return Done({}, {}, ended)

    def _shrink(self, plan: StepPlan, error: OutOfMemory) -> Done:
        """The device has run out of memory: all are computed again in a smaller KV pool.

        After MOST_OOM_STEPS such steps in a row the pool is not what is too large, and the step's requests end.
        """
        kv = self.scheduler.kv
        before, after = kv.num_blocks, int(KV_KEPT * kv.num_blocks)
        self._num_oom_steps += 1
        if self._num_oom_steps >= MOST_OOM_STEPS or after == 0:
            return self._abandon(plan, error)
        self._restart(plan, after)
        self._tell(f"the KV pool shrinks from {before} to {after} blocks", error, raised=False)
        shrunk = {"time_s": self.clock.now(), "from_blocks": before, "to_blocks": after, "error": str(error)}
        self.timeline.header.setdefault("kv_shrunk", []).append(shrunk)
        return Done({}, {}, self._end_misfits())

    def _restart(self, plan: StepPlan, num_blocks: int) -> None:
        """Put everybody back into the queue, and have a KV pool of `num_blocks` blocks in the next step."""
        self.scheduler.restart(plan, num_blocks, list(self.requests.values()))
        if hasattr(self.runner, "release"):  # what has no tensors has nothing to give back
            self.runner.release()

    def _end_misfits(self) -> list[Request]:
        """End the requests that the pool has become too small for."""
        ended = []
        for request in [request for request in self.requests.values() if not request.finished]:
            try:
                check_limits(request, self.max_model_len, self.scheduler.kv)
            except RequestRefused as refusal:
                self._end([request], FinishReason.ERROR, f"the device ran out of memory; {refusal}")
                ended.append(request)
        return ended

    def _record(self, write: Callable[..., None], *facts) -> None:
        """Have the recorder write; if it can't, requests are served all the same."""
        try:
            write(*facts)
        except Exception as error:
            self._tell("the recorder failed", error)

    def _tell(self, what: str, error: Exception, raised: bool = True) -> str:
        """Note a failure, to be raised or warned of in the end; returns it as a sentence."""
        self._troubles.append(Trouble(what, error, raised and not self.keep_going))
        return _sentence(what, error)

    def _report(self) -> None:
        """Everything is in order again: raise the first failure that is to be raised, and warn of all others."""
        if self._in_step:
            return
        troubles, self._troubles = self._troubles, []
        first = next((trouble for trouble in troubles if trouble.raised), None)
        for trouble in troubles:
            kind = trouble.what, type(trouble.error)
            if trouble is not first and kind not in self._warned:
                self._warned.add(kind)
                sentence = f"{_sentence(*trouble[:2])} (said once in a run)"
                warnings.warn(sentence, RuntimeWarning, stacklevel=3)
        if first is not None:
            raise first.error


def _sentence(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {error}".rstrip(": ")
