"""Tokens per second: against batch size, and from strategy to strategy with the spread of repeated runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np
from matplotlib.figure import Figure

from ..errors import InvalidParameter
from ..metrics import summarize
from ..numeric import is_number
from ..timeline import CLOCKS, Timeline
from .palette import OKABE_ITO, strategy_colour, tint
from .sheet import (
    by_name,
    clipped,
    clocks,
    finish,
    headline,
    legend_below,
    new_sheet,
    panel_title,
    plain,
    scale,
    short,
    tick_values,
    tidy,
)

MEASURES: dict[str, tuple[str, Callable[[dict], float | None]]] = {
    "Output tokens per second": ("tokens/s", lambda s: s["output_tokens_per_s"]),
    "Time to first token, p99": ("ms", lambda s: s["ttft_ms"]["p99"]),
    "Inter-token latency, p99": ("ms", lambda s: s["itl_ms"]["p99"]),
}


def plot_batch_throughput(
    points: Mapping[int, float | Timeline], *, ridge: float | None = None, clock: str | None = None
) -> Figure:
    """Output tokens per second against batch size, beside the line that perfect scaling would follow.

    points: batch size → tokens/s, or → a run of it. ridge: batch size above which the machine is compute-bound
    (`claims.intensity.phase_bounds` finds it). clock: "measured" or "simulated", wanted where plain numbers are given.
    Raises InvalidParameter.
    """
    if not points:
        raise InvalidParameter("tokens/s against batch size needs at least one point; there is none")
    runs = {batch: value for batch, value in points.items() if isinstance(value, Timeline)}
    if runs:
        by_name({str(batch): run for batch, run in runs.items()}, "tokens/s against batch size")
    if len(runs) < len(points) and clock not in CLOCKS:
        raise InvalidParameter(f"say whether these tokens/s are measured or simulated: clock is {clock!r}")
    seen = {t.clock for t in runs.values()} | ({clock} if clock and len(runs) < len(points) else set())
    told = " and ".join(sorted(seen))
    speeds = {
        batch: summarize(value)["output_tokens_per_s"] if isinstance(value, Timeline) else value
        for batch, value in points.items()
    }
    for batch, speed in speeds.items():
        if not (is_number(batch) and batch > 0 and is_number(speed) and speed > 0):
            raise InvalidParameter(f"batch size and tokens/s must be numbers above 0, not {batch!r} and {speed!r}")
    if ridge is not None and not (is_number(ridge) and ridge > 0):
        raise InvalidParameter(f"ridge must be a batch size above 0, not {ridge!r}")
    x = np.array(sorted(speeds), dtype=float)
    y = np.array([speeds[batch] for batch in sorted(speeds)])

    figure = new_sheet(4.4)
    ax = figure.add_subplot()
    if len(x) > 1:
        ax.plot(x, y[0] * x / x[0], color="#999999", linestyle="--", label="proportional to batch size")
    ax.plot(x, y, color=OKABE_ITO["blue"], marker="o", label=told)
    if ridge is not None:
        ax.axvline(ridge, color=OKABE_ITO["vermillion"], linestyle=":", label=f"ridge: batch size {short(ridge)}")
    tidy(ax)
    ax.set_xscale("log", base=2)
    scale(ax, "y", [*y, y[0] * x[-1] / x[0]], ratio=8)
    tick_values(ax, x, inches=7.5)
    ax.set_xlabel("batch size, sequences in a step")
    ax.set_ylabel(f"output rate, tokens/s, {told}")
    gain = f"{short(y[-1] / y[0])} times the tokens/s at {short(x[-1] / x[0])} times the batch size"
    panel_title(ax, gain if len(x) > 1 else f"{short(y[0])} tokens/s at batch size {plain(x[0])}")
    headline(figure, "What a larger batch brings")
    legend_below(figure, ax.get_legend_handles_labels()[0])
    pairs = ", ".join(f"{short(speed)} at {plain(batch)}" for batch, speed in zip(x, y))
    mark = f" The ridge of the roofline is at batch size {short(ridge)}." if ridge is not None else ""
    return finish(figure, f"Output tokens per second, {told}, by batch size: {pairs}.{mark}")


def plot_strategy_spread(repeats: Mapping[str, Sequence[Timeline]]) -> Figure:
    """Strategies side by side over several runs each: bars are medians, whiskers least and most, dots the runs.

    repeats: name → its runs. Raises InvalidParameter.
    """
    if not repeats or not all(len(runs) for runs in repeats.values()):
        raise InvalidParameter("a comparison with spread needs at least one run of each strategy")
    for name, runs in repeats.items():
        by_name({f"{name}, run {i}": run for i, run in enumerate(runs, 1)}, "a comparison with spread")
    summaries = {name: [summarize(run) for run in runs] for name, runs in repeats.items()}
    clock = clocks(run for runs in repeats.values() for run in runs)
    figure = new_sheet(1.9 + 0.36 * len(repeats))
    axes = figure.subplots(1, len(MEASURES), sharey=True)
    sentences = []
    for ax, (title, (unit, pick)) in zip(axes, MEASURES.items()):
        facts, top = [], 0.0
        for place, (name, found) in enumerate(summaries.items()):
            values = [value for value in map(pick, found) if value is not None]
            if not values:
                facts.append(f"{name} no sample")
                continue
            low, middle, high = min(values), median(values), max(values)
            colour = strategy_colour(name)
            ax.barh(place, middle, color=tint(colour, 0.6), height=0.7)
            if len(values) > 1:
                ax.plot([low, high], [place, place], color="black", linewidth=1.2, marker="|", markersize=9)
                ax.scatter(values, np.full(len(values), place), s=9, color="black", zorder=3)
            facts.append(f"{name} {short(middle)}" + (f" ({short(low)} to {short(high)})" if len(values) > 1 else ""))
            top = max(top, high)
        for place, found in enumerate(summaries.values()):
            values = [value for value in map(pick, found) if value is not None]
            right, told = (max(values), short(median(values))) if values else (0.0, short(None))
            ax.text(right + 0.03 * (top or 1), place, told, va="center", fontsize="small")
        ax.set_xlim(0, 1.25 * (top or 1))
        tidy(ax)
        ax.grid(visible=False, axis="y")
        ax.locator_params(axis="x", nbins=4)
        ax.xaxis.set_major_formatter(lambda value, _: plain(value))
        ax.set_xlabel(f"{unit}, {clock}")
        panel_title(ax, title)
        sentences.append(f"{title} in {unit}: {'; '.join(facts)}")
    axes[0].set_yticks(range(len(summaries)), [clipped(name) for name in summaries])
    axes[0].invert_yaxis()
    counts = sorted({len(runs) for runs in repeats.values()})
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if counts == [1]:
        headline(figure, "One run of each strategy: nothing is known about the spread")
        return finish(figure, f"One run of each strategy, {clock}. {'. '.join(sentences)}.")
    headline(figure, f"Bars: median of {each} runs of each strategy; whiskers: least and most")
    return finish(figure, f"Median, least and most of {each} runs of each strategy, {clock}. {'. '.join(sentences)}.")
