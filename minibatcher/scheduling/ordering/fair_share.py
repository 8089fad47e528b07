"""Fair share: every tenant that waits gets the same service, however many requests it sends.

Source: Sheng et al., «Fairness in Serving Large Language Models», OSDI 2024, section 4.1, algorithm 2 (virtual token
counter); the fair counter of newcomers as in Demers et al., «Analysis and Simulation of a Fair Queueing Algorithm»,
SIGCOMM 1989.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from ...request import Request
from .base import Ordering

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # what a token counts, as in the paper's experiments


class FairShare(Ordering):
    """Each tenant has a counter of the service that it has had; the lowest is served next, its oldest request first.

    A tenant that comes (back) with nothing in the queue is lifted to the counters of those that wait: it has no claim
    on the time when it asked for nothing. How far, between their lowest and their highest, says `fair_counter`, which
    goes up by an equal share of all service: 60 units in a step in which 3 tenants are active lift it by 20. Were it
    always the lowest, as in the paper, ever new tenants would keep an old one out for ever.
    counters: tenant → weighted tokens. A prompt is charged when its request is let in for the first time, an answer
    token by token.
    """

    name = "fair-share"

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.fair_counter = 0.0
        self._uncounted = 0.0  # service that has not moved the fair counter yet
        self._queues: dict[str, deque[Request]] = {}  # of tenants that wait, and of nobody else

    def add(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._queues:
            self._lift(tenant)
            self._queues[tenant] = deque()
        self._queues[tenant].append(request)

    def _lift(self, tenant: str) -> None:
        waiting = [self.counters[other] for other in self._queues] or [self.fair_counter]
        floor = min(max(self.fair_counter, min(waiting)), max(waiting))
        self.counters[tenant] = max(self.counters.get(tenant, 0.0), floor)

    def put_back(self, request: Request) -> None:
        self._queues.setdefault(request.tenant, deque()).appendleft(request)
        if request.num_preemptions == 0:  # let in for a step, and pushed out of its plan: not for the first time then
            self._charge(request.tenant, -PROMPT_WEIGHT * request.num_prompt_tokens)

    def remove(self, request: Request) -> None:
        queue = self._queues[request.tenant]
        queue.remove(request)
        if not queue:
            del self._queues[request.tenant]

    @property
    def head(self) -> Request:
        if not self._queues:
            raise IndexError("nobody waits")
        return self._queues[min(self._queues, key=self._standing)][0]

    def _standing(self, tenant: str) -> tuple[float, float]:
        return self.counters[tenant], self._queues[tenant][0].arrival_time

    def take(self, request: Request) -> None:
        super().take(request)
        if request.num_preemptions == 0:
            self._charge(request.tenant, PROMPT_WEIGHT * request.num_prompt_tokens)

    def served(self, requests: Collection[Request]) -> None:
        for request in requests:
            self._charge(request.tenant, OUTPUT_WEIGHT)
        active = self._queues.keys() | {request.tenant for request in requests}
        if active:
            self.fair_counter += self._uncounted / len(active)
            self._uncounted = 0.0

    def _charge(self, tenant: str, cost: float) -> None:
        self.counters[tenant] += cost
        self._uncounted += cost

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        for tenant in sorted(self._queues, key=self._standing):
            yield from self._queues[tenant]

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and request in self._queues.get(request.tenant, ())
