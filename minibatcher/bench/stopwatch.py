"""Where the time of a loop goes: wrapped functions of live objects, each second counted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any


class Stopwatch:
    """Wall time since the last lap, split among parts by name.

    Time in a wrapped function counts for its part, without that in functions wrapped within; what no part claims counts
    for `rest`. So the parts of a lap add up to it. A wrapper costs time itself, most of it in the part around.
    """

    def __init__(self, rest: str) -> None:
        self.laps: list[dict[str, float]] = []  # seconds of each part
        self._undo: list[Callable[[], None]] = []
        self._inside = [rest]
        self._sums: dict[str, float] = {}
        self._last = time.perf_counter()

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the calls of owner.name, found on this one object, for `part`."""
        function = getattr(owner, name)

        @wraps(function)
        def timed(*args, **kwargs):
            self._pass()  # as `within`, but quicker: this is what a measurement costs
            self._inside.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._pass()
                self._inside.pop()

        self.replace(owner, name, timed)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of one object until `restore`."""
        own = vars(owner)
        if name in own:
            before = own[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Everything is as it was before the first wrap."""
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Time in the block counts for `part`."""
        self._pass()
        self._inside.append(part)
        try:
            yield
        finally:
            self._pass()
            self._inside.pop()

    def move(self, part: str, seconds: float) -> None:
        """Seconds of the part at hand were another's."""
        self._pass()
        self._add(self._inside[-1], -seconds)
        self._add(part, seconds)

    def lap(self) -> None:
        """A lap has ended, and the next begins."""
        self._pass()
        self.laps.append(self._sums)
        self._sums = {}

    def _pass(self) -> None:
        now = time.perf_counter()
        self._add(self._inside[-1], now - self._last)
        self._last = now

    def _add(self, part: str, seconds: float) -> None:
        self._sums[part] = self._sums.get(part, 0.0) + seconds
