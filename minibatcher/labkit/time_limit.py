"""A limit on the time that a reader's function may take, so that an endless loop does not hang the notebook."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TimeLimitReached(BaseException):
    """Not an Exception, so that `except Exception` in the reader's loop lets it through."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitReached in the body after `seconds`.

    Works in the main thread of a system that has interval timers (not Windows); elsewhere there is no limit.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise TimeLimitReached

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
