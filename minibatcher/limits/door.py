"""Where requests are let in or refused: what waits, and what has been used, is kept up with as they come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from ..errors import QueueFull, RateLimited
from ..request import Request
from .bounds import Limits, TenantLimit
from .bucket import TokenBucket

NUM_ENTRIES = 100  # over so many entries the speed of a queue is measured


class Queue:
    """How many wait: those that were let in and have not ended, less those that run. name: as a sentence has it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.charged: set[Request] = set()  # let in, not ended: these wait or run
        self.tokens = 0  # their prompt + max_tokens
        self._entered = (0, 0)  # requests, tokens so far
        self._entries: deque[tuple[float, int, int]] = deque(maxlen=NUM_ENTRIES)  # time; requests, tokens gone by then

    def waiting(self, running: Collection[Request]) -> tuple[int, int]:
        """How many wait, and prompt + max_tokens of them all.

        The queue may be long, and is asked at each arrival; those that run are few.
        """
        served = [r.max_total_tokens for r in running if r in self.charged]  # a static batch keeps who has ended
        return len(self.charged) - len(served), self.tokens - sum(served)

    def check(
        self,
        requests: Sequence[Request],
        running: Collection[Request],
        now: float,
        max_waiting_requests: int | None,
        max_waiting_tokens: int | None = None,
    ) -> None:
        """Raise QueueFull if these bounds leave no room for all of them."""
        sizes, bounds = _size(requests), (max_waiting_requests, max_waiting_tokens)
        waiting = self.waiting(running)
        for i, (unit, size, bound) in enumerate(zip(("requests", "tokens"), sizes, bounds)):
            if bound is None or waiting[i] + size <= bound:
                continue
            wait = self._time_to_move(i, waiting[i] + size - bound, waiting[i], now)
            when = "later" if wait is None else f"in about {wait:.2g} s"
            raise QueueFull(
                f"{self.name} has no room for {_named(requests)}",
                need=size,
                have=max(0, bound - waiting[i]),
                unit=unit,
                hint=f"try again {when}, or raise max_waiting_{unit}",
                retry_after_s=wait,
            )

    def _time_to_move(self, i: int, amount: int, waiting: int, now: float) -> float | None:
        """Seconds until `amount` more have left the queue, if it goes on as it did over the last entries."""
        if not self._entries:
            return None
        since, *before = self._entries[0]
        moved = self._entered[i] - waiting - before[i]
        return amount * (now - since) / moved if moved > 0 and now > since else None

    def add(self, request: Request, running: Collection[Request], now: float) -> None:
        """One more waits."""
        (requests, tokens), waiting = self._entered, self.waiting(running)
        self._entries.append((now, requests - waiting[0], tokens - waiting[1]))
        self.charged.add(request)
        self.tokens += request.max_total_tokens
        self._entered = requests + 1, tokens + request.max_total_tokens

    def remove(self, request: Request) -> None:
        self.charged.remove(request)
        self.tokens -= request.max_total_tokens


class Door:
    """Holds requests against Limits. Every `now` is in seconds on one clock, which started at 0.

    A request is charged prompt + max_tokens when it is let in. When it ends, what it did not use flows back: tokens
    never generated, and all of them if it was never scheduled. That it was made stays counted.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._buckets: dict[str, tuple[TokenBucket | None, TokenBucket | None]] = {}
        self._sweep_at = 1000
        self.queue = Queue("the queue")
        self.queues: dict[str, Queue] = {}  # of each tenant with a bound of its own that has somebody here

    def check(self, requests: Sequence[Request]) -> None:
        """Raise QueueFull or RateLimited, for good, if they could never be let in together.

        All are of one tenant.
        """
        limits, limit, sizes = self.limits, self.limits.of(requests[0].tenant), _size(requests)
        cures = "send fewer together", "lower max_tokens, shorten the prompt"
        for unit, need, bound, cure in zip(("requests", "tokens"), sizes, _queue_bounds(limits, limit), cures):
            if bound is not None and need > bound:
                raise QueueFull(
                    f"{_named(requests)} alone {_is(requests)} larger than the queue",
                    need=need,
                    have=bound,
                    unit=unit,
                    hint=f"{cure} or raise max_waiting_{unit}",
                    for_good=True,
                )
        bursts = (limit.burst_requests, limit.burst_tokens) if limit else (None, None)
        for unit, need, burst, cure in zip(("requests", "tokens"), sizes, bursts, cures):
            if burst is not None and need > burst:
                raise RateLimited(
                    f"{_named(requests)} {_is(requests)} larger than the burst that tenant {requests[0].tenant!r} "
                    "may ask for",
                    need=need,
                    have=int(burst),
                    unit=unit,
                    hint=f"{cure} or raise burst_{unit}",
                    for_good=True,
                )

    def enter(self, requests: Sequence[Request], running: Collection[Request], now: float) -> None:
        """Charge requests of one tenant that are about to wait; `running` don't.

        Raises QueueFull or RateLimited unless all of them may come in, and then nothing changes.
        """
        limits, tenant = self.limits, requests[0].tenant
        limit = limits.of(tenant)
        bound = limit.max_waiting_requests if limit else None
        if tenant in self.queues:
            self.queues[tenant].check(requests, running, now, bound)
        self.queue.check(requests, running, now, limits.max_waiting_requests, limits.max_waiting_tokens)
        buckets = self._tenant_buckets(tenant, now)
        self._check_rate(requests, buckets, now)
        for bucket, amount in zip(buckets, reversed(_size(requests))):
            if bucket:
                bucket.take(amount, now)
        for request in requests:
            self.queue.add(request, running, now)
            if bound is not None:
                own = self.queues.setdefault(tenant, Queue(f"the queue of tenant {tenant!r}"))
                own.add(request, running, now)

    def leave(self, request: Request, now: float) -> None:
        """It has ended, or was not let in after all; one that never entered is no error."""
        if request not in self.queue.charged:
            return
        self.queue.remove(request)
        own = self.queues.get(request.tenant)
        if own is not None:
            own.remove(request)
            if not own.charged:
                del self.queues[request.tenant]
        tokens, _ = self._tenant_buckets(request.tenant, now)
        if tokens:
            used = 0 if request.first_scheduled_time is None else request.num_tokens
            tokens.take(used - request.max_total_tokens, now)

    def clear(self, now: float) -> None:
        """Everybody has left. An interrupt may have torn what was kept."""
        self.queues.clear()
        for request in list(self.queue.charged):
            self.leave(request, now)
        self.queue.tokens = 0

    def _check_rate(
        self, requests: Sequence[Request], buckets: tuple[TokenBucket | None, TokenBucket | None], now: float
    ) -> None:
        asked = tuple(zip(reversed(buckets), _size(requests), ("requests", "tokens")))
        delays = [bucket.delay(amount, now) for bucket, amount, _ in asked if bucket]
        known = [delay for delay in delays if delay is not None]
        wait = max(known, default=0.0) if len(known) == len(delays) else None
        for bucket, amount, unit in asked:
            if bucket and bucket.delay(amount, now) != 0:
                raise RateLimited(
                    f"tenant {requests[0].tenant!r} has asked for as much as it may for now",
                    need=amount,
                    have=max(0, int(bucket.level(now))),
                    unit=unit,
                    hint="its limit lets nothing more in" if wait is None else f"try again in {wait:.3g} s",
                    retry_after_s=wait,
                    for_good=wait is None,
                )

    def _tenant_buckets(self, tenant: str, now: float) -> tuple[TokenBucket | None, TokenBucket | None]:
        if tenant not in self._buckets:
            limit = self.limits.of(tenant)
            if limit is None:
                return None, None
            if len(self._buckets) >= self._sweep_at:
                self._forget_full_ones(now)
            self._buckets[tenant] = limit.buckets()
        return self._buckets[tenant]

    def _forget_full_ones(self, now: float) -> None:
        """A full bucket is as good as a new one, so tenants that were here once cost no memory for ever."""
        for tenant, buckets in list(self._buckets.items()):
            if all(bucket is None or bucket.level(now) >= bucket.burst for bucket in buckets):
                del self._buckets[tenant]
        self._sweep_at = max(1000, 2 * len(self._buckets))


def _size(requests: Sequence[Request]) -> tuple[int, int]:
    """How many, and their prompt + max_tokens."""
    return len(requests), sum([request.max_total_tokens for request in requests])


def _named(requests: Sequence[Request]) -> str:
    first = f"request {requests[0].request_id!r}"
    return first if len(requests) == 1 else f"{first} and {len(requests) - 1:,} that come with it"


def _is(requests: Sequence[Request]) -> str:
    return "is" if len(requests) == 1 else "are"


def _queue_bounds(limits: Limits, limit: TenantLimit | None) -> tuple[int | None, int | None]:
    """The most requests and tokens of one tenant that may wait."""
    own = limit.max_waiting_requests if limit else None
    bounds = [bound for bound in (limits.max_waiting_requests, own) if bound is not None]
    return min(bounds, default=None), limits.max_waiting_tokens
