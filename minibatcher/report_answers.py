"""Whether runs gave the same answers, and whether they were asked the same at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .timeline import Timeline

REFERENCES = ("solo", "static")  # whose answers the others are compared with


def compare_answers(timelines: Mapping[str, Timeline]) -> tuple[set[tuple[str, str]], list[dict[str, Any]]]:
    """Which runs' requests could be compared, and where answers part from those of the reference run.

    Requests that either run aborted or left unfinished say nothing: they were cut off at some moment.
    """
    of_strategy = {timeline.header.get("strategy"): name for name, timeline in reversed(list(timelines.items()))}
    reference = next((of_strategy[name] for name in REFERENCES if name in of_strategy), next(iter(timelines)))
    compared: set[tuple[str, str]] = set()
    differences: list[dict[str, Any]] = []
    for name, timeline in timelines.items():
        if name == reference:
            continue
        for request_id, expected in timelines[reference].requests.items():
            record = timeline.requests.get(request_id)
            found: dict[str, Any] = {"id": request_id, "strategy": name, "reference": reference}
            if record is None:
                differences.append(found | {"position": None, "token": None, "expected": None})
                compared |= {(name, request_id), (reference, request_id)}
            elif {record.finish_reason, expected.finish_reason} <= {"stop", "length"}:
                here: Sequence[Any] = record.output_token_ids
                there: Sequence[Any] = expected.output_token_ids
                if not (record.has_token_ids and expected.has_token_ids):
                    here, there, found["as_text"] = record.output_text, expected.output_text, True
                    if not (here and there):  # a model without a tokenizer has ids alone
                        continue
                compared |= {(name, request_id), (reference, request_id)}
                if here != there:
                    differences.append(found | _parting(here, there))
    return compared, differences


def other_requests(timelines: Mapping[str, Timeline], beside: Collection[str]) -> dict[str, str]:
    """Which of `beside` were asked for something else than the first run, and what: workload, seed, times, lengths."""
    first, *others = timelines
    told = {name: _other_request(timelines[first], timelines[name]) for name in others if name in beside}
    return {name: why for name, why in told.items() if why}


def _other_request(first: Timeline, other: Timeline) -> str | None:
    for key in ("seed", "workload"):
        here, there = other.header.get(key), first.header.get(key)
        if here != there and None not in (here, there):
            if isinstance(here, dict) and isinstance(there, dict):
                parts = ("name", "num_requests", *here, *there)
                key = next(k for k in parts if here.get(k) != there.get(k))
                here, there, key = here.get(key), there.get(key), f"the workload's {key}"
            return f"{key} {_short(here)}, not {_short(there)}"
    if len(other.requests) != len(first.requests):
        return f"{len(other.requests):,} requests, not {len(first.requests):,}"
    for request_id, expected in first.requests.items():
        record = other.requests.get(request_id)
        if record is None:
            return f"it has no request {request_id!r}"
        if abs(record.arrival_time - expected.arrival_time) > 1e-6:
            return f"{request_id} arrived at {record.arrival_time:.3f} s, not at {expected.arrival_time:.3f} s"
        lengths = record.num_prompt_tokens, expected.num_prompt_tokens
        if lengths[0] != lengths[1] and 0 not in lengths:  # 0: no server has counted it
            return f"the prompt of {request_id} has {lengths[0]:,} tokens, not {lengths[1]:,}"
    return None


def _short(value: Any) -> str:
    if isinstance(value, (int, float)):
        return str(value)
    text = "; ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return repr(text if len(text) <= 80 else f"{text[:77]}…")


def all_ids(timeline: Timeline) -> bool:
    """Every token of every answer is known by its id."""
    return all(r.has_token_ids for r in timeline.requests.values())


def _parting(here: Sequence[Any], there: Sequence[Any]) -> dict[str, Any]:
    """The first place where two token lists, or texts, differ; None stands for the end of the shorter one."""
    same = (i for i, (a, b) in enumerate(zip(here, there)) if a != b)
    position = next(same, min(len(here), len(there)))
    return {
        "position": position,
        "token": here[position] if position < len(here) else None,
        "expected": there[position] if position < len(there) else None,
    }
