"""Latencies: how they are spread over requests, and how they answer to one knob."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.figure import Figure

from ..errors import InvalidParameter
from ..metrics import PERCENTILES, e2el, itl, spread, ttft
from ..numeric import is_number
from ..timeline import Timeline
from .palette import OKABE_ITO, strategy_colour
from .sheet import (
    LINES,
    NOTE,
    by_name,
    clocks,
    counted,
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

LATENCIES: dict[str, tuple[str, Callable[[Timeline], list[float | None]]]] = {
    "TTFT": ("time to first token", lambda t: [ttft(r) for r in t.requests.values()]),
    "ITL": ("inter-token latency", lambda t: [gap for r in t.requests.values() for gap in itl(r)]),
    "E2EL": ("end-to-end latency", lambda t: [e2el(r) for r in t.requests.values()]),
}
KNOBS = {
    "max_num_batched_tokens": "token budget of a step, tokens",
    "max_queue_delay_s": "maximum queue delay, s",
    "arrival_rate": "arrival rate, requests/s",
    "max_num_seqs": "slots (max_num_seqs), requests",
}
MOST_POINTS = 2000  # of a curve; more can't be told apart


def plot_latency_cdf(timelines: Timeline | Mapping[str, Timeline]) -> Figure:
    """Share of requests (TTFT, end to end) or of gaps (ITL) that took at most so many milliseconds, a curve a run.

    timelines: name → run, or one run. Raises InvalidParameter without a run or for one without steps.
    """
    runs = by_name(timelines, "a picture of latencies")
    figure = new_sheet(3.9)
    clock = clocks(runs.values())
    sentences = []
    for ax, (short_name, (name, samples_of)) in zip(figure.subplots(1, 3, sharey=True), LATENCIES.items()):
        everything, facts = [], []
        for i, (run, timeline) in enumerate(runs.items()):
            samples = _milliseconds(samples_of(timeline))
            if not samples.size:
                facts.append(f"{run} no sample")
                continue
            shares = np.arange(1, samples.size + 1) / samples.size
            kept = np.unique(np.linspace(0, samples.size - 1, MOST_POINTS).astype(int))
            # From the smallest sample upwards: a curve starts at a share of 0.
            x, y = np.r_[samples[0], samples[kept]], np.r_[0, shares[kept]]
            # Thinner from run to run, so that one curve on another leaves both to be seen.
            width = max(1.4, 3.2 - 0.6 * i)
            colour = strategy_colour(run)
            ax.step(x, y, where="post", color=colour, linestyle=LINES[i % len(LINES)], linewidth=width, label=run)
            everything += [samples[0], samples[-1]]
            facts.append(f"{run} {short(np.percentile(samples, 50))} and {short(np.percentile(samples, 99))}")
        for share in (0.5, 0.99):
            ax.axhline(share, color=NOTE, linewidth=0.6, linestyle=":")
        if not everything:
            ax.text(0.5, 0.25, "no sample", transform=ax.transAxes, ha="center", color=NOTE)
        tidy(ax)
        scale(ax, "x", everything)
        ax.set_ylim(0, 1.02)
        ax.set_xlabel(f"{short_name}, ms, {clock}")
        panel_title(ax, name.capitalize())
        sentences.append(f"{name.capitalize()}, p50 and p99 in ms: {'; '.join(facts)}")
    first = figure.axes[0]
    first.set_ylabel("share of samples")
    first.set_yticks([0, 0.25, 0.5, 0.75, 0.99], ["0", "0.25", "0.5", "0.75", "0.99"])
    headline(figure, f"Latencies of {_count(runs)}: the share that took at most so long")
    handles = {line.get_label(): line for ax in figure.axes for line in ax.lines if line.get_label() in runs}
    legend_below(figure, handles.values())
    return finish(figure, f"Cumulative distributions of latencies, {clock}. {'. '.join(sentences)}.")


def plot_latency_sweep(timelines: Mapping[float, Timeline], knob: str) -> Figure:
    """Percentiles of TTFT and ITL against a knob that was swept.

    timelines: the knob's value → the run with it. knob: a name in KNOBS, or the axis label with its unit.
    Raises InvalidParameter.
    """
    if not timelines or not all(is_number(value) for value in timelines):
        raise InvalidParameter(f"a sweep needs runs by numbers of the knob {knob!r}, not {list(timelines)!r}")
    runs = by_name({str(value): timelines[value] for value in sorted(timelines)}, "a sweep")
    values, label = np.array(sorted(timelines), dtype=float), KNOBS.get(knob, knob)
    figure = new_sheet(4.1)
    clock = clocks(runs.values())
    sentences = []
    marks = zip(PERCENTILES, ("bluish green", "blue", "vermillion"), ("o", "s", "^"), LINES)
    styles = {f"p{p}": (OKABE_ITO[colour], marker, line) for p, colour, marker, line in marks}
    for ax, short_name in zip(figure.subplots(1, 2), ("TTFT", "ITL")):
        name, samples_of = LATENCIES[short_name]
        found = [spread(samples_of(timeline)) for timeline in runs.values()]
        for p, (colour, marker, line) in styles.items():
            heights = [np.nan if s[p] is None else s[p] for s in found]
            ax.plot(values, heights, color=colour, marker=marker, linestyle=line, markersize=5, label=p)
        tidy(ax)
        scale(ax, "y", [s[p] for s in found for p in styles], ratio=50)
        scale(ax, "x", values)
        tick_values(ax, values, inches=3.9)
        ax.set_xlabel(label)
        ax.set_ylabel(f"{short_name}, ms, {clock}")
        panel_title(ax, name.capitalize())
        tails = ", ".join(f"{short(s['p99'])} at {plain(v)}" for v, s in zip(values, found))
        sentences.append(f"{name.capitalize()}, p99 in ms: {tails}")
    legend_below(figure, figure.axes[0].get_legend_handles_labels()[0])
    headline(figure, f"What the {label.rpartition(',')[0] or label} does to latency")
    return finish(figure, f"Latency percentiles, {clock}, against {label}. {'. '.join(sentences)}.")


def _milliseconds(seconds: list[float | None]) -> np.ndarray:
    return np.sort(np.array([s for s in seconds if s is not None], dtype=float)) * 1e3


def _count(runs: dict[str, Timeline]) -> str:
    most = max(len(timeline.requests) for timeline in runs.values())
    return counted(most, "request")
