"""The ordering contract: the queue of those that wait, in order of service."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence

from ...request import Request


class Ordering(ABC):
    """Who is served next. Holds the waiting requests; iterates over them in order of service.

    Nobody may starve: whatever arrives later, a request's turn must come.
    """

    name: str

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new request."""

    @abstractmethod
    def put_back(self, request: Request) -> None:
        """One that was let in and has to wait again: it takes its old place."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """It is no longer wanted."""

    def take(self, request: Request) -> None:
        """It is let in."""
        self.remove(request)

    @property
    @abstractmethod
    def head(self) -> Request:
        """Who is next. Raises IndexError if nobody waits."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...

    @abstractmethod
    def __contains__(self, request: object) -> bool: ...

    def in_order(self, running: Sequence[Request]) -> Sequence[Request]:
        """Running requests in order of service (given: of admission). The last is the first to make room."""
        return running

    def outranks(self, waiting: Request, running: Request) -> bool:
        """May the one take the place of the other?"""
        return False

    def served(self, requests: Collection[Request]) -> None:  # noqa: B027 - most keep no account
        """A step has brought each of these a token."""


class Ranked(Ordering):
    """An ordering by a number that a request gets once and keeps: the lowest first, ties in order of arrival.

    Since ranks never change, a heap will do. Ageing needs no change either: if waiting counts for all alike, one second
    more for everybody leaves the order as it is.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._places: dict[Request, int] = {}  # of all that wait: breaks ties
        self._count = itertools.count()

    @abstractmethod
    def rank(self, request: Request) -> float: ...

    def add(self, request: Request) -> None:
        self._push(request, next(self._count))

    def put_back(self, request: Request) -> None:
        self._push(request, -next(self._count))  # before those of the same rank: the last in order is preempted first

    def _push(self, request: Request, place: int) -> None:
        self._places[request] = place
        heapq.heappush(self._heap, (self.rank(request), place, request))

    def remove(self, request: Request) -> None:
        del self._places[request]  # the heap forgets it when it comes up

    @property
    def head(self) -> Request:
        while self._places.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._places, key=lambda r: (self.rank(r), self._places[r])))

    def __contains__(self, request: object) -> bool:
        return request in self._places
