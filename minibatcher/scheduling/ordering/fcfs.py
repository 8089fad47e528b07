"""First come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ...request import Request
from .base import Ordering


class FirstComeFirstServed(Ordering):
    """In order of arrival. Who is preempted was let in last, so it goes back to the head."""

    name = "fcfs"

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def put_back(self, request: Request) -> None:
        self._queue.appendleft(request)

    def remove(self, request: Request) -> None:
        self._queue.remove(request)  # searches from the head, where it nearly always stands

    @property
    def head(self) -> Request:
        return self._queue[0]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def __contains__(self, request: object) -> bool:
        return request in self._queue
