"""The slot animation: a run, or several on one clock, as a film that a reader plays, stops and points at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from ..errors import InvalidParameter
from ..timeline import Timeline
from .interactive import Interactive
from .palette import HATCHES, LABELS, LETTERS, OKABE_ITO, PADDING, REQUEST_COLOURS
from .plots import STRENGTH, describe, plot_comparison, plot_slots, slots_text
from .sheet import finish
from .trace import STATES, check, trace

AXES = ("steps", "seconds")
TALLEST = 7.0  # inches, of the still picture of one run


def animate(
    timelines: Timeline | Mapping[str, Timeline],
    *,
    axis: str | None = None,
    columns: int | None = None,
    max_columns: int = 4000,
    live: bool = False,
) -> Interactive:
    """The film of a run, or of several by name, one above the other on one clock.

    Rows are slots; colour is the request; strength, texture and letter say what the slot did. From any timeline:
    measured, simulated or written by hand.
    axis: what runs to the right, "steps" or "seconds" since the first arrival; by default steps for one run,
    seconds for several. columns: how many steps are seen at once, by default all; the reader can zoom.
    max_columns: beyond so many steps, several share a column, and the picture says so.
    live: the run goes on, and its widget is told of new steps with `widget.tell(*trace.columns(timeline, first_step))`,
    or to forget them with `widget.tell({"kind": "clear"})`. Where messages were lost, `state` says from which step on:
    `wanted`.
    Its widget's `state` has step (done so far, of the first run), time (s), axis, playing, request (pointed at).
    Raises InvalidParameter.
    """
    runs = {str(name): run for name, run in timelines.items()} if isinstance(timelines, Mapping) else {"": timelines}
    if not runs:
        raise InvalidParameter("an animation needs at least one run")
    axis = axis or ("seconds" if len(runs) > 1 else "steps")
    if axis not in AXES:
        raise InvalidParameter(f"axis must be one of {', '.join(AXES)}, not {axis!r}")
    if columns is not None and (type(columns) is not int or columns < 1):
        raise InvalidParameter(f"columns must be a whole number of at least 1, not {columns!r}")
    for timeline in runs.values():
        check(timeline)
    alt = " ".join(describe(timeline) for timeline in runs.values())
    data: dict[str, Any] = {
        "axis": axis,
        "columns": columns,
        "palette": palette(),
        "alt": alt,
        "live": live,
        "runs": [],
    }
    arrays = {}
    for i, (name, timeline) in enumerate(runs.items()):
        header, own = trace(timeline, max_columns)
        data["runs"].append(header | {"title": name or header["name"]})
        arrays |= {f"{i}.{key}": array for key, array in own.items()}
    return Interactive(
        "slots",
        data,
        arrays,
        still=_still(runs, axis),
        alt=alt,
        text="\n\n".join(slots_text(timeline) for timeline in runs.values()),
    )


def palette() -> dict[str, Any]:
    """The colours, textures, letters and names of states, for JavaScript."""

    def plain(table: Mapping) -> dict[str, Any]:
        return {str(getattr(key, "value", key)): value for key, value in table.items()}

    return {
        "requests": REQUEST_COLOURS,
        "alarm": OKABE_ITO["vermillion"],
        "accent": OKABE_ITO["blue"],
        "states": [state.value for state in STATES],
        "strength": plain(STRENGTH) | {PADDING: 1.0},
        "hatches": plain(HATCHES),
        "letters": plain(LETTERS),
        "labels": plain(LABELS),
    }


def _still(runs: Mapping[str, Timeline], axis: str) -> Figure:
    if len(runs) > 1:
        return plot_comparison(runs, width=10.0)
    (timeline,) = runs.values()
    height = min(1.6 + 0.22 * timeline.num_slots, TALLEST)
    figure = Figure(figsize=(10, height), layout="constrained")
    ax = figure.add_subplot()
    names = timeline.num_slots <= 40  # of more, rows are lower than the letters
    plot_slots(timeline, ax, x="time" if axis == "seconds" else "step", names=names)
    return finish(figure, describe(timeline))
