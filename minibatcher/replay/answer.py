"""One answer as it comes in: text, token ids where the server tells them, and when each token was there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..timeline import RequestRecord
from .server import message_of, parse

REASONS = {"length": "length", "abort": "abort", "error": "error"}  # every other reason is one to stop
COUNTED_BY = {
    "ids": "the token ids in each event",
    "usage": "the count that the server gives in each event",
    "total": "the count that the server gives at the end",
    "events": "events with text, since the server gives no count",
}
MOST_PROMPT_TOKENS = 2**31 - 1  # that a server may count


class Answer:
    """What the client knows of one request. Times: seconds since the replay began; sent: None until it has been.

    max_tokens: what was asked for. done: the server has said that nothing follows.
    """

    def __init__(self, num_prompt_tokens: int | None, max_tokens: int = 100_000) -> None:
        # Some servers count the end of sequence too; who counts far beyond it would fill our memory with times.
        self._most_tokens = 2 * max_tokens + 16
        self.sent: float | None = None
        self.finished: float | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.status: int | None = None  # HTTP's, where it is not 200
        self.num_prompt_tokens, self.num_cached_tokens = num_prompt_tokens, 0
        self.version: str | None = None
        self._total: int | None = None  # of output tokens
        self._times: list[float] = []  # of events that carry a choice, and of each:
        self._lengths: list[int] = []  # characters,
        self._counts: list[int | None] = []  # output tokens so far, as the server counts
        self._num_ids: list[int | None] = []
        self._counted = 0
        self._ids: list[int] = []
        self._text: list[str] = []
        self.done = False
        self._blank: list[float] = []  # times of events without text, ids or count

    def take(self, data: bytes, now: float) -> None:
        """One event. Raises ValueError for what is none."""
        if data.strip() == b"[DONE]":
            self.done = True
        if self.done or self.finish_reason == "error":
            return
        event = parse(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is no JSON object: {data[:100]!r}")
        if event.get("error"):
            self.fail(f"the server says: {message_of(event)}", now)
            return
        version = event.get("system_fingerprint")
        self.version = self.version or (version if isinstance(version, str) else None)
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._take_usage(usage)
        choices = event.get("choices")
        if choices:
            self._take_choice(choices[0], event, now)

    def _take_usage(self, usage: dict[str, Any]) -> None:
        total = self._output_count(usage.get("completion_tokens"))
        self._total = self._total if total is None else total
        self.num_prompt_tokens = counted(usage.get("prompt_tokens"), MOST_PROMPT_TOKENS) or self.num_prompt_tokens
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.num_cached_tokens = counted(details.get("cached_tokens"), MOST_PROMPT_TOKENS) or 0

    def _output_count(self, value: Any) -> int | None:
        return counted(value, self._most_tokens)

    def _take_choice(self, choice: dict[str, Any], event: dict[str, Any], now: float) -> None:
        part = choice.get("delta") or choice.get("message") or choice
        text = "".join(part.get(key) or "" for key in ("reasoning_content", "reasoning", "text", "content"))
        ids = choice.get("token_ids")
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)):
            raise ValueError(f"token_ids are no token ids: {repr(ids)[:100]}")
        self._output_count(len(self._ids) + len(ids or ()))
        usage, timings = event.get("usage"), event.get("timings")
        count = self._output_count(usage.get("completion_tokens")) if isinstance(usage, dict) else None
        if count is None and isinstance(timings, dict):
            count = self._output_count(timings.get("predicted_n"))
        if text or ids or (count or 0) > self._counted:
            self._counted = max(self._counted, count or 0)
            self._times.append(now)
            self._lengths.append(len(text))
            self._counts.append(count)
            self._num_ids.append(len(ids) if isinstance(ids, list) else None)
            self._ids += ids or ()
            self._text.append(text)
        else:
            self._blank.append(now)
        reason = choice.get("finish_reason")
        if reason is not None:
            self.finish_reason, self.finished = REASONS.get(reason, "stop"), now
            if self.finish_reason == "error":
                self.error = "the server ended it with an error, and tells no more"

    def close(self, now: float) -> None:
        """The stream has ended by itself."""
        if self.finish_reason is None and not self.done:
            self.fail("the stream ended before the answer did", now)
        elif self.finish_reason is None:
            self.finish_reason, self.finished = "stop", now
        if not self._times and self._total:  # all of them special tokens, which some servers don't show
            self._times, n = self._blank, len(self._blank)
            self._lengths, self._counts, self._num_ids = [0] * n, [None] * n, [None] * n

    def fail(self, error: str, now: float, reason: str = "error") -> None:
        """It ends here, unless it had ended before."""
        if self.finish_reason is None:
            self.finish_reason, self.error, self.finished = reason, error, now

    def tokens_of_events(self) -> tuple[list[int], str]:
        """How many output tokens came with each event, and how that is known (a key of COUNTED_BY)."""
        if self._times and None not in self._num_ids:
            return [n or 0 for n in self._num_ids], "ids"
        told = [count for count in self._counts if count is not None]
        # A server that counts in its last event alone counts at the end.
        if len(told) > 1 or (told and len(self._times) == 1):
            counts, before = [], 0
            for count in self._counts:
                counts.append(max(0, (count or 0) - before))
                before = max(before, count or 0)
            if self._total is not None and self._total > before:
                counts[-1] += self._total - before
            return counts, "usage"
        if self._total is not None:
            return shared_out(self._total, self._lengths), "total"
        return [int(length > 0) for length in self._lengths], "events"

    @property
    def num_events(self) -> int:
        """Events that brought text, ids or a count."""
        return len(self._times)

    def record(self, request_id: str, arrival_time: float, priority: int, tenant: str) -> RequestRecord:
        """Of an answer that has ended. Where some token's id is not known, none is told."""
        counts, how = self.tokens_of_events()
        times = [time for time, n in zip(self._times, counts) for _ in range(n)]
        return RequestRecord(
            request_id,
            arrival_time,
            self.num_prompt_tokens or 0,
            num_output_tokens=len(times),
            token_times=times,
            finish_time=self.finished,
            finish_reason=self.finish_reason,
            priority=priority,
            tenant=tenant,
            output_token_ids=self._ids if how == "ids" else [],
            output_text="".join(self._text),
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
        )


def counted(value: Any, most: int) -> int | None:
    """A count of tokens, None where none is told. Raises ValueError for what can be none."""
    if value is not None and (type(value) is not int or not 0 <= value <= most):
        raise ValueError(f"{repr(value)[:100]} is no number of tokens from 0 to {most:,}")
    return value


def shared_out(total: int, lengths: Sequence[int]) -> list[int]:
    """`total` tokens over events, by their share of the characters; over all alike where there are none."""
    if not lengths:
        return []
    weights = list(lengths) if any(lengths) else [1] * len(lengths)
    whole, passed, given, counts = sum(weights), 0, 0, []
    for weight in weights:
        passed += weight
        upto = round(total * passed / whole)
        counts.append(upto - given)
        given = upto
    return counts
