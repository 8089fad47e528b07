"""Ctrl-C between two steps, not inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupts:
    """While `held`, an interrupt is only noted in `asked`; a second one, or one during `open`, raises at once."""

    def __init__(self) -> None:
        self.asked = False
        self._open = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Python delivers signals to the main thread alone, so anywhere else there is nothing to hold."""
        self.asked = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Here an interrupt may raise: nothing is half done."""
        self._open = True
        try:
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._open = False

    def _note(self, *_) -> None:
        if self._open or self.asked:
            raise KeyboardInterrupt
        self.asked = True
