"""A limit on the time that a reader's function may take, so that an endless loop does not hang the notebook."""

from __future__ import annotations

import signal
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

_AGAIN_S = 0.001  # the alarm's period once the time is up


class TimeLimitReached(BaseException):
    """Not an Exception, so that `except Exception` in the reader's loop lets it through."""


@contextmanager
def time_limit(seconds: float) -> Iterator[Callable[..., Any]]:
    """Give `limited(function, *arguments)`, which calls a function and raises TimeLimitReached after `seconds`.

    The seconds are those of the whole body. A function that catches the exception is stopped again at its next step,
    and what it returns late does not count. Works in the main thread of a system that has interval timers (not
    Windows); elsewhere the time is looked at only when a call has ended. Out of reach: one long call into C, a function
    that switches the alarm off, and an endless `try` at the very limit of recursion, where the alarm finds no room.
    """
    deadline = time.monotonic() + seconds

    def limited(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return _call(function, arguments)
        finally:
            if time.monotonic() >= deadline:
                raise TimeLimitReached from None

    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield limited
        return

    class Stopped(TimeLimitReached):
        # Making one sets the alarm off again, after Python's last look for alarms before the exception is raised: the
        # next look is in the function's own `except:`, so no nest of them outlasts it.
        __init__ = staticmethod(partial(interrupt_main, signal.SIGALRM))

    def stop(signum: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is _call.__code__:  # anywhere else the alarm would hit the code that has to clear up
                raise Stopped
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield limited
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def _call(function: Callable[..., Any], arguments: tuple) -> Any:
    return function(*arguments)
