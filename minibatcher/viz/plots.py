"""Still pictures of runs: who sat in which slot doing what, and runs side by side. matplotlib, no pyplot state.

Every picture has words beside it: `describe` for alt text, `slots_text` as a table of letters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from ..errors import InvalidParameter
from ..metrics import summarize
from ..timeline import RowState, Timeline
from .palette import HATCHES, IDLE, LABELS, LETTERS, PADDING, request_colour, strategy_colour, tint
from .sheet import clipped, finish, percent, short

STRENGTH: dict[RowState | str, float] = {
    RowState.PREFILL: 1.0,
    RowState.DECODE: 0.6,
    RowState.STALLED: 0.35,
    RowState.FINISHED: 0.12,
}
KINDS = (*RowState, PADDING)
HATCH_GREY = "#8a8a8a"
NARROW = 0.003  # of the picture's width: a run narrower than that gets its tint only, a hatch would be noise


class Run(NamedTuple):
    """A slot that did one thing for one request from x position `left` to `right`."""

    slot: int
    left: float
    right: float
    request_id: str
    kind: RowState | str  # a RowState, or PADDING


def slot_runs(timeline: Timeline, x: str = "time") -> list[Run]:
    """The picture as rectangles: equal neighbours are merged. x: "step" (indices) or "time" (seconds of the run).

    A row padded to the width of its step shows its useful share first, then the padding. Raises InvalidParameter.
    """
    if x not in ("step", "time"):
        raise InvalidParameter(f'x must be "step" or "time", not {x!r}')
    origin = timeline.span[0]
    runs: list[Run] = []
    last: dict[int, Run] = {}  # the run that may still grow, by slot
    steps = timeline.steps
    for i, step in enumerate(steps):
        if x == "step":
            left, right = float(step.index), float(step.index + 1)
        else:
            # The moments between two steps belong to the first one, unless the engine was waiting for work.
            following = steps[i + 1].start if i + 1 < len(steps) else step.end
            left, right = step.start, following if following - step.end < max(step.duration, 0.002) else step.end
            left, right = left - origin, right - origin
        for row in step.rows:
            middle = right
            if step.width and 0 < row.num_tokens < step.width:
                middle = left + (right - left) * row.num_tokens / step.width
            earlier = last.get(row.slot)
            if earlier and earlier[3:] == (row.request_id, row.state) and abs(earlier.right - left) < 1e-9:
                last[row.slot] = earlier._replace(right=middle)
            else:
                if earlier:
                    runs.append(earlier)
                last[row.slot] = Run(row.slot, left, middle, row.request_id, row.state)
            if middle < right:
                runs.append(Run(row.slot, middle, right, row.request_id, PADDING))
    return runs + list(last.values())


def plot_slots(
    timeline: Timeline,
    ax: Axes | None = None,
    x: str = "step",
    *,
    title: str | None = None,
    legend: bool = True,
    until: float | None = None,
    names: bool = True,
) -> Axes:
    """Slots as rows, steps or seconds as columns; colour is the request, hatch what the slot did. Idle stays white.

    until: right end of the x axis, where several pictures share one; by default the end of the run.
    names: write each request's id into its longest run; rows lower than the letters are better without.
    Without `ax` a new figure is made; it is `result.figure`, which a notebook shows. Raises InvalidParameter.
    """
    runs = slot_runs(timeline, x)
    if ax is None:
        figure = Figure(figsize=(10, 1.6 + 0.22 * timeline.num_slots), layout="constrained", dpi=120)
        ax = finish(figure, describe(timeline)).add_subplot()
    first, last = _extent(timeline, x)
    last = last if until is None else until
    draw_runs(ax, runs, last - first)
    ax.set(xlim=(first, last), ylim=(timeline.num_slots - 0.5, -0.5), facecolor="white")
    ax.set_yticks(_few(timeline.num_slots))
    ax.set_ylabel("slot")
    ax.set_xlabel("step (one forward pass)" if x == "step" else "time since the first arrival, s")
    ax.set_title(title if title is not None else _title(timeline), loc="left", fontsize="medium")
    if names:
        _name_requests(ax, runs, last - first)
    if legend:
        shown = [kind for kind in KINDS if any(run.kind == kind for run in runs)]
        ax.legend(handles=state_keys(shown), loc="upper left", bbox_to_anchor=(0, 0), borderaxespad=3.6, **LEGEND)
    return ax


def draw_runs(ax: Axes, runs: list[Run], extent: float) -> None:
    """Boxes at the heights that `slot` gives. extent: width of the picture, in which narrow boxes get no hatch."""
    for kind in KINDS:
        chosen = [run for run in runs if run.kind == kind]
        left, right, slot = np.array([(run.left, run.right, run.slot) for run in chosen]).reshape(-1, 3).T
        low, high = slot - 0.44, slot + 0.44
        boxes = np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)
        fill = [_fill(run.kind, request_colour(run.request_id)) for run in chosen]
        ax.add_collection(PolyCollection(list(boxes), facecolors=fill, linewidths=0, label=LABELS[kind]), autolim=False)
        wide = boxes[right - left > NARROW * extent]
        if kind in HATCHES and len(wide):  # all in one path: a hatch per box is slow
            path = Path.make_compound_path(*(Path(box[[0, 1, 2, 3, 0]], closed=True) for box in wide))
            ax.add_patch(PathPatch(path, facecolor="none", edgecolor=HATCH_GREY, linewidth=0, hatch=HATCHES[kind]))


def plot_comparison(timelines: Mapping[str, Timeline], *, width: float = 12.0) -> Figure:
    """What `compare --plot` saves: every strategy's slots on one time axis, and bars of tokens/s, TTFT and ITL.

    width: inches, at 100 dots an inch. Save with `figure.savefig(path)`. Raises InvalidParameter.
    """
    if not timelines:
        raise InvalidParameter("a comparison needs at least one run")
    if isinstance(timelines, Timeline):
        raise InvalidParameter("a comparison takes runs by name, as {name: timeline}; for one run there is plot_slots")
    timelines = {str(name): timeline for name, timeline in timelines.items()}
    slots = [min(max(timeline.num_slots, 4), 24) for timeline in timelines.values()]
    heights = [0.55 + 0.095 * n for n in slots]
    below = max(2.8, 1.0 + 0.34 * len(timelines))
    figure = Figure(figsize=(width, sum(heights) + 1.3 + below), layout="constrained", dpi=100)
    parts: Any = figure.subfigures(3, 1, height_ratios=[sum(heights) + 0.9, 0.4, below])  # an array, if more than one
    top, strip, bottom = parts
    axes = top.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    summaries = {name: summarize(timeline) for name, timeline in timelines.items()}
    end = max(timeline.duration for timeline in timelines.values()) or 1.0
    static = timelines["static"].duration if "static" in timelines else end
    for ax, (name, timeline) in zip(axes, timelines.items()):
        done = timeline.duration
        title, names = _headline(name, summaries[name]), timeline.num_slots <= 12
        plot_slots(timeline, ax, x="time", title=title, legend=False, until=1.005 * end, names=names)
        ax.axvline(done, color="black", linewidth=1.2)
        ax.axvspan(done, 2 * end, color="#eeeeee", linewidth=0)
        if done < 0.8 * end:
            room = done < 0.7 * min(static, end) and "static" in timelines
            earlier = f", {short(static - done)} s before static" if room else ""
            note = f" done after {short(done)} s{earlier}"
            ax.text(done, (timeline.num_slots - 1) / 2, note, va="center")
        ax.label_outer()
    clock = " and ".join(sorted({timeline.clock for timeline in timelines.values()}))
    most = max(len(timeline.requests) for timeline in timelines.values())
    ways = f"{len(timelines)} ways of batching them" if len(timelines) > 1 else "one way of batching them"
    top.suptitle(f"{most:,} requests, {ways} · times are {clock}", x=0.01, ha="left", fontweight="bold")
    strip.legend(
        handles=state_keys([*KINDS, IDLE]),
        loc="center",
        title="Colours tell requests apart; strength and hatch tell what the slot did",
        **LEGEND,
    )
    left, middle, right = bottom.subplots(1, 3)
    speeds = {name: s["output_tokens_per_s"] for name, s in summaries.items()}
    fontsize = "medium" if width >= 12 else "small"
    _bars(left, {"": speeds}, "Output tokens per second", f"tokens/s, {clock}", fontsize)
    for ax, key, what in ((middle, "ttft_ms", "Time to first token"), (right, "itl_ms", "Inter-token latency")):
        groups = {p: {name: s[key][p] for name, s in summaries.items()} for p in ("p50", "p99")}
        _bars(ax, groups, f"{what}, p50 and p99", f"ms, {clock}", fontsize)
    return finish(figure, " ".join(describe(timeline) for timeline in timelines.values()))


def describe(timeline: Timeline) -> str:
    """Two or three sentences with the numbers that the picture shows: its alt text."""
    s = summarize(timeline)
    name = timeline.header.get("strategy", "unknown")
    if not timeline.steps:
        return f"Slots of a run with strategy {name}: no step ran. {s['num_requests']} requests were submitted."
    shares = {kind: share for kind, share in s["slot_shares"].items() if share}
    doing = ", ".join(f"{LABELS[_kind(kind)]} {100 * share:.0f} %" for kind, share in shares.items())
    text = (
        f"Slots of a run with strategy {name} ({timeline.clock} times): {timeline.num_slots} slots, {s['num_steps']:,} "
        f"steps and {s['num_requests']:,} requests in {s['makespan_s']:.3g} s. Shares of the slots' steps: {doing}. "
    )
    padding = f"{100 * s['padding_share']:.0f} % of the tokens computed were padding" if s["padding_share"] else ""
    speed = f"{s['output_tokens_per_s']:,.0f} output tokens came out per second" if s["output_tokens_per_s"] else ""
    facts = " and ".join(fact for fact in (padding, speed) if fact)
    return (text + (f"{facts[0].upper()}{facts[1:]}." if facts else "")).strip()


def slots_text(timeline: Timeline, columns: int = 80) -> str:
    """The picture in letters, one line a slot, for terminals and screen readers.

    With more steps than columns, each column stands for several steps and shows what the slot did in most of them.
    """
    steps = timeline.steps
    per_column = max(1, -(-len(steps) // columns))
    grid = [[Counter() for _ in range(-(-len(steps) // per_column))] for _ in range(timeline.num_slots)]
    for i, step in enumerate(steps):
        for row in step.rows:
            grid[row.slot][i // per_column][row.state] += 1
    lines = [
        f"slot {slot:>2} " + "".join(LETTERS[cell.most_common(1)[0][0]] if cell else LETTERS[IDLE] for cell in cells)
        for slot, cells in enumerate(grid)
    ]
    kinds = [*RowState, IDLE]
    key = "; ".join(f"{LETTERS[kind]} {LABELS[kind]}" for kind in kinds)
    unit = "one step" if per_column == 1 else f"{per_column} steps"
    return "\n".join([_title(timeline), *lines, f"One letter is {unit}: {key}."])


LEGEND = {"frameon": False, "fontsize": "small", "ncols": 6}


def _fill(kind: RowState | str, colour: str) -> tuple[float, float, float]:
    return tint(colour, STRENGTH[kind]) if isinstance(kind, RowState) else (0.78, 0.78, 0.78)


def state_keys(kinds: list) -> list[Patch]:
    keys = []
    for kind in kinds:
        if kind == IDLE:
            keys.append(Patch(facecolor="white", edgecolor="#bbbbbb", label=LABELS[kind]))
        else:
            face = _fill(kind, "#0072B2")
            keys.append(
                Patch(facecolor=face, edgecolor=HATCH_GREY, linewidth=0.5, hatch=HATCHES.get(kind), label=LABELS[kind])
            )
    return keys


def _name_requests(ax: Axes, runs: list[Run], extent: float) -> None:
    """Write a request's id into its longest run, where there is room."""
    longest: dict[str, Run] = {}
    for run in runs:
        if run.kind in (RowState.DECODE, RowState.PREFILL):
            best = longest.get(run.request_id)
            if best is None or run.right - run.left > best.right - best.left:
                longest[run.request_id] = run
    for name, run in longest.items():
        if run.right - run.left > 0.008 * extent * (len(name) + 1):
            ax.text(
                (run.left + run.right) / 2, run.slot, name, ha="center", va="center", fontsize=7.5, clip_on=True,
            )  # fmt: skip


def _bars(ax: Axes, groups: dict[str, dict[str, float | None]], title: str, unit: str, fontsize: str) -> None:
    """One group of bars a percentile (or a single one), one bar a strategy, the value written at its end."""
    names = list(next(iter(groups.values())))
    top = max((v for group in groups.values() for v in group.values() if v is not None), default=0.0) or 1.0
    places, labels = [], []
    for g, (group, values) in enumerate(groups.items()):
        for i, name in enumerate(names):
            place, value = g * (len(names) + 0.8) + i, values[name]
            places.append(place)
            labels.append(f"{clipped(name)} {group}".strip())
            ax.barh(place, value or 0.0, color=strategy_colour(name), height=0.8, alpha=0.6 if group == "p99" else 1)
            ax.text((value or 0.0) + 0.015 * top, place, short(value), va="center", fontsize="small")
    ax.set_yticks(places, labels, fontsize="small")
    ax.invert_yaxis()
    ax.set_xlim(0, 1.18 * top)
    ax.xaxis.set_major_locator(MaxNLocator(4 if top < 1e5 else 2))  # so that long labels stand apart, too
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    ax.set_xlabel(unit)
    ax.set_title(title, loc="left", fontsize=fontsize)
    ax.spines[["top", "right"]].set_visible(False)


def _headline(name: str, s: dict) -> str:
    parts = [f"{name} · of slots × steps: useful {percent(s['slot_occupancy'])}"]
    for kind in ("finished", "stalled", "idle"):
        if s["slot_shares"][kind]:
            parts.append(f"{LABELS[_kind(kind)]} {percent(s['slot_shares'][kind])}")
    parts.append(f"{short(s['output_tokens_per_s'])} tokens/s")
    return " · ".join(parts)


def _title(timeline: Timeline) -> str:
    return f"{timeline.header.get('strategy', 'run')} · {timeline.num_slots} slots · {timeline.clock} times"


def _kind(name: str) -> RowState | str:
    return IDLE if name == IDLE else RowState(name)


def _extent(timeline: Timeline, x: str) -> tuple[float, float]:
    if not timeline.steps:
        return 0.0, 1.0
    if x == "step":
        return timeline.steps[0].index, timeline.steps[-1].index + 1
    return 0.0, timeline.duration


def _few(slots: int) -> list[int]:
    return list(range(0, slots, max(1, -(-slots // 8))))
