"""A rate with a burst, as a bucket that fills while nobody looks."""

from __future__ import annotations

import math

CLOCK_S, CLOCK_ROUNDING = 1e-9, 1e-15  # how finely a clock tells the time: seconds, and share of the time told


class TokenBucket:
    """Holds up to `burst` units, is full at time 0, and `rate_per_s` units flow in each second.

    Source: Turner, «New directions in communications (or which way to the information age?)», IEEE Communications
    Magazine 1986 (the leaky bucket as a meter). `now` is in seconds and never goes back.
    """

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self.rate_per_s, self.burst = rate_per_s, burst
        self._level, self._time = float(burst), 0.0

    def level(self, now: float) -> float:
        """Units that are in it."""
        return min(self.burst, self._level + (now - self._time) * self.rate_per_s)

    def delay(self, amount: float, now: float) -> float | None:
        """Seconds until `amount` units are in it, 0 if they are; None if they never will be.

        What comes in within the least time that a clock can tell counts as there already: who comes back after exactly
        so long must not fail on a rounding error.
        """
        missing = amount - self.level(now)
        if missing <= 0:
            return 0.0
        if amount > self.burst or not self.rate_per_s:
            return None
        delay = missing / self.rate_per_s
        if delay == math.inf:  # the rate is so small that it is none
            return None
        return 0.0 if delay <= CLOCK_S + now * CLOCK_ROUNDING else delay

    def take(self, amount: float, now: float) -> None:
        """Take out what `delay` says is in it; a negative amount is put back, as far as `level` finds room for it."""
        self._level, self._time = self.level(now) - amount, now
