"""What every figure of the book must have: labels with units, a title, alternative text, the palette, readable text.

Sizes are checked at 100 % and at 80 % zoom, at which many readers look at a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

import numpy as np
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from .palette import OKABE_ITO

ZOOMS = (1.0, 0.8)
SMALLEST = 6.0  # points, at 80 %
SHORTEST_ALT = 40  # characters
# An axis label holds one of these. Counted things are units too: «slot», «requests».
UNITS = {
    *("s", "ms", "µs", "min", "h", "%", "share", "times", "bytes", "byte", "KiB", "MiB", "GiB", "GB", "W", "J"),
    *("token", "tokens", "tokens/s", "request", "requests", "requests/s", "sequences", "slot", "slots", "step"),
    *("steps", "rows", "blocks", "FLOPs", "FLOP/s", "GFLOP/s", "TFLOP/s", "B/s", "GB/s", "TB/s"),
}
_PALETTE = np.array([to_rgb(colour) for colour in OKABE_ITO.values()])


def check_figure(figure: Figure) -> list[str]:
    """A sentence for each thing that is wrong; empty where nothing is."""
    found = [*_words(figure), *_labels(figure), *_colours(figure)]
    canvas, dpi = figure.canvas, figure.dpi
    try:
        for zoom in ZOOMS:
            figure.set_dpi(zoom * dpi)
            renderer = FigureCanvasAgg(figure).get_renderer()
            figure.draw(renderer)
            found += [f"at {100 * zoom:.0f} % zoom {problem}" for problem in _texts(figure, renderer)]
    finally:
        figure.set_dpi(dpi)
        figure.set_canvas(canvas)
    return list(dict.fromkeys(found))


def _words(figure: Figure) -> Iterator[str]:
    alt = getattr(figure, "alt", None) or ""
    if len(alt) < SHORTEST_ALT or not re.search(r"\d", alt):
        yield (
            f"figure.alt must tell what is seen in at least {SHORTEST_ALT} characters and name a number, not {alt!r}"
        )
    titles = [ax.get_title(loc) for ax in figure.axes for loc in ("left", "center", "right")]
    headlines = [part.get_suptitle() for part in (figure, *_subfigures(figure))]
    if not any(titles) and not any(headlines):
        yield "the figure has no title"


def _labels(figure: Figure) -> Iterator[str]:
    for number, ax in enumerate(figure.axes):
        if not (ax.get_visible() and ax.axison):
            continue
        for name, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
            ticks = [tick.label1.get_text() for tick in _shown_ticks(axis)]
            if not any(any(ch.isdigit() for ch in text) and _is_number(text) for text in ticks):
                continue  # names, or nothing: no quantity
            label = axis.get_label_text()
            if not label:
                yield f"the {name} axis of picture {number} has no label"
            elif not set(re.split(r"[^\w/%µ]+", label)) & UNITS:
                yield f"the {name} axis of picture {number} names no unit: {label!r}"


def _colours(figure: Figure) -> Iterator[str]:
    for number, ax in enumerate(figure.axes):
        colours = {tuple(np.round(colour[:3], 3)) for artist in _data(ax) for colour in artist}
        for colour in sorted(colours):
            if not in_palette(colour):
                text = "#" + "".join(f"{round(255 * c):02X}" for c in colour)
                yield f"picture {number} has the colour {text}, which is no tint of the palette and no grey"


def in_palette(colour: tuple[float, float, float]) -> bool:
    """Whether red, green, blue (0 to 1) are a grey, or a colour of the palette mixed with white."""
    rgb = np.asarray(colour[:3], dtype=float)
    if np.ptp(rgb) < 0.02:
        return True
    inks = 1 - _PALETTE  # what each takes away from white; a tint takes away a share of that
    shares = np.clip(inks @ (1 - rgb) / (inks**2).sum(axis=1), 0, 1)
    return bool((np.abs(shares[:, None] * inks - (1 - rgb)).max(axis=1) < 0.012).any())


def _data(ax) -> Iterator[list]:
    """The visible colours of each artist that stands for data."""
    for line in ax.lines:
        drawn = [line.get_color()] if line.get_linestyle() not in ("None", "", " ") else []
        if line.get_marker() not in ("None", None, "", " "):
            drawn += [line.get_markerfacecolor(), line.get_markeredgecolor()]
        yield [to_rgb(colour) for colour in drawn if not _is_none(colour)]
    for patch in ax.patches:
        yield [rgba for rgba in (patch.get_facecolor(), patch.get_edgecolor()) if rgba[3] > 0]
    for collection in ax.collections:
        yield [rgba for rgba in (*collection.get_facecolor(), *collection.get_edgecolor()) if rgba[3] > 0]
    for image in ax.images:
        rgba = image.to_rgba(image.get_array()).reshape(-1, 4)
        yield list(np.unique(rgba[rgba[:, 3] > 0], axis=0))
    for text in ax.texts:
        yield [to_rgb(text.get_color())]


def _texts(figure: Figure, renderer) -> Iterator[str]:
    """What is wrong with the texts of a figure that has just been drawn."""
    names, boxes, slacks = [], [], []
    for text in _shown_texts(figure):
        box = text.get_window_extent(renderer)
        words = " ".join(text.get_text().split())
        if _points(text) * ZOOMS[-1] < SMALLEST - 1e-6:
            yield f"{words!r} has {_points(text):.3g} points, of which {SMALLEST:g} must be left at 80 %"
        frame = (text.get_clip_on() and text.get_clip_box()) or figure.bbox
        if box.x0 < frame.x0 - 1 or box.y0 < frame.y0 - 1 or box.x1 > frame.x1 + 1 or box.y1 > frame.y1 + 1:
            yield f"{words!r} is clipped"
        names.append(words)
        boxes.append(box.extents)
        slacks.append(0.15 * _points(text) * figure.dpi / 72)  # a line's own spacing holds no ink
    left, bottom, right, top = np.array(boxes).reshape(-1, 4).T
    common_width = np.minimum.outer(right, right) - np.maximum.outer(left, left)
    common_height = np.minimum.outer(top, top) - np.maximum.outer(bottom, bottom)
    slack = np.minimum.outer(slacks, slacks)
    for i, j in np.argwhere(np.triu((common_width > slack) & (common_height > slack), 1)):
        yield f"{names[i]!r} and {names[j]!r} overlap"


def _shown_texts(figure: Figure) -> Iterator[Text]:
    axes = [ax for ax in figure.axes if ax.get_visible()]
    # Tick labels come from their axes: those outside the view exist, but are not drawn.
    ticks = {id(text) for ax in axes for axis in (ax.xaxis, ax.yaxis) for text in _all_tick_texts(axis)}
    shown = [tick.label1 for ax in axes if ax.axison for axis in (ax.xaxis, ax.yaxis) for tick in _shown_ticks(axis)]
    others = [text for text in figure.findobj(Text) if id(text) not in ticks]
    for text in chain(shown, others):
        if text.get_visible() and text.get_text().strip() and (text.axes is None or text.axes.get_visible()):
            yield text


def _all_tick_texts(axis: Axis) -> Iterator[Text]:
    for tick in (*axis.majorTicks, *axis.minorTicks):
        yield from (tick.label1, tick.label2)


def _shown_ticks(axis: Axis) -> list:
    on_paper = axis.get_transform().transform  # where a logarithmic axis is even
    low, high = sorted(on_paper(axis.get_view_interval()))
    slack = 1e-6 * (high - low)
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    axis.get_majorticklabels()  # brings their texts up to date
    axis.get_minorticklabels()
    places = on_paper(np.array([tick.get_loc() for tick in ticks], dtype=float))
    return [
        tick for tick, place in zip(ticks, places) if low - slack <= place <= high + slack and tick.label1.get_visible()
    ]


def _points(text: Text) -> float:
    """Size of its smallest letters: raised and lowered ones of a formula have 70 %."""
    formula = text.get_text().count("$") > 1 and any(sign in text.get_text() for sign in "^_")
    return float(text.get_fontsize()) * (0.7 if formula else 1.0)


def _subfigures(figure) -> Iterator:
    for part in figure.subfigs:
        yield part
        yield from _subfigures(part)


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"[−-]?[\d.,]+%?|\$.*\$", text.strip()))


def _is_none(colour) -> bool:
    return isinstance(colour, str) and colour.lower() == "none"
