"""The KV pool of a run, or of several on one clock, as a film: who owns which part of it, moment by moment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidParameter
from ..timeline import RowRecord, RowState, Timeline
from .interactive import Interactive
from .kv import block_size
from .memory_map import MARKS, NAMES, STRENGTHS, all_tables, check_tables, plot_memory_map, pool_tokens, row_tokens
from .palette import OKABE_ITO, REQUEST_COLOURS, request_colour
from .sheet import alt_of, by_name, percent, plain, short

MOST_MOMENTS = 1_000  # of a run; of a longer one every second is shown, or every third, …
TEXT_MOMENTS = 10


class Moment(NamedTuple):
    """From `time` (seconds since the first arrival) on, until the next one. position: of the step that runs then; None
    while nobody holds anything. Tokens: used by running requests, held for ended ones, reserved in all.
    """

    time: float
    position: int | None
    num_running: int
    num_waiting: int
    used: int
    ended: int
    reserved: int

    @property
    def wasted_share(self) -> float | None:
        """Of the reserved tokens, those in which no running request has anything."""
        return 1 - self.used / self.reserved if self.reserved else None


def memory_view(timelines: Timeline | Mapping[str, Timeline], *, max_moments: int = MOST_MOMENTS) -> Interactive:
    """`plot_memory_map` with time: a pool a run, side by side on one clock, which a reader plays, stops and drags.

    timelines: name → run, or one run. Blocks are those of `memory_map.all_tables`: the real ones, but where requests
    were preempted. max_moments: with more steps, several share a moment, and the picture says so.
    Its widget's `state` has time (s), playing, request (pointed at). Raises InvalidParameter.
    """
    runs = by_name(timelines, "a picture of KV memory")
    if type(max_moments) is not int or max_moments < 2:
        raise InvalidParameter(f"max_moments must be a whole number of at least 2, not {max_moments!r}")
    for timeline in runs.values():
        check_tables(timeline)
    wide = row_tokens(runs, max(map(pool_tokens, runs.values())))
    data: dict[str, Any] = {
        "palette": {
            "requests": REQUEST_COLOURS,
            "accent": OKABE_ITO["blue"],
            "strength": STRENGTHS,
            "hatches": {kind: hatch[0] for kind, hatch in MARKS.items()},
            "labels": NAMES,
        },
        "wide": wide,
        "runs": [],
    }
    arrays, texts, words, fullest = {}, [], [], 0.0
    for i, (name, timeline) in enumerate(runs.items()):
        header, own, moments = _pack(timeline, max_moments)
        data["runs"].append({"title": name} | header)
        arrays |= {f"{i}.{key}": array for key, array in own.items()}
        texts.append(_text(name, timeline, moments))
        words.append(f"{name}: on average {_average(moments)}")
        fullest = max(moments, key=lambda moment: moment.used).time  # of the last run, as in the still picture
    still = plot_memory_map(timelines)
    data["start"], data["alt"] = fullest, f"{alt_of(still)} {'; '.join(words)}."
    return Interactive("memory", data, arrays, still=still, alt=data["alt"], text="\n\n".join(texts))


def moments_of(timeline: Timeline) -> list[tuple[float, int | None]]:
    """When what is held changes, in seconds since the first arrival: the position of the step that begins, or None."""
    origin = timeline.span[0]
    found: list[tuple[float, int | None]] = []
    for position, step in enumerate(timeline.steps):
        found.append((step.start - origin, position))
        following = timeline.steps[position + 1] if position + 1 < len(timeline.steps) else None
        staying = {row.request_id for row in step.rows if row.state is not RowState.FINISHED} - {*step.finished}
        if following is None or (not staying and following.start > step.end):
            found.append((step.end - origin, None))
    return found


def _pack(timeline: Timeline, most: int) -> tuple[dict[str, Any], dict[str, np.ndarray], list[Moment]]:
    """What JSON holds, the arrays, and the figures of each moment shown.

    rows: request, first moment, moment behind the last, tokens in the first, more in each following, ended. holds:
    request, first moment, moment behind the last, first block, blocks, place of the first in the block table.
    """
    size, pool = block_size(timeline), pool_tokens(timeline)
    tables, wrong = all_tables(timeline)
    moments = moments_of(timeline)
    bin_size = max(1, math.ceil((len(moments) - 1) / (most - 1)))
    shown = [*moments[:-1:bin_size], moments[-1]]
    column_of = {position: column for column, (_, position) in enumerate(shown) if position is not None}
    known = {name: i for i, name in enumerate(timeline.requests)}
    rows, holds, held = _Rows(), _Holds(), {}
    for position, (step, table) in enumerate(zip(timeline.steps, tables)):
        for row in step.rows:
            known.setdefault(row.request_id, len(known))
        if position in column_of:
            column = column_of[position]
            rows.add(column, step.rows, known)
            holds.add(column, {known[name]: blocks for name, blocks in table.items()})
            held[position] = step.rows, sum(map(len, table.values())) * size
    origin = timeline.span[0]
    data = {
        "clock": timeline.clock,
        "slots": timeline.header.get("kv_layout") == "slots",
        "size": size,
        "pool": pool,
        "bin": bin_size,
        "num_steps": len(timeline.steps),
        "wrong": wrong,
        "duration": max(timeline.duration, shown[-1][0]),
        "requests": [_story(timeline, name, origin) for name in known],
    }
    arrays: dict[str, np.ndarray] = {
        "time": np.array([time for time, _ in shown], np.float64),
        "rows": np.array(rows.spans, np.int32).reshape(-1),
        "holds": np.array(holds.spans, np.int32).reshape(-1),
    }
    nobody: tuple[Sequence[RowRecord], int] = ((), 0)
    figures = []
    for time, where in shown:
        rows_then, reserved = nobody if where is None else held.get(where, nobody)
        figures.append(_moment(timeline, time, where, rows_then, reserved))
    return data, arrays, figures


class _Rows:
    """How many tokens each request has, as spans of moments over which they grow evenly."""

    def __init__(self) -> None:
        self.spans: list[list[int]] = []
        self._last: dict[int, list[int]] = {}

    def add(self, column: int, rows: Sequence[RowRecord], known: Mapping[str, int]) -> None:
        for row in rows:
            request, ended = known[row.request_id], int(row.state is RowState.FINISHED)
            span = self._last.get(request)
            if span and span[2] == column and span[5] == ended:
                length, grown = column - span[1], row.context - span[3]
                if length == 1 or grown == length * span[4]:
                    span[2], span[4] = column + 1, grown // length
                    continue
            self._last[request] = [request, column, column + 1, row.context, 0, ended]
            self.spans.append(self._last[request])


class _Holds:
    """Which blocks each request owns, as spans of moments; blocks that follow each other share one."""

    def __init__(self) -> None:
        self.spans: list[list[int]] = []
        self._last: dict[int, tuple[int, list[int], list[list[int]]]] = {}  # request → moment, table, its spans

    def add(self, column: int, tables: Mapping[int, list[int]]) -> None:
        for request, table in tables.items():
            before, known, spans = self._last.get(request, (-1, [], []))
            if before != column - 1 or table[: len(known)] != known:
                known, spans = [], []
            for span in spans:
                span[2] = column + 1
            for block, count, place in _consecutive(table[len(known) :], len(known)):
                spans.append([request, column, column + 1, block, count, place])
                self.spans.append(spans[-1])
            self._last[request] = column, table, spans


def _consecutive(blocks: Sequence[int], place: int) -> Iterator[tuple[int, int, int]]:
    """First block, how many, place in the table: of each stretch of blocks that rise by one."""
    start = 0
    for stop in range(1, len(blocks) + 1):
        if stop == len(blocks) or blocks[stop] != blocks[stop - 1] + 1:
            yield blocks[start], stop - start, place + start
            start = stop


def _moment(timeline: Timeline, time: float, position: int | None, rows: Sequence[RowRecord], reserved: int) -> Moment:
    running = [row for row in rows if row.state is not RowState.FINISHED]
    used, everything = sum(row.context for row in running), sum(row.context for row in rows)
    holding, now = {row.request_id for row in rows}, timeline.span[0] + time
    waiting = sum(
        r.arrival_time <= now and r.request_id not in holding and (r.finish_time is None or r.finish_time > now)
        for r in timeline.requests.values()
    )
    return Moment(time, position, len(running), waiting, used, everything - used, reserved)


def _story(timeline: Timeline, name: str, origin: float) -> list[Any]:
    """Name, colour, arrival and end (seconds since the first arrival), prompt tokens; None where there is no record."""
    colour, record = REQUEST_COLOURS.index(request_colour(name)), timeline.requests.get(name)
    if record is None:
        return [name, colour, None, None, None]
    end = None if record.finish_time is None else record.finish_time - origin
    return [name, colour, record.arrival_time - origin, end, record.num_prompt_tokens]


def _average(moments: Sequence[Moment]) -> str:
    """Over the time for which anything is reserved."""
    spans = np.diff([moment.time for moment in moments])
    used, reserved = (np.array([getattr(m, name) for m in moments[:-1]]) @ spans for name in ("used", "reserved"))
    if not reserved:
        return "nothing reserved"
    return f"{percent(1 - used / reserved)} of what is reserved holds nothing of a running request"


def _text(name: str, timeline: Timeline, moments: Sequence[Moment]) -> str:
    """The film in letters: some of its moments, and the average."""
    size, pool = block_size(timeline), pool_tokens(timeline)
    what = "slices of" if timeline.header.get("kv_layout") == "slots" else "blocks of"
    lines = [
        f"{name}, {timeline.clock}: a pool of {plain(pool)} tokens in {what} {plain(size)}",
        f"{'time':>9} {'running':>8} {'waiting':>8} {'tokens used':>12} {'reserved':>10} {'wasted':>7}",
    ]
    chosen = sorted({round(i) for i in np.linspace(0, len(moments) - 1, TEXT_MOMENTS)})
    for moment in (moments[i] for i in chosen):
        lines.append(
            f"{short(moment.time):>7} s {moment.num_running:>8,} {moment.num_waiting:>8,} {plain(moment.used):>12} "
            f"{plain(moment.reserved):>10} {percent(moment.wasted_share):>7}"
        )
    lines.append(f"On average {_average(moments)}.")
    return "\n".join(lines)
