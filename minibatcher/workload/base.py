"""What a server is asked to do: requests with an arrival time, a prompt and an output length."""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import WorkloadError
from ..request import PRIORITIES
from .arrivals import LONGEST_S, arrival_times, check_count, check_rate

MAX_TOKENS = 2**31 - 1
TOKENS_PER_HASH = 512  # in the Mooncake traces


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload. Raises `WorkloadError` for what no request can have."""

    request_id: str
    arrival_time: float  # seconds from the start of the workload
    prompt_tokens: int | None  # None: only the text is known so far
    output_tokens: int | None  # forced output length; None: until the model stops
    prompt: str | None = None
    tenant: str = "default"
    priority: int = 0
    prefix_hashes: tuple[int, ...] = ()  # of the prompt, piece by piece from its head; equal hash, equal prefix
    tokens_per_hash: int = TOKENS_PER_HASH  # size of a piece; tokens beyond the last are shared with nobody

    def __post_init__(self) -> None:
        arrival = self.arrival_time
        if not isinstance(arrival, (float, int)) or not 0 <= arrival < math.inf:
            raise WorkloadError(f"arrival_time must be a finite number of seconds, 0 or more, not {arrival!r}.")
        for name in ("prompt_tokens", "output_tokens", "tokens_per_hash"):
            tokens = getattr(self, name)
            if tokens is None and name != "tokens_per_hash":
                continue
            if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
                value = reprlib.repr(tokens)
                raise WorkloadError(f"{name} must be a whole number (int), 1 to {MAX_TOKENS:,}, not {value}.")
        if type(self.priority) is not int or self.priority not in PRIORITIES:
            value, low, high = reprlib.repr(self.priority), PRIORITIES[0], PRIORITIES[-1]
            raise WorkloadError(f"priority must be a whole number (int), {low:,} to {high:,}, not {value}.")
        if not isinstance(self.tenant, str):
            raise WorkloadError(f"tenant must be a text, not {reprlib.repr(self.tenant)}.")
        if self.prompt is None and self.prompt_tokens is None:
            raise WorkloadError("A request needs prompt_tokens (a number) or prompt (text); this one has neither.")


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, with where they come from.

    Raises `WorkloadError` when empty, when ids repeat or when the last arrival is more than a year away.
    """

    name: str
    requests: tuple[WorkloadRequest, ...]
    source: str  # origin, licence and citation, in a sentence
    notes: tuple[str, ...] = ()  # what was done to it since

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.requests, key=lambda r: r.arrival_time))  # stable: ties keep their order
        if not ordered:
            raise WorkloadError(f"The workload {self.name!r} has no requests; it needs at least one.")
        if len({r.request_id for r in ordered}) < len(ordered):
            counts = Counter(r.request_id for r in ordered)
            twice = next(r.request_id for r in ordered if counts[r.request_id] > 1)
            raise WorkloadError(
                f"The request_id {twice!r} occurs twice in the workload {self.name!r}; ids must differ."
            )
        if ordered[-1].arrival_time > LONGEST_S:
            raise WorkloadError(
                f"The last request of {self.name!r} arrives {ordered[-1].arrival_time:.4g} s after the start; a year "
                "is the most. Arrival times are in seconds: correct them, or raise the request rate."
            )
        object.__setattr__(self, "requests", ordered)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return iter(self.requests)

    def to_jsonl(self, path: str | Path) -> None:
        """Write the workload as JSON lines, a header line first; `load_workload` reads it back unchanged.

        Only where the first request arrives after more than a day, reading shifts it to 0.
        """
        header = {"workload": self.name, "source": self.source, "notes": list(self.notes)}
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(header) + "\n")
            for request in self.requests:
                file.write(json.dumps(_as_record(request)) + "\n")

    def facts(self) -> dict[str, Any]:
        """What a run's record says of its workload."""
        return {"name": self.name, "source": self.source, "notes": list(self.notes), "num_requests": len(self)}

    def summary(self) -> dict[str, Any]:
        """Count, lengths in tokens (mean, p50, p90, p99, max; None if unknown) and arrivals, as JSON-ready figures.

        `arrival_rate` is requests per second and `arrival_cv` the coefficient of variation of the gaps between
        arrivals (1 for a Poisson process); both are None when all requests arrive at once or there is but one.
        """
        gaps = np.diff([r.arrival_time for r in self.requests])
        spread = len(gaps) > 0 and gaps.sum() > 0
        return {
            "num_requests": len(self),
            "prompt_tokens": _length_figures([r.prompt_tokens for r in self.requests]),
            "output_tokens": _length_figures([r.output_tokens for r in self.requests]),
            "arrival_rate": float(1 / gaps.mean()) if spread else None,
            "arrival_cv": float(gaps.std() / gaps.mean()) if spread else None,
        }

    def take(self, num_requests: int) -> Workload:
        """The first `num_requests` requests. Raises `WorkloadError` if there are fewer."""
        check_count(num_requests)
        if num_requests > len(self):
            raise WorkloadError(f"{self.name!r} holds {len(self):,} requests; {num_requests:,} were asked for.")
        if num_requests == len(self):
            return self
        note = f"first {num_requests:,} of {len(self):,} requests"
        return replace(self, requests=self.requests[:num_requests], notes=(*self.notes, note))

    def at_rate(self, requests_per_s: float, *, seed: int = 0) -> Workload:
        """The same requests at another mean arrival rate; `inf` lets all arrive at once, at time 0.

        Arrival times are stretched evenly, which keeps bursts. Where all arrive at once there is nothing to stretch:
        they get Poisson arrivals drawn from `seed`.
        """
        check_rate(requests_per_s)
        times = np.array([r.arrival_time for r in self.requests])
        span = times[-1] - times[0]
        if math.isinf(requests_per_s):
            times, note = np.zeros(len(times)), "all requests arrive at once"
        elif span > 0:
            rate = (len(times) - 1) / span
            times = (times - times[0]) * (rate / requests_per_s)
            note = f"arrivals rescaled from {rate:.4g}/s to {requests_per_s:.4g}/s"
        else:
            times = arrival_times(len(times), requests_per_s, "poisson", seed=seed)
            note = f"Poisson arrivals at {requests_per_s:.4g}/s"
        requests = tuple(replace(r, arrival_time=t) for r, t in zip(self.requests, times.tolist()))
        return replace(self, requests=requests, notes=(*self.notes, note))

    def fit_to_context(self, max_model_len: int, *, quantile: float = 0.99) -> Workload:
        """Shrink the lengths until every prompt + output fits `max_model_len` tokens; `notes` then says how.

        Prompts and outputs are multiplied by the same factor, so that their ratio, hence the mix of prefill and decode,
        stays; so are the pieces of prompts that prefix hashes stand for. The factor brings the given quantile of prompt
        + output down to the context; the few longer requests are cut to the context, each with its ratio kept (a factor
        set by the longest request would crush all others).
        Text cannot be shrunk: in a workload with text the requests that do not fit are left out.
        A request whose output length is unknown needs room for one token, and may use what its prompt leaves
        (`prompts.to_requests`). What fits already is returned unchanged.
        """
        if type(max_model_len) is not int or max_model_len < 2:
            raise WorkloadError(f"max_model_len must be a whole number, 2 or more, not {max_model_len!r}.")
        if not 0 < quantile <= 1:
            raise WorkloadError(f"quantile must lie above 0 and at most at 1, not {quantile!r}.")
        if any(r.prompt_tokens is None for r in self.requests):
            raise WorkloadError(
                f"{self.name!r} holds text of unknown length: load it with count_tokens before fitting."
            )
        prompt = np.array([r.prompt_tokens for r in self.requests])
        output = np.array([r.output_tokens or 1 for r in self.requests])
        total = prompt + output
        if total.max() <= max_model_len:
            return self
        if any(r.prompt is not None for r in self.requests):
            return self._leave_out(total > max_model_len, max_model_len)

        factor = min(1.0, max_model_len / np.quantile(total, quantile))
        each = np.minimum(factor, max_model_len / total)
        new_output = np.clip(np.rint(output * each), 1, max_model_len - 1).astype(int)
        new_prompt = np.clip(np.rint(prompt * each), 1, max_model_len - new_output).astype(int)
        requests = tuple(
            _shrunk(r, p, o, factor) for r, p, o in zip(self.requests, new_prompt.tolist(), new_output.tolist())
        )
        prompt_p50, output_p50 = _medians(prompt, new_prompt), _medians(output, new_output)
        note = (
            f"lengths scaled by {factor:.3g} to fit a context of {max_model_len:,} (prompt p50 {prompt_p50}, "
            f"output p50 {output_p50}); {np.count_nonzero(factor * total > max_model_len):,} still longer requests "
            "cut to the context"
        )
        if sizes := sorted({r.tokens_per_hash for r in requests if r.prefix_hashes}):
            note += f"; each prefix hash now stands for {' or '.join(map(str, sizes))} tokens"
        return replace(self, requests=requests, notes=(*self.notes, note))

    def _leave_out(self, too_long: np.ndarray, max_model_len: int) -> Workload:
        kept = tuple(r for r, long in zip(self.requests, too_long) if not long)
        if not kept:
            raise WorkloadError(
                f"No request of {self.name!r} fits a context of {max_model_len:,} tokens, and text cannot be shrunk. "
                "Use a model with a longer context or shorter texts."
            )
        note = f"{too_long.sum():,} of {len(self):,} requests left out: longer than a context of {max_model_len:,}"
        return replace(self, requests=kept, notes=(*self.notes, note))


def _shrunk(row: WorkloadRequest, prompt_tokens: int, output_tokens: int, factor: float) -> WorkloadRequest:
    """One factor for the pieces of all rows: prefixes that were equal stay equal."""
    tokens_per_hash = max(1, round(row.tokens_per_hash * factor)) if row.prefix_hashes else row.tokens_per_hash
    return replace(
        row,
        prompt_tokens=prompt_tokens,
        output_tokens=None if row.output_tokens is None else output_tokens,
        prefix_hashes=row.prefix_hashes[: -(-prompt_tokens // tokens_per_hash)],
        tokens_per_hash=tokens_per_hash,
    )


def _as_record(request: WorkloadRequest) -> dict[str, Any]:
    fields = {name: getattr(request, name) for name in WorkloadRequest.__slots__}
    defaults: dict[str, Any] = {"prompt": None, "prompt_tokens": None, "output_tokens": None}
    defaults |= {"tenant": "default", "priority": 0, "prefix_hashes": (), "tokens_per_hash": TOKENS_PER_HASH}
    return {name: value for name, value in fields.items() if name not in defaults or value != defaults[name]}


def _medians(before: np.ndarray, after: np.ndarray) -> str:
    return f"{np.median(before):.0f} -> {np.median(after):.0f}"


def _length_figures(lengths: list[int | None]) -> dict[str, float] | None:
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return None
    p50, p90, p99 = np.quantile(known, [0.5, 0.9, 0.99]).tolist()
    return {"mean": float(np.mean(known)), "p50": p50, "p90": p90, "p99": p99, "max": int(np.max(known))}
