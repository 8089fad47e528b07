"""Who owns which part of the KV pool at one moment: contiguous slices a slot, and blocks wherever one was free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from ..errors import InvalidParameter
from ..kv import BlockKV
from ..numeric import is_number
from ..timeline import RowState, Timeline
from .kv import UNUSED_HATCH, UNUSED_INK, block_size
from .palette import HATCHES, LABELS, request_colour, tint
from .sheet import (
    WIDTH,
    by_name,
    clipped,
    clocks,
    counted,
    finish,
    headline,
    legend_below,
    new_sheet,
    panel_title,
    percent,
    plain,
    short,
)

KINDS = ("used", "ended", "unused")
STRENGTHS = {"used": 0.8, "ended": 0.35, "unused": 0.15}  # of the owner's colour
MARKS = {"ended": HATCHES[RowState.FINISHED], "unused": UNUSED_HATCH}
NAMES = {"used": "in use", "ended": LABELS[RowState.FINISHED], "unused": "reserved, unused"}
OUTSIDE = "#e8e8e8"
MOST_ROWS = 24  # of a drawn pool
OVERFULL = "the requests of this record need more blocks than its pool has: it can't be drawn"


class Piece(NamedTuple):
    """Tokens `start` to `stop` of the pool, all of one owner and one kind: "used", "ended" or "unused"."""

    start: int
    stop: int
    owner: str
    kind: str


def plot_memory_map(timelines: Timeline | Mapping[str, Timeline], *, time: float | None = None) -> Figure:
    """The KV pools of runs as maps, a panel a run, equal areas for equal numbers of tokens.

    A run whose header says kv_layout "slots" owns a slice a slot; any other owns blocks, placed by the package's own
    BlockKV, which is led through the record (`tables_at`): the real blocks, but where requests were preempted or the
    timeline is a slice; there which blocks may differ, not how many.
    time: seconds since the first arrival; None is when the last of the runs given holds most tokens.
    Raises InvalidParameter.
    """
    runs = by_name(timelines, "a memory map")
    if time is None:
        last = list(runs.values())[-1]
        fullest = max(last.steps, key=lambda step: step.kv_tokens)
        time = fullest.start - last.span[0]
    if not is_number(time) or time < 0:
        raise InvalidParameter(f"time must be a number of seconds of at least 0, not {time!r}")
    maps = {name: pieces_at(timeline, _position(timeline, time)) for name, timeline in runs.items()}
    pools = {name: pool_tokens(timeline) for name, timeline in runs.items()}
    wide = row_tokens(runs, max(pools.values()))
    rows = {name: -(-pool // wide) for name, pool in pools.items()}
    columns = min(2, len(runs))
    lines = -(-len(runs) // columns)
    figure = new_sheet(1.1 + lines * (0.9 + 0.16 * max(8, max(rows.values()))))
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for ax in axes[len(runs) :]:
        ax.set_axis_off()
    sentences = [
        _draw_panel(ax, name, timeline, maps[name], wide, max(rows.values()), points=72 * (WIDTH / columns - 0.7))
        for ax, (name, timeline) in zip(axes, runs.items())
    ]
    keys = [_key(kind) for kind in KINDS if any(piece.kind == kind for pieces in maps.values() for piece in pieces)]
    keys.append(Patch(facecolor="white", edgecolor="#bbbbbb", label="free"))
    if min(pools.values()) < wide * max(rows.values()):
        keys.append(Patch(facecolor=OUTSIDE, label="no part of the pool"))
    legend_below(figure, keys)
    when = f"{short(time)} s after the first arrival, {clocks(runs.values())}"
    headline(figure, f"Who owns the KV pool {when}; colours tell requests apart")
    return finish(figure, f"Memory map of the KV pool {when}. {'. '.join(sentences)}.")


def pieces_at(timeline: Timeline, position: int) -> list[Piece]:
    """Who owns what while `steps[position]` runs. Raises InvalidParameter."""
    check_tables(timeline)
    size, step = block_size(timeline), timeline.steps[position]
    tables = tables_at(timeline, position)
    pieces = []
    for row in step.rows:
        kind = "ended" if row.state is RowState.FINISHED else "used"
        for i, block in enumerate(tables.get(row.request_id, ())):
            begin = block * size
            full = begin + min(size, max(0, row.context - i * size))
            pieces += [Piece(begin, full, row.request_id, kind), Piece(full, begin + size, row.request_id, "unused")]
    return [piece for piece in pieces if piece.start < piece.stop]


def check_tables(timeline: Timeline) -> None:
    """Raises InvalidParameter where a record does not tell who owns which block."""
    if timeline.header.get("enable_prefix_caching"):
        raise InvalidParameter(
            "a memory map can't be drawn of a run with prefix caching: its record does not say who shares which block; "
            "plot_kv_occupancy shows how much is used and kept"
        )


def tables_at(timeline: Timeline, position: int) -> dict[str, list[int]]:
    """Request → its blocks while `steps[position]` runs, as a BlockKV hands them out that is led through the record;
    where each slot has a slice, that slice.

    A record tells how many blocks are in use, and each request's tokens, but no table. Prompts get their blocks whole
    when they are let in, as this package's schedulers do it; where that does not give the recorded number of blocks,
    only as they are computed. Raises InvalidParameter where a record overfills its own pool.
    """
    lazy = None
    for whole_prompts in (True, False):
        tables = next(islice(replay(timeline, whole_prompts), position, None), None)
        if tables is not None and sum(map(len, tables.values())) == timeline.steps[position].kv_used_blocks:
            return tables
        lazy = tables
    if lazy is None:
        raise InvalidParameter(OVERFULL)
    return lazy


def all_tables(timeline: Timeline) -> tuple[Iterator[dict[str, list[int]]], int]:
    """The tables of each step in turn, all by one of the two rules of `tables_at`, and how many steps record another
    number of blocks than that rule gives. Raises InvalidParameter.
    """
    check_tables(timeline)
    wrong = {}
    for whole_prompts in (True, False):
        used = [sum(map(len, tables.values())) for tables in replay(timeline, whole_prompts)]
        if len(used) == len(timeline.steps):
            wrong[whole_prompts] = sum(n != step.kv_used_blocks for n, step in zip(used, timeline.steps))
    if not wrong:
        raise InvalidParameter(OVERFULL)
    best = min(wrong, key=wrong.__getitem__)
    return replay(timeline, best), wrong[best]


def replay(timeline: Timeline, whole_prompts: bool) -> Iterator[dict[str, list[int]]]:
    """Request → its blocks, step by step; it ends early where a request finds no block in the pool."""
    first = timeline.steps[0]
    slots = timeline.header.get("kv_layout") == "slots"
    kv = BlockKV(first.num_blocks, block_size(timeline))
    holding: list[str] = []
    for step in timeline.steps:
        if slots:
            yield {row.request_id: [row.slot] for row in step.rows}
            continue
        staying = {row.request_id for row in step.rows}
        for name in holding:
            if name not in staying:
                kv.free(name)
        for row in step.rows:
            tokens = row.context
            if whole_prompts and row.state is RowState.PREFILL:
                record = timeline.requests[row.request_id]
                tokens = max(tokens, record.num_prompt_tokens + sum(t <= step.start for t in record.token_times))
            if not kv.allocate(row.request_id, tokens):
                return
        holding = [row.request_id for row in step.rows]
        yield {name: list(kv.table(name)) for name in holding}


def _position(timeline: Timeline, time: float) -> int:
    """The last step begun by then."""
    starts = np.array([step.start for step in timeline.steps]) - timeline.span[0]
    return max(0, int(np.searchsorted(starts, time + 1e-9)) - 1)


def pool_tokens(timeline: Timeline) -> int:
    first = timeline.steps[0]
    return block_size(timeline) * first.num_blocks


def row_tokens(runs: Mapping[str, Timeline], pool: int) -> int:
    """Tokens in a drawn row: whole slices where there are any, else whole blocks, in a readable number of rows."""
    sizes = {t.header.get("kv_layout") == "slots": block_size(t) for t in runs.values()}
    unit, most = (sizes[True], MOST_ROWS) if True in sizes else (sizes[False], 16)
    return unit * -(-pool // (most * unit))


def _draw_panel(
    ax: Axes, name: str, timeline: Timeline, pieces: list[Piece], wide: int, rows: int, points: float
) -> str:
    """One run's pool, in an area of `rows` rows of `wide` tokens; returns what is seen, as a sentence."""
    size, pool = block_size(timeline), pool_tokens(timeline)
    slots = timeline.header.get("kv_layout") == "slots"
    shares = {k: percent(sum(p.stop - p.start for p in pieces if p.kind == k) / pool) for k in KINDS}
    owners = counted(len({piece.owner for piece in pieces}), "request")
    what = "contiguous slices" if slots else f"blocks of {plain(size)} tokens"
    _draw_pool(ax, pieces, pool, wide, size)
    _name_owners(ax, pieces, wide, points)
    ax.set(xlim=(0, wide), ylim=(rows, 0), facecolor=OUTSIDE, xlabel="tokens")
    whose = f"slot, {plain(size)} tokens each" if slots and size == wide else f"pool, rows of {plain(wide)} tokens"
    ax.set_ylabel(whose)
    ax.xaxis.set_major_formatter(lambda value, _: plain(value))
    ax.locator_params(axis="x", nbins=5, integer=True)
    numbers = range(0, rows, max(1, rows // 6))
    ax.set_yticks([number + 0.5 for number in numbers], [str(number) for number in numbers])
    panel_title(ax, f"{clipped(name, 24)}, {what}\n{owners}, {shares['unused']} reserved but unused")
    ended = any(piece.kind == "ended" for piece in pieces)
    return (
        f"{name} ({what}) holds {owners}: {shares['used']} of a pool of {plain(pool)} tokens used, {shares['unused']} "
        f"reserved but unused{', ' + shares['ended'] + ' held for requests that have ended' if ended else ''}"
    )


def _draw_pool(ax: Axes, pieces: list[Piece], pool: int, wide: int, size: int) -> None:
    _draw(ax, [Piece(0, pool, "", "free")], wide, "white", None, edge="#cccccc", gap=0.0)
    for kind in KINDS:
        chosen = [piece for piece in pieces if piece.kind == kind]
        colours = [tint(request_colour(piece.owner), STRENGTHS[kind]) for piece in chosen]
        edge = "white" if kind == "used" and wide <= 64 * size else "none"  # blocks that are wide enough stand apart
        _draw(ax, chosen, wide, colours, MARKS.get(kind), edge)


def _name_owners(ax: Axes, pieces: list[Piece], wide: int, points: float) -> None:
    """Write the owner into pieces with room for it. points: about the width of a drawn row."""
    for piece in pieces:
        row, left = divmod(piece.start, wide)
        inside = min(piece.stop, (row + 1) * wide) - piece.start
        if piece.kind != "unused" and inside / wide * points > 5.0 * len(piece.owner) + 3:
            middle = left + inside / 2
            ax.text(middle, row + 0.5, piece.owner, ha="center", va="center", fontsize=7.5, clip_on=True)


def _draw(ax: Axes, pieces: list[Piece], wide: int, colours, hatch: str | None, edge: str, gap: float = 0.06) -> None:
    """Pieces as boxes, broken where a drawn row ends. gap: above and below, in rows."""
    boxes, fill = [], []
    for i, piece in enumerate(pieces):
        start = piece.start
        while start < piece.stop:
            row = start // wide
            stop = min(piece.stop, (row + 1) * wide)
            left, right = start - row * wide, stop - row * wide
            low, high = row + gap, row + 1 - gap
            boxes.append([(left, low), (right, low), (right, high), (left, high)])
            fill.append(colours if isinstance(colours, str) else colours[i])
            start = stop
    ax.add_collection(PolyCollection(boxes, facecolors=fill, edgecolors=edge, linewidths=0.5), autolim=False)
    if hatch and boxes:
        path = Path.make_compound_path(*(Path([*box, box[0]], closed=True) for box in boxes))
        ax.add_patch(PathPatch(path, facecolor="none", edgecolor=UNUSED_INK, linewidth=0, hatch=hatch))


def _key(kind: str) -> Patch:
    face = tint("#0072B2", STRENGTHS[kind])
    return Patch(facecolor=face, edgecolor=UNUSED_INK, linewidth=0.5, hatch=MARKS.get(kind), label=NAMES[kind])
