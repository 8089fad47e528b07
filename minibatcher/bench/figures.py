"""What a peer gave back, checked, and what it amounts to in numbers. Definitions are those of minibatcher.metrics."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from ..metrics import ratio, spread
from ..timeline import output_hash
from .job import Job, Served

MOST_NAMED = 3  # requests in a sentence about what is wrong


class WrongAnswer(Exception):
    """A peer did not do the work that it was given; the message is a sentence that says what."""


def check_served(job: Job, served: Served) -> None:
    """Raise WrongAnswer unless each request got exactly its number of tokens, at times that make sense."""
    asked = {request.id: request for request in job.requests}
    if lost := [name for name in asked if name not in served.requests]:
        raise WrongAnswer(f"{len(lost)} of {len(asked)} requests got no answer: {_some(lost)}")
    if unknown := [name for name in served.requests if name not in asked]:
        raise WrongAnswer(f"it answered requests that nobody sent: {_some(unknown)}")
    for name, (ids, times) in served.requests.items():
        request = asked[name]
        if len(times) != request.output_tokens or len(ids) != request.output_tokens:
            count = len(ids) if len(ids) != request.output_tokens else len(times)
            what = "tokens" if len(ids) != request.output_tokens else "times of tokens"
            raise WrongAnswer(f"request {name} got {count} {what}, and {request.output_tokens} were forced")
        if not all(math.isfinite(time) for time in times) or any(a > b for a, b in pairwise(times)):
            raise WrongAnswer(f"the times of request {name} fall, or are no numbers")
        if times[0] < request.arrival_s:
            raise WrongAnswer(
                f"request {name} got its first token {request.arrival_s - times[0]:.3g} s before it arrived"
            )


def figures(job: Job, served: Served) -> dict[str, Any]:
    """Throughput from the first arrival to the last token; latencies in milliseconds: mean, p50, p90, p99, n."""
    begun = min(request.arrival_s for request in job.requests)
    seconds = max(times[-1] for _, times in served.requests.values()) - begun
    arrival = {request.id: request.arrival_s for request in job.requests}
    prompt_tokens, output_tokens = tokens(job)
    rows = [(arrival[name], times) for name, (_, times) in served.requests.items()]
    return {
        "seconds": seconds,
        "output_tokens_per_s": ratio(output_tokens, seconds),
        "total_tokens_per_s": ratio(output_tokens + prompt_tokens, seconds),
        "ttft_ms": spread(times[0] - start for start, times in rows),
        "itl_ms": spread(b - a for _, times in rows for a, b in pairwise(times)),
        "e2el_ms": spread(times[-1] - start for start, times in rows),
    }


def tokens(job: Job) -> tuple[int, int]:
    """Prompt and output tokens of all requests."""
    return sum(len(r.prompt) for r in job.requests), sum(r.output_tokens for r in job.requests)


def output_hashes(served: Served) -> dict[str, str] | None:
    """Sixteen hex digits a request, as a timeline has them; None where the engine tells no token ids."""
    if served.facts.get("ids") is False:
        return None
    return {name: output_hash(ids) for name, (ids, _) in served.requests.items()}


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (", …" if len(names) > MOST_NAMED else "")
