"""Priority classes: the more urgent first, with ageing and with preemption of those less urgent."""

from __future__ import annotations

from collections.abc import Sequence

from ...request import Request
from .base import Ranked


class PriorityClasses(Ranked):
    """`priority` 0 is the most urgent class (request.PRIORITY_CLASSES). Each class further down is as far back as if
    the request had arrived `ageing_s` seconds later.

    So a request of class k can only be overtaken by what arrives within k x ageing_s seconds of it: however many urgent
    ones keep coming, its turn comes. A waiting request takes the place of running ones of a lower class that rank
    behind it: otherwise it would wait for a slot or memory that a less urgent one holds (priority inversion).
    """

    name = "priority"

    def __init__(self, ageing_s: float) -> None:
        super().__init__()
        self.ageing_s = ageing_s

    def rank(self, request: Request) -> float:
        return request.arrival_time + request.priority * self.ageing_s

    def in_order(self, running: Sequence[Request]) -> Sequence[Request]:
        return sorted(running, key=self.rank)  # stable: those of one rank in order of admission

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority and self.rank(waiting) < self.rank(running)
