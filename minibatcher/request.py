"""The life of one request: what was asked, how far it has come, how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from .errors import InvalidParameter
from .numeric import is_number

LARGEST = 2**31 - 1
MOST_LOGPROBS = 20  # as OpenAI's chat endpoint allows
PRIORITIES = range(-(10**9), 10**9 + 1)
PRIORITY_CLASSES = ("paid", "interactive", "batch", "background")  # names of the priorities 0 to 3; 0 is served first


class FinishReason(str, Enum):
    """Why a request ended. The values are those of OpenAI-compatible servers."""

    STOP = "stop"  # end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the client gave up
    ERROR = "error"  # something failed while it was served; `error` says what
    REFUSED = "refused"  # never let in: queue full, rate limit; `error` says why


class Status(str, Enum):
    WAITING = "waiting"  # in the queue: new, or preempted
    RUNNING = "running"  # holds a slot
    FINISHED = "finished"


class TokenLogprob(NamedTuple):
    """How probable an output token was: natural logarithms, of the model's own distribution.

    That is log-softmax of the raw logits, before temperature, top_k, top_p and the bans of min_tokens. top: the most
    probable tokens and their logarithms, the best first, the lowest ids first of equal ones; as many as were asked for,
    or the whole vocabulary. The output token need not be among them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    temperature: 0 is greedy (the most probable token), else logits are divided by it.
    top_k: keep the k most probable tokens; 0 keeps all. top_p: keep the smallest set whose probability reaches p.
    seed: start of this request's own random stream; None derives one from the engine's seed and the request id.
    max_tokens, min_tokens: bounds on generated tokens; before min_tokens nothing but max_tokens or an abort ends it.
    stop: strings that end the text (and are left out of it). stop_token_ids: tokens that end it.
    ignore_eos: go on after the end-of-sequence token, so that the output length is exactly max_tokens.
    stop_after: end after so many tokens as if the model had stopped there. Benchmarks force output lengths with it, of
    which a scheduler knows no more than it would of a real request: max_tokens.
    logprobs: keep how probable each output token was, and this many of the most probable ones (0 to 20); None keeps
    nothing. It changes no answer.
    Raises InvalidParameter.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop_after: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for name, low in (("max_tokens", 1), ("min_tokens", 0), ("top_k", 0)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= LARGEST:
                raise InvalidParameter(f"{name} must be a whole number from {low} to {LARGEST:,}, not {value!r}")
        if self.min_tokens > self.max_tokens:
            raise InvalidParameter(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.stop_after is not None and (type(self.stop_after) is not int or not 1 <= self.stop_after <= LARGEST):
            raise InvalidParameter(f"stop_after must be a whole number of at least 1, not {self.stop_after!r}")
        k = self.logprobs
        if k is not None and (type(k) is not int or not 0 <= k <= MOST_LOGPROBS):
            raise InvalidParameter(f"logprobs must be a whole number from 0 to {MOST_LOGPROBS}, or None, not {k!r}")
        if not is_number(self.temperature) or self.temperature < 0:
            raise InvalidParameter(f"temperature must be 0 (greedy) or a positive number, not {self.temperature!r}")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidParameter(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or self.seed < 0):
            raise InvalidParameter(f"seed must be a whole number of at least 0, not {self.seed!r}")
        for token_id in self.stop_token_ids:
            if type(token_id) is not int or token_id < 0:
                raise InvalidParameter(f"stop_token_ids must hold token ids, not {token_id!r}")
        if not all(isinstance(text, str) and text for text in stop):
            raise InvalidParameter(f"stop must hold non-empty strings, not {stop!r}")


@dataclass(eq=False, slots=True)
class Request:
    """One request and all the state that a server keeps for it.

    There is no prefill phase and no decode phase: `num_tokens` counts prompt and generated tokens,
    `num_computed_tokens` those whose keys and values are in the cache, and each step lets the second catch up.
    `prompt_token_ids` is any sequence of ints; a simulator passes placeholders, made when asked for. Times are
    seconds on the engine's clock.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival_time: float = 0.0
    priority: int = 0
    tenant: str = "default"

    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)  # prompt and generated ones
    max_total_tokens: int = field(init=False)  # the most that it can ever hold in the KV cache
    _ends_at: int = field(init=False, repr=False)  # tokens after which it ends in any case
    may_stop: bool = field(init=False)  # some token could end it before max_tokens
    output_token_ids: list[int] = field(default_factory=list)
    output_text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the output tokens, where params ask for them
    num_computed_tokens: int = 0
    status: Status = Status.WAITING
    slot: int | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when it was first let in
    num_lost_tokens: int = 0  # computed, then dropped by preemptions and not found in the prefix cache afterwards
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    error: str | None = None  # what failed, or why it was refused

    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    finish_time: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens + len(self.output_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + self.params.max_tokens
        self._ends_at = self.num_prompt_tokens + min(self.params.max_tokens, self.params.stop_after or LARGEST)
        self.may_stop = not self.params.ignore_eos or bool(self.params.stop_token_ids)
        if self.num_prompt_tokens == 0:
            raise InvalidParameter(f"request {self.request_id!r} has an empty prompt; give at least one token")
        if not is_number(self.arrival_time) or self.arrival_time < 0:
            raise InvalidParameter(
                f"arrival_time must be a number of at least 0, not {self.arrival_time!r} (request {self.request_id!r})"
            )
        if type(self.priority) is not int or self.priority not in PRIORITIES:
            raise InvalidParameter(
                f"priority must be a whole number from {PRIORITIES[0]:,} to {PRIORITIES[-1]:,}, "
                f"not {self.priority!r} (request {self.request_id!r})"
            )
        if not isinstance(self.tenant, str):
            raise InvalidParameter(f"tenant must be a text, not {self.tenant!r} (request {self.request_id!r})")

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens known but not yet computed: the prompt at first, then one a step."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Only its newest generated token is left to compute."""
        return self.num_computed_tokens == self.num_tokens - 1 and self.num_tokens > self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Token ids `start:stop` of prompt + output, without joining the two."""
        n = len(self.prompt_token_ids)
        head = self.prompt_token_ids[start:stop] if start < n else ()
        tail = self.output_token_ids[max(start - n, 0) : stop - n] if stop > n else ()
        return [*head, *tail]

    def append(
        self,
        token_id: int,
        now: float,
        eos_token_ids: frozenset[int] = frozenset(),
        detokenizer=None,
        logprob: TokenLogprob | None = None,
    ) -> str:
        """Take a generated token, finish if it ends the request, and return the text that is now safe to show.

        `detokenizer` (an IncrementalDetokenizer, or None where nobody reads the text) finds stop strings.
        """
        self.output_token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        self.token_times.append(now)
        self.num_tokens += 1
        by_token = self.may_stop and self._ends_with(token_id, eos_token_ids)
        text = detokenizer.add(token_id) if detokenizer and not by_token else ""
        if by_token:
            self.stop_reason = token_id if token_id in self.params.stop_token_ids else None
            self.finish(FinishReason.STOP, now)
        elif detokenizer and detokenizer.stopped is not None:
            self.stop_reason = detokenizer.stopped
            self.finish(FinishReason.STOP, now)
        elif self.num_tokens >= self._ends_at:
            self.finish(FinishReason.LENGTH if self._ends_at == self.max_total_tokens else FinishReason.STOP, now)
        if detokenizer:
            text += detokenizer.finish() if self.finished else ""
            self.output_text += text
        return text

    def _ends_with(self, token_id: int, eos_token_ids: frozenset[int]) -> bool:
        params = self.params
        if token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos):
            return self.num_output_tokens >= params.min_tokens
        return False

    @property
    def is_fresh(self) -> bool:
        """Nothing has been done for it yet."""
        return self.status is Status.WAITING and self.num_tokens == self.num_prompt_tokens and not self.num_preemptions

    def finish(self, reason: FinishReason, now: float, error: str | None = None) -> None:
        """End it; `error` says what went wrong. A request ends exactly once: a second end is a bug in the caller."""
        if self.finished:
            raise RuntimeError(f"request {self.request_id!r} ended twice: {self.finish_reason} and {reason}")
        self.status, self.finish_reason, self.finish_time, self.error = Status.FINISHED, reason, now, error
