"""What counts as a number in a parameter."""

from __future__ import annotations

import math


def is_number(value: object) -> bool:
    """A finite int or float; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
