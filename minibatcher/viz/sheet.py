"""What all still plots share: the sheet, the words beside it, and who is on it."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ..errors import InvalidParameter
from ..timeline import Timeline

WIDTH = 9.6  # inches, at 100 dots an inch
NOTE = "#555555"  # text and lines that comment on the data
LINES = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))  # so that colour is not the only sign


def new_sheet(height: float, width: float = WIDTH) -> Figure:
    return Figure(figsize=(width, height), layout="constrained", dpi=100)


def finish(figure: Figure, alt: str) -> Figure:
    """Give the figure its alternative text: `figure.alt`, which `labkit.show` and `check_figure` read."""
    figure.alt = alt  # type: ignore[attr-defined]  # matplotlib lets one add it
    return figure


def alt_of(figure: Figure) -> str:
    """The alternative text that `finish` has given a figure."""
    return figure.alt  # type: ignore[attr-defined]  # matplotlib lets one add it


def as_html(figure: Figure, alt: str, attributes: str = "") -> str:
    """The figure as an <img> that holds its own PNG; equal pictures give equal text."""
    buffer = io.BytesIO()
    # Without the version of matplotlib in it.
    figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight", metadata={"Software": None})
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt)}"{attributes}>'


def by_name(timelines: Timeline | Mapping[str, Timeline], what: str) -> dict[str, Timeline]:
    """name → timeline; a single run goes by its strategy. Raises InvalidParameter where no run has a step."""
    if isinstance(timelines, Timeline):
        timelines = {str(timelines.header.get("strategy", "run")): timelines}
    if not timelines:
        raise InvalidParameter(f"{what} needs at least one run; there is none")
    for name, timeline in timelines.items():
        if not timeline.steps:
            raise InvalidParameter(f"{what} needs runs with steps; the run {name!r} has none")
    return dict(timelines)


def clocks(timelines: Iterable[Timeline]) -> str:
    """How the runs got their times: "measured", "simulated", or both."""
    return " and ".join(sorted({timeline.clock for timeline in timelines}))


def panel_title(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize="medium")


def headline(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize="large")


def tidy(ax: Axes) -> None:
    """A frame of two sides and a faint grid under the data."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)


def scale(ax: Axes, axis: str, values: Iterable[float | None], ratio: float = 20.0) -> None:
    """A logarithmic axis ("x" or "y") where the values span more than `ratio`, linear where not; "y" then from 0.

    Zeros among values that span so much get a place of their own before the logarithmic part.
    """
    values = np.array([v for v in values if v is not None], dtype=float)
    positive = values[values > 0]
    set_scale, ruler = (ax.set_xscale, ax.xaxis) if axis == "x" else (ax.set_yscale, ax.yaxis)
    if positive.size and positive.max() > ratio * positive.min():
        low, high = positive.min(), positive.max()
        if (values == 0).any():
            set_scale("symlog", linthresh=low, linscale=0.6)
            ax.set(**{f"{axis}lim": (-0.2 * low, 1.3 * high)})
        else:
            set_scale("log")
            # Fewer than two powers of ten are too few marks, more than four too many.
            ruler.set_major_locator(LogLocator(subs=(1,) if high >= 100 * low else (1, 3), numticks=4))
        ruler.set_minor_formatter(NullFormatter())
    elif axis == "y" and positive.size:
        ax.set_ylim(0, 1.08 * positive.max())
    ruler.set_major_formatter(lambda value, _: plain(value))  # no powers of ten: their exponents are too small to read


def tick_values(ax: Axes, values: Sequence[float] | np.ndarray, inches: float) -> None:
    """Ticks on the x axis at `values` (rising), as many as have room. inches: about the width of the axes."""
    ax.get_xlim()  # has the limits worked out
    places = ax.transData.transform([(value, 1.0) for value in values])[:, 0]
    places = places / ax.bbox.width * 72 * inches  # points
    kept = [0]
    for i in range(1, len(values)):
        letters = (len(plain(values[i])) + len(plain(values[kept[-1]]))) / 2 + 1
        if places[i] - places[kept[-1]] > 6.0 * letters:
            kept.append(i)
    ax.set_xticks([values[i] for i in kept], [plain(values[i]) for i in kept])
    ax.set_xticks([], minor=True)


def legend_below(figure: Figure, handles: Iterable[Artist]) -> None:
    """A legend under everything, in as many columns as the sheet has room for."""
    handles = list(handles)
    widths = [6.0 * len(str(handle.get_label())) + 45 for handle in handles]  # points, about
    room = 72 * figure.get_figwidth()
    columns = len(handles) if sum(widths) < room else max(1, int(room / max(widths)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)


def clipped(name: str, most: int = 18) -> str:
    """A name that is no longer than `most`, its middle cut out."""
    return name if len(name) <= most else f"{name[: (most - 1) // 2]}…{name[-(most // 2) :]}"


def plain(value: float) -> str:
    return f"{value:,.10g}"


def short(value: float | None) -> str:
    """Three digits, or all of those before the point."""
    if value is None:
        return "no sample"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def counted(number: int, what: str) -> str:
    """1, "step" → "1 step"; 1200, "step" → "1,200 steps"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def si(value: float, unit: str) -> str:
    """1.2e12, "FLOP/s" → "1.2 TFLOP/s"."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{short(value / size)} {letter}{unit}"
    return f"{short(value)} {unit}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"
