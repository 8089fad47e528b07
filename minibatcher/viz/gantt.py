"""A Gantt chart of requests: each one's way from arrival to end, a row a request."""

from __future__ import annotations

from collections import defaultdict

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..errors import InvalidParameter
from ..metrics import queue_time, spread
from ..timeline import RequestRecord, Timeline
from .palette import OKABE_ITO
from .plots import KINDS, Run, draw_runs, slot_runs, state_keys
from .sheet import by_name, clipped, counted, finish, headline, legend_below, new_sheet, percent, short

QUEUE, LOST = "#888888", OKABE_ITO["vermillion"]


def plot_gantt(timeline: Timeline, *, most: int = 40) -> Figure:
    """Requests as rows, time as columns: queued, then whatever the request's slot did; gaps where it was preempted.

    most: rows at most; of more requests every n-th is shown, and the title says so. Raises InvalidParameter.
    """
    by_name(timeline, "a Gantt chart")
    if not timeline.requests:
        raise InvalidParameter("a Gantt chart needs at least one request; this run has none")
    if type(most) is not int or most < 1:
        raise InvalidParameter(f"most must be a whole number of at least 1, not {most!r}")
    everybody = sorted(timeline.requests.values(), key=lambda r: r.arrival_time)
    stride = -(-len(everybody) // most)
    shown = everybody[::stride]
    row_of = {record.request_id: row for row, record in enumerate(shown)}
    runs = [
        run._replace(slot=row_of[run.request_id]) for run in slot_runs(timeline, "time") if run.request_id in row_of
    ]

    figure = new_sheet(1.9 + 0.2 * max(4, len(shown)))
    ax = figure.add_subplot()
    draw_runs(ax, runs, timeline.duration)
    num_gaps = _draw_waits(ax, timeline, shown, runs)
    origin = timeline.span[0]
    answered = [(r.token_times[0] - origin, row_of[r.request_id]) for r in shown if r.token_times]
    if answered:
        when, rows = zip(*answered)
        ax.scatter(when, rows, marker="|", s=110, color="black", linewidths=1.6, zorder=3)
    ax.set(xlim=(0, timeline.duration or 1.0), ylim=(len(shown) - 0.5, -0.5))
    ax.set_yticks(range(len(shown)), [clipped(name) for name in row_of], fontsize="small")
    ax.set_ylabel("request")
    ax.set_xlabel(f"time since the first arrival, s, {timeline.clock}")
    ax.spines[["top", "right"]].set_visible(False)
    nth = f", {len(shown)} of them shown" if stride > 1 else ""
    headline(
        figure,
        f"{timeline.header.get('strategy', 'run')}: {counted(len(everybody), 'request')} in order of arrival{nth}",
    )
    keys: list[Artist] = [Line2D([], [], color=QUEUE, linewidth=2, label="queued")]
    keys += state_keys([kind for kind in KINDS if any(run.kind == kind for run in runs)])
    if num_gaps:
        keys.append(Line2D([], [], color=LOST, linewidth=2, linestyle="--", label="preempted, queued again"))
    keys.append(Line2D([], [], color="black", marker="|", linestyle="", markersize=9, label="first token"))
    legend_below(figure, keys)
    return finish(figure, _describe(timeline))


def preempted_gaps(timeline: Timeline) -> dict[str, list[tuple[float, float]]]:
    """Request → spans in seconds since the first arrival in which it had lost its slot and waited to start again."""
    origin = timeline.span[0]
    lost: dict[str, float] = {}
    gaps = defaultdict(list)
    for step in timeline.steps:
        for row in step.rows:
            if row.request_id in lost:
                gaps[row.request_id].append((lost.pop(row.request_id), step.start - origin))
        for name in step.preempted:
            lost[name] = step.start - origin
    for name, since in lost.items():  # those who never came back
        record = timeline.requests.get(name)
        ended = record.finish_time if record else None
        gaps[name].append((since, timeline.span[1] - origin if ended is None else ended - origin))
    return dict(gaps)


def _draw_waits(ax: Axes, timeline: Timeline, shown: list[RequestRecord], runs: list[Run]) -> int:
    """Lines for those who wait, before their first step and between; returns how many gaps preemption has made."""
    origin, end = timeline.span
    started: dict[str, float] = {}
    for run in runs:
        started[run.request_id] = min(run.left, started.get(run.request_id, run.left))
    gaps, num_gaps = preempted_gaps(timeline), 0
    for row, record in enumerate(shown):
        left = end if record.finish_time is None else record.finish_time  # unless it got a slot before
        ax.plot(
            [record.arrival_time - origin, started.get(record.request_id, left - origin)], [row, row],
            color=QUEUE, linewidth=2, solid_capstyle="butt",
        )  # fmt: skip
        for lost, back in gaps.get(record.request_id, ()):
            ax.plot([lost, back], [row, row], color=LOST, linewidth=2, linestyle="--")
            num_gaps += 1
    return num_gaps


def _describe(timeline: Timeline) -> str:
    records = timeline.requests.values()
    queue = spread(queue_time(r) for r in records)
    waits = [queue_time(r) or 0.0 for r in records]
    lost = sum(r.num_preemptions for r in records)
    tail = f" Requests were preempted {counted(lost, 'time')}." if lost else " No request was preempted."
    late = percent(sum(wait > 0.001 for wait in waits) / len(waits))
    strategy = timeline.header.get("strategy", "an unnamed strategy")
    return (
        f"Gantt chart of {counted(len(waits), 'request')} under {strategy} batching, {timeline.clock} "
        f"times, {short(timeline.duration)} s. Queue time: median {short(queue['p50'])} ms, p99 "
        f"{short(queue['p99'])} ms; {late} of them waited more than 1 ms.{tail}"
    )
