"""A timeline as few and flat numbers, which a browser draws fast: columns of steps, runs of slots, requests' stories.

Columns: one value a column (a step, or several where there are more steps than columns). Runs: a slot that did one
thing for one request over neighbouring columns. Times are seconds on the engine's clock; the axis begins at `origin`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import InvalidParameter
from ..timeline import RequestRecord, RowState, StepRecord, Timeline
from .palette import REQUEST_COLOURS, request_colour

STATES = tuple(RowState)  # run_state counts in this order
KNOWN_STATES = frozenset(STATES)
LARGEST = 2**31 - 1  # tokens of a step: the arrays hold 32 bits
REQUEST_FIELDS = (
    *("index", "id", "colour", "arrival", "scheduled", "first_token", "last_token", "finish", "reason"),
    *("prompt_tokens", "output_tokens", "preemptions", "why"),
)
FULL = 255  # run_share of a row that computed useful tokens only, or none at all
COINCIDE = 1e-9  # seconds: a token belongs to the step that ends with it, though the clock's last digits differ

Arrays = dict[str, np.ndarray]


def trace(timeline: Timeline, max_columns: int = 4000) -> tuple[dict[str, Any], Arrays]:
    """The whole run: what JSON holds (header, requests' stories) and arrays.

    With more steps than `max_columns`, each column stands for `data["bin"]` steps: counts are their sums, times span
    them, and each slot shows what it did in most of them. Raises InvalidParameter where the timeline can't be drawn.
    """
    if type(max_columns) is not int or max_columns < 1:
        raise InvalidParameter(f"max_columns must be a whole number of at least 1, not {max_columns!r}")
    check(timeline)
    return _trace(timeline, 0, max(1, math.ceil(len(timeline.steps) / max_columns)))


def columns(timeline: Timeline, first_step: int) -> tuple[dict[str, Any], Arrays]:
    """What happened from step `first_step` on (a position in `timeline.steps`), to be appended to a picture.

    The message has the form of `trace`'s data, with kind "append" and only those requests that can have changed.
    """
    if type(first_step) is not int or first_step < 0:
        raise InvalidParameter(f"first_step must be a whole number of at least 0, not {first_step!r}")
    message, arrays = _trace(timeline, first_step, 1)
    return {"kind": "append"} | message, arrays


def check(timeline: Timeline) -> None:
    """Raises InvalidParameter with what keeps a timeline (one written by hand, say) from being drawn."""
    if not isinstance(timeline, Timeline):
        raise InvalidParameter(f"a picture of slots needs a Timeline, not {type(timeline).__name__}")
    slots = timeline.header.get("max_num_seqs")
    if type(slots) is not int or slots < 1:
        raise InvalidParameter(
            f'the timeline\'s header["max_num_seqs"] says how many slots there are: a whole number of at least 1, '
            f"not {slots!r}"
        )
    previous = -math.inf
    for position, step in enumerate(timeline.steps):
        if not (math.isfinite(step.start) and math.isfinite(step.duration) and step.duration >= 0):
            raise InvalidParameter(f"step {position} starts at {step.start!r} s and takes {step.duration!r} s")
        if step.start < previous:
            raise InvalidParameter(f"step {position} starts at {step.start} s, before the step ahead of it")
        previous = step.start
        for row in step.rows:
            if not 0 <= row.slot < slots:
                raise InvalidParameter(f"step {position} has a row in slot {row.slot}, but there are {slots} slots")
            if row.state not in KNOWN_STATES:
                known = ", ".join(state.value for state in STATES)
                raise InvalidParameter(f"step {position} has a row in state {row.state!r}; known: {known}")
        if not -LARGEST <= step.num_useful_tokens <= LARGEST or not -LARGEST <= step.num_computed_tokens <= LARGEST:
            raise InvalidParameter(f"step {position} has more tokens than the picture can count")
    for r in timeline.requests.values():
        times = (r.arrival_time, r.first_scheduled_time, r.finish_time, *r.token_times)
        wrong = next((t for t in times if t is not None and not math.isfinite(t)), None)
        if wrong is not None:
            raise InvalidParameter(f"request {r.request_id!r} has {wrong} among its times")


def _trace(timeline: Timeline, first: int, size: int) -> tuple[dict[str, Any], Arrays]:
    steps = timeline.steps[first:]
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    known = {name: i for i, name in enumerate(timeline.requests)}
    for step in steps:  # a run written by hand may have rows without a record
        for row in step.rows:
            known.setdefault(row.request_id, len(known))
    since = timeline.steps[first - 1].start if 0 < first <= len(timeline.steps) else -math.inf
    changed = [r for r in timeline.requests.values() if r.finish_time is None or r.finish_time >= since]
    reasons = _reasons(steps, changed, fills=timeline.header.get("strategy") in ("static", "dynamic"))
    origin, end = timeline.span
    data = {
        "name": str(timeline.header.get("strategy", "run")),
        "clock": timeline.clock,
        "slots": timeline.num_slots,
        "origin": origin,
        "end": end,
        "first": first,
        "first_index": timeline.steps[0].index if timeline.steps else 0,
        "num_steps": len(timeline.steps),
        "bin": size,
        "interrupted": bool(timeline.header.get("interrupted")),
        "kv_blocks": max((s.num_blocks for s in steps), default=0),
        "fields": REQUEST_FIELDS,
        "requests": [_story(known[r.request_id], r, reasons.get(r.request_id, "")) for r in changed]
        + [_nameless(i, name) for name, i in known.items() if name not in timeline.requests],
    }
    before = timeline.steps[first - 1].end if 0 < first <= len(timeline.steps) else -math.inf
    arrays = _columns(groups, _tokens_by(changed, [before, *(g[-1].end for g in groups)]))
    arrays |= _runs(groups, first, known)
    return data, arrays | _marks(timeline.steps, groups, first, known)


def _columns(groups: list[list[StepRecord]], tokens: list[int]) -> Arrays:
    """One value a column. working: rows that computed useful tokens; held: rows; waiting, kv: after the last step."""
    last = [group[-1] for group in groups]

    def total(value) -> np.ndarray:
        return np.array([sum(map(value, group)) for group in groups], np.int32)

    return {
        "start": np.array([group[0].start for group in groups], np.float64),
        "end": np.array([step.end for step in last], np.float64),
        "steps": np.array([len(group) for group in groups], np.int32),
        "working": total(lambda step: sum(row.num_tokens > 0 for row in step.rows)),
        "held": total(lambda step: len(step.rows)),
        "useful": total(lambda step: step.num_useful_tokens),
        "computed": total(lambda step: step.num_computed_tokens),
        "output": np.diff(np.array(tokens, np.int64)).astype(np.int32),
        "waiting": np.array([step.num_waiting for step in last], np.int32),
        "kv": np.array([step.kv_used_blocks for step in last], np.int32),
    }


def _tokens_by(requests: Iterable[RequestRecord], moments: list[float]) -> list[int]:
    """Output tokens of these requests that were there at each moment."""
    times = np.sort(np.array([t for r in requests for t in r.token_times], np.float64))
    return np.searchsorted(times, np.array(moments) + COINCIDE, side="right").tolist()


def _runs(groups: list[list[StepRecord]], first: int, known: dict[str, int]) -> Arrays:
    """slot, first column, column behind the last, request, state, and of 255 the share of the row that was useful."""
    open_runs: dict[int, list[int]] = {}
    done: list[list[int]] = []
    state_number = {state: i for i, state in enumerate(STATES)}
    for column, group in enumerate(groups, first):
        for slot, name, state, share in _cells(group):
            request, number = known[name], state_number[state]
            run = open_runs.get(slot)
            if run and run[2] == column and run[3:] == [request, number, FULL] and share == FULL:
                run[2] = column + 1
                continue
            run = open_runs[slot] = [slot, column, column + 1, request, number, share]
            done.append(run)
    table = np.array(done, np.int32).reshape(-1, 6)
    names = ("run_slot", "run_first", "run_last", "run_request")
    arrays = {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(names)}
    return arrays | {"run_state": table[:, 4].astype(np.uint8), "run_share": table[:, 5].astype(np.uint8)}


def _cells(group: list[StepRecord]) -> Iterable[tuple[int, str, RowState, int]]:
    """What each slot shows in a column: of several steps, what it did in most, and idle where it mostly was."""
    if len(group) == 1:
        for row in group[0].rows:
            yield row.slot, row.request_id, row.state, _share(row.num_tokens, group[0].width)
        return
    seen: dict[int, Counter] = {}
    for step in group:
        for row in step.rows:
            cell = (row.request_id, row.state, _share(row.num_tokens, step.width))
            seen.setdefault(row.slot, Counter())[cell] += 1
    for slot, counts in seen.items():
        (cell, _), total = counts.most_common(1)[0], counts.total()
        if 2 * total >= len(group):
            yield slot, *cell


def _share(num_tokens: int, width: int | None) -> int:
    return max(1, FULL * num_tokens // width) if width and 0 < num_tokens < width else FULL


def _marks(steps: list[StepRecord], groups: list[list[StepRecord]], first: int, known: dict[str, int]) -> Arrays:
    """Preemptions: column, the slot that was lost, the request."""
    marks = []
    position = first
    for column, group in enumerate(groups, first):
        for step in group:
            for name in step.preempted:
                slot = _last_slot(steps, position, name)
                if slot is not None:
                    marks.append((column, slot, known.get(name, -1)))
            position += 1
    table = np.array(marks, np.int32).reshape(-1, 3)
    return {f"mark_{name}": np.ascontiguousarray(table[:, i]) for i, name in enumerate(("column", "slot", "request"))}


def _last_slot(steps: list[StepRecord], position: int, name: str) -> int | None:
    for step in reversed(steps[max(0, position - 100) : position]):
        for row in step.rows:
            if row.request_id == name:
                return row.slot
    return None


def _reasons(steps: list[StepRecord], requests: list[RequestRecord], *, fills: bool) -> dict[str, str]:
    """Why each request waited, as far as these steps tell: its own reason once it was the head of the queue.

    fills: the strategy lets the engine wait until a batch is full.
    """
    told = [(i, step.wait) for i, step in enumerate(steps) if step.wait and "reason" in step.wait]
    own = {wait.get("request_id"): wait for _, wait in told}  # the latest
    positions: dict[str, list[int]] = {}
    for i, wait in told:
        positions.setdefault(str(wait["reason"]), []).append(i)
    starts = [step.start for step in steps]
    out = {}
    for r in requests:
        if r.request_id in own:
            wait = own[r.request_id]
            numbers = f" (needs {wait['need']:,}, had {wait['have']:,})" if {"need", "have"} <= set(wait) else ""
            out[r.request_id] = f"{wait['reason']}{numbers}"
            continue
        low = bisect_left(starts, r.arrival_time)
        high = bisect_left(starts, math.inf if r.first_scheduled_time is None else r.first_scheduled_time)
        counts = {reason: bisect_right(at, high - 1) - bisect_left(at, low) for reason, at in positions.items()}
        reason = max(counts, key=counts.__getitem__, default=None)
        if reason is not None and counts[reason]:
            out[r.request_id] = f"behind others in the queue: {reason}"
        elif low == high and low and steps[low - 1].end > r.arrival_time:
            out[r.request_id] = "a step was under way"
        elif low == high and fills:
            out[r.request_id] = "batch still filling"
    return out


def _story(index: int, r: RequestRecord, why: str) -> list[Any]:
    """In the order of REQUEST_FIELDS. Times in seconds on the engine's clock, None for what did not happen."""
    times = r.token_times
    return [
        *(index, r.request_id, _colour(r.request_id), r.arrival_time, r.first_scheduled_time),
        *(times[0] if times else None, times[-1] if times else None, r.finish_time),
        *(r.finish_reason, r.num_prompt_tokens, len(times) or r.num_output_tokens, r.num_preemptions, why),
    ]


def _nameless(index: int, name: str) -> list[Any]:
    """A request of which the run holds rows, and nothing else."""
    return [index, name, _colour(name), *[None] * 8, 0, ""]


def _colour(request_id: str) -> int:
    return REQUEST_COLOURS.index(request_colour(request_id))
