"""KV memory over a run: reserved, really filled, kept for its prefixes, free."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..errors import InvalidParameter
from ..metrics import ratio
from ..timeline import RowState, Timeline
from .palette import OKABE_ITO, tint
from .sheet import by_name, clocks, finish, headline, legend_below, new_sheet, panel_title, percent, plain

FILLED, RESERVED, FREE = OKABE_ITO["blue"], tint(OKABE_ITO["blue"], 0.2), "#e8e8e8"
CACHED = tint(OKABE_ITO["orange"], 0.55)
UNUSED_HATCH, UNUSED_INK = "\\\\\\\\", "#8a8a8a"


def plot_kv_occupancy(timelines: Timeline | Mapping[str, Timeline]) -> Figure:
    """The KV pool over time, a panel a run: tokens really in it, room reserved for nothing yet, prefixes that are kept
    though nobody uses them, and free room.

    timelines: name → run, or one run; each header names its block_size. Raises InvalidParameter.
    """
    runs = by_name(timelines, "a picture of KV memory")
    figure = new_sheet(1.4 + 1.7 * len(runs))
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    sentences, any_cached = [], False
    for ax, (name, timeline) in zip(axes, runs.items()):
        times, filled, reserved, cached, pool = occupancy(timeline)
        ax.fill_between(times, 0, pool, step="post", color=FREE, linewidth=0)
        ax.fill_between(
            times, filled, reserved, step="post", facecolor=RESERVED, edgecolor=UNUSED_INK, linewidth=0,
            hatch=UNUSED_HATCH,
        )  # fmt: skip
        ax.fill_between(times, 0, filled, step="post", color=FILLED, linewidth=0)
        ax.fill_between(times, reserved, reserved + cached, step="post", color=CACHED, linewidth=0)
        any_cached |= bool(cached.any())
        spans = np.diff(times)
        held = float(filled[:-1] @ spans)
        room = float(reserved[:-1] @ spans)
        total = float(pool * spans.sum()) or 1.0
        facts = f"{percent(room / total)} reserved, {percent(held / total)} filled"
        useful = f"{percent(ratio(held, room))} of what was reserved held a token"
        panel_title(ax, f"{name}: on average {facts}; {useful}")
        ax.set_ylim(0, pool)
        ax.yaxis.set_major_formatter(lambda value, _: plain(value))
        ax.set_ylabel("KV pool, tokens")
        ax.spines[["top", "right"]].set_visible(False)
        peak = percent(reserved.max() / pool)
        kept = percent(float(cached[:-1] @ spans) / total)
        kept = f", {kept} kept for its prefixes" if cached.any() else ""
        sentences.append(
            f"{name}: a pool of {plain(pool)} tokens, on average {facts}{kept}, {peak} reserved at the peak"
        )
    longest = max(timeline.duration for timeline in runs.values())
    axes[-1].set_xlim(0, longest or 1.0)
    axes[-1].set_xlabel(f"time since the first arrival, s, {clocks(runs.values())}")
    keys = [
        Patch(facecolor=FILLED, label="tokens in it"),
        Patch(facecolor=RESERVED, edgecolor=UNUSED_INK, linewidth=0.5, hatch=UNUSED_HATCH, label="reserved, unused"),
        *([Patch(facecolor=CACHED, label="prefixes kept, nobody's")] if any_cached else []),
        Patch(facecolor=FREE, label="free"),
    ]
    legend_below(figure, keys)
    headline(figure, "KV memory over the run")
    return finish(figure, f"KV memory over time, {clocks(runs.values())}. {'; '.join(sentences)}.")


def occupancy(timeline: Timeline) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Times in seconds since the first arrival, from each of which the pool holds so many tokens, reserves room for so
    many, and keeps so many that nobody uses; and the size of the pool in tokens. Nobody holds anything while all slots
    are empty. Raises InvalidParameter.
    """
    size = block_size(timeline)
    origin = timeline.span[0]
    changes: list[tuple[float, int, int, int]] = [(0.0, 0, 0, 0)]
    for step, following in zip(timeline.steps, [*timeline.steps[1:], None]):
        cached = step.kv_cached_blocks * size
        changes.append((step.start - origin, step.kv_tokens, step.kv_used_blocks * size, cached))
        staying = {row.request_id for row in step.rows if row.state is not RowState.FINISHED} - {*step.finished}
        if following is None or (not staying and following.start > step.end):
            kept = max(step.kv_cached_blocks, following.kv_cached_blocks if following else 0)  # at least
            changes.append((step.end - origin, 0, 0, kept * size))
    times, filled, reserved, cached = np.array(changes, dtype=float).T
    first = timeline.steps[0]
    return times, filled, reserved, cached, size * first.num_blocks


def block_size(timeline: Timeline) -> int:
    """Raises InvalidParameter where the record lacks it."""
    size = timeline.header.get("block_size")
    pool = timeline.steps[0].num_blocks
    if type(size) is not int or size < 1 or pool < 1:
        raise InvalidParameter(
            f"a picture of KV memory needs a run with a pool: its header says block_size {size!r}, its first step "
            f"counts {pool} blocks"
        )
    return size
