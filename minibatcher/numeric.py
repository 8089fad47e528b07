"""What counts as a number in a parameter."""

from __future__ import annotations

import math


def is_number(value: object) -> bool:
    """A finite int or float; True and False are none, and neither is a whole number that no float can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
