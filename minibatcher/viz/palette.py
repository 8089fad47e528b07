"""One palette for figures and widgets: colour says which request, hatch or letter says what its slot was doing."""

from __future__ import annotations

import zlib

from ..timeline import RowState

# Okabe and Ito, «Color Universal Design», 2008: told apart with any kind of colour vision. Black is kept for text.
OKABE_ITO = {
    "orange": "#E69F00",
    "sky blue": "#56B4E9",
    "bluish green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "reddish purple": "#CC79A7",
}
REQUEST_COLOURS = tuple(OKABE_ITO.values())
STRATEGY_COLOURS = {
    "solo": "#999999",
    "static": OKABE_ITO["vermillion"],
    "dynamic": OKABE_ITO["orange"],
    "continuous": OKABE_ITO["blue"],
    "chunked": OKABE_ITO["bluish green"],
}

IDLE = "idle"
PADDING = "padding"
LETTERS = {
    RowState.PREFILL: "P",
    RowState.DECODE: "d",
    RowState.STALLED: "s",
    RowState.FINISHED: "x",
    PADDING: "p",
    IDLE: ".",
}
LABELS = {
    RowState.PREFILL: "prefill",
    RowState.DECODE: "decode",
    RowState.STALLED: "stalled",
    RowState.FINISHED: "ended but still in the batch",
    PADDING: "padding",
    IDLE: "idle",
}
HATCHES = {RowState.PREFILL: "....", RowState.STALLED: "---", RowState.FINISHED: "////", PADDING: "xxxx"}


def request_colour(request_id: str) -> str:
    """The same colour for the same id in every picture; neighbours in a numbered series differ."""
    digits = request_id[len(request_id.rstrip("0123456789")) :]
    number = int(digits[-18:]) if digits.isdecimal() else zlib.crc32(request_id.encode())
    return REQUEST_COLOURS[number % len(REQUEST_COLOURS)]


def strategy_colour(name: str) -> str:
    return STRATEGY_COLOURS.get(name, REQUEST_COLOURS[zlib.crc32(name.encode()) % len(REQUEST_COLOURS)])


def tint(colour: str, share: float) -> tuple[float, float, float]:
    """`colour` (#RRGGBB) mixed with white: share 1 is the colour itself, 0 is white. Red, green, blue from 0 to 1."""
    red, green, blue = (1 - share * (1 - int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return red, green, blue
