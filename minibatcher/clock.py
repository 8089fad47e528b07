"""Two clocks for one engine: the wall's, and a virtual one that only moves when a simulated step says so."""

from __future__ import annotations

import time
from threading import Event


class WallClock:
    """Seconds since `reset`, as they pass."""

    kind = "measured"

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def advance(self, seconds: float | None) -> None:
        """Wall time advances by itself."""

    def sleep_until(self, moment: float, woken: Event | None = None) -> None:
        """Until `moment`, or until `woken` is set."""
        seconds = max(0.0, moment - self.now())
        if woken is None:
            time.sleep(seconds)
        else:
            woken.wait(seconds)


class VirtualClock:
    """Seconds that steps claim to have taken; waiting costs nothing."""

    kind = "simulated"

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float | None) -> None:
        self._now += seconds or 0.0

    def sleep_until(self, moment: float, woken: Event | None = None) -> None:
        """At once."""
        self._now = max(self._now, moment)
