"""The engine: requests in, one obvious loop, tokens out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from operator import index

from tqdm import tqdm

from .errors import InvalidParameter, QueueFull, RateLimited, RequestFailed, RequestRefused
from .intake import check_limits, check_token_ids
from .interrupt import Interrupts
from .request import FinishReason, Request, SamplingParams
from .stepping import OnOutput, Stepper
from .timeline import Timeline


class Engine(Stepper):
    """Requests in, tokens out. Each `step` is one forward pass over whatever the scheduler put together.

    `Engine.from_model` builds all of it from a model's name and a strategy's. Parameters, and what happens to requests
    when something fails: see stepping.Stepper.
    """

    @classmethod
    def from_model(cls, model: str = "bard", **options) -> Engine:
        """An engine on a real model. Options: see minibatcher.build.EngineOptions."""
        from . import build_engine  # through the package, which says so where PyTorch is missing

        return build_engine(model, **options)

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "default",
        on_output: OnOutput | None = None,
    ) -> Request:
        """Submit a prompt (text, or token ids), which arrives now. See `submit`."""
        request = Request(
            request_id if request_id is not None else self._new_id(),
            self.encode(prompt),
            params or SamplingParams(),
            arrival_time=self.clock.now(),
            priority=priority,
            tenant=tenant,
        )
        self.submit(request, on_output)
        return request

    def submit(self, request: Request, on_output: OnOutput | None = None) -> None:
        """Put a request in the queue. Raises RequestRefused or InvalidParameter, and then nothing has changed.

        Of RequestRefused, QueueFull and RateLimited say when to try again. on_output: called with an Output after each
        step that brings a token, and once at the end. If it raises, this request alone ends with an error, all others
        go on, and `keep_going` says whether the step raises it. It may call the engine.
        """
        self.submit_all([request], on_output)

    def submit_all(self, requests: Sequence[Request], on_output: OnOutput | None = None) -> None:
        """The same for requests of one tenant that come in together: all of them, or none."""
        self.check_all(requests)
        if self._door:
            self._door.check(requests)
        self._enter(requests, on_output)
        self._report()

    def receive(self, request: Request) -> bool:
        """`submit` as a run does it: False for a request that is turned away for now, which then ends at once.

        Its record says so: FinishReason.REFUSED for a full queue or a rate limit; ERROR where its detokenizer can't be
        made, or where it no longer fits a KV pool that had to shrink.
        """
        try:
            self.check(request)
        except RequestRefused as refusal:
            if "kv_shrunk" not in self.timeline.header:
                raise
            self._turn_away(request, FinishReason.ERROR, str(refusal))
            return False
        try:
            self._enter([request])
        except (QueueFull, RateLimited) as refusal:
            self._turn_away(request, FinishReason.REFUSED, str(refusal))
        except Exception as error:
            if request.request_id in self.requests:  # it is in, so the scheduler has failed
                raise
            self._turn_away(request, FinishReason.ERROR, self._tell("its text failed", error))
        self._report()
        return not request.finished

    def _enter(self, requests: Sequence[Request], on_output: OnOutput | None = None) -> None:
        detokenizers = []
        if self.tokenizer is not None:
            detokenizers = [self.tokenizer.detokenizer(r.params.stop, r.params.min_tokens) for r in requests]
        if self._door:
            self._door.enter(requests, self.scheduler.running, self.clock.now())
        self._detokenizers.update(zip(requests, detokenizers))
        for request in requests:
            self._open(request)
            if on_output is not None:
                self._callbacks[request] = on_output
            self.scheduler.add(request)

    def _open(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self._record(self.recorder.opened, request)

    def _turn_away(self, request: Request, reason: FinishReason, error: str) -> None:
        request.finish(reason, self.clock.now(), error)
        self._open(request)
        self._close(request)

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
        if self._door:
            self._door.check([request])

    def check_all(self, requests: Sequence[Request]) -> None:
        """Raise what `check` would for any of them, or InvalidParameter if two have the same id."""
        for request in requests:
            self.check(request)
        if len({r.request_id for r in requests}) < len(requests):
            raise InvalidParameter("request ids must be unique within a run")

    def run(self, requests: Iterable[Request], *, progress: bool = False, total: int | None = None) -> Timeline:
        """Serve requests as they arrive (`arrival_time`, seconds from now) until all have ended; returns the timeline.

        All are checked before the first step: one that can never be served is refused, and nothing runs. Only an
        iterator (of `total` requests in order of arrival) is taken and checked piece by piece, as for traffic too large
        to hold. A full queue or a rate limit does not stop the run: who is refused has a record that says so. An
        interrupt (Ctrl-C) aborts what is left and returns what was done, with header["interrupted"] set; so does an
        exception, which is then raised.
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
                while following is not None or self.has_work():
                    while following is not None and following.arrival_time <= self.clock.now():
                        if not self.receive(following):
                            bar.update()
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
        except BaseException:
            self.timeline.header["interrupted"] = True
            self.abort_all()
            raise
        finally:
            bar.close()
        return self.timeline

    def _wait(self, next_arrival: float | None = None) -> None:
        """Nothing could run: sleep until the scheduler or the next arrival wants attention."""
        self.clock.sleep_until(self.next_moment(next_arrival))

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options) -> Iterator[str]:
        """Submit a prompt now; yields its text piece by piece. Closing the generator early aborts the request.

        Text that nobody reads is kept, at most max_tokens of it, and holds nobody up. Raises RequestFailed where the
        request ends with an error.
        """
        text = self._text_of(self.add(prompt, params, **options))
        next(text)  # begun, so that closing or dropping it unread aborts the request too
        return text

    def _text_of(self, request: Request) -> Iterator[str]:
        shown = 0
        try:
            yield ""
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
            if self._in_step:  # closed by a garbage collection in the middle of one
                self._dropped.append(request)
            else:
                self._drop(request)
        if request.finish_reason is FinishReason.ERROR:
            raise RequestFailed(request.error)

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

    def _new_id(self) -> str:
        while True:
            name = f"request-{next(self._ids)}"
            if name not in self.requests and not self.recorder.knows(name):
                return name
