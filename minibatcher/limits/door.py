"""Where requests are let in or refused: what waits, and what has been used, is kept up with as they come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from ..errors import QueueFull, RateLimited
from ..request import Request
from .bounds import Limits
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
        request: Request,
        running: Collection[Request],
        now: float,
        max_waiting_requests: int | None,
        max_waiting_tokens: int | None = None,
    ) -> None:
        """Raise QueueFull if these bounds leave no room for one more."""
        sizes, bounds = (1, request.max_total_tokens), (max_waiting_requests, max_waiting_tokens)
        waiting = self.waiting(running)
        for i, (unit, size, bound) in enumerate(zip(("requests", "tokens"), sizes, bounds)):
            if bound is None or waiting[i] + size <= bound:
                continue
            wait = self._time_to_move(i, waiting[i] + size - bound, waiting[i], now)
            when = "later" if wait is None else f"in about {wait:.2g} s"
            raise QueueFull(
                f"{self.name} has no room for request {request.request_id!r}",
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

    def check(self, request: Request) -> None:
        """Raise QueueFull or RateLimited, with retry_after_s None, if it could never be let in."""
        bound, need = self.limits.max_waiting_tokens, request.max_total_tokens
        if bound is not None and need > bound:
            raise QueueFull(
                f"request {request.request_id!r} alone is larger than the queue",
                need=need,
                have=bound,
                unit="tokens",
                hint="lower max_tokens, shorten the prompt or raise max_waiting_tokens",
            )
        limit = self.limits.of(request.tenant)
        if limit is not None and limit.burst_tokens is not None and need > limit.burst_tokens:
            raise RateLimited(
                f"request {request.request_id!r} is larger than the burst that tenant {request.tenant!r} may ask for",
                need=need,
                have=int(limit.burst_tokens),
                unit="tokens",
                hint="lower max_tokens, shorten the prompt or raise burst_tokens",
            )

    def enter(self, request: Request, running: Collection[Request], now: float) -> None:
        """Charge a request that is about to wait; `running` don't. Raises QueueFull or RateLimited; nothing changes."""
        limits, tenant = self.limits, request.tenant
        limit = limits.of(tenant)
        bound = limit.max_waiting_requests if limit else None
        if tenant in self.queues:
            self.queues[tenant].check(request, running, now, bound)
        self.queue.check(request, running, now, limits.max_waiting_requests, limits.max_waiting_tokens)
        tokens, requests = self._tenant_buckets(tenant, now)
        self._check_rate(request, tokens, requests, now)
        if tokens:
            tokens.take(request.max_total_tokens, now)
        if requests:
            requests.take(1, now)
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
        self, request: Request, tokens: TokenBucket | None, requests: TokenBucket | None, now: float
    ) -> None:
        asked = ((requests, 1, "requests"), (tokens, request.max_total_tokens, "tokens"))
        delays = [bucket.delay(amount, now) for bucket, amount, _ in asked if bucket]
        known = [delay for delay in delays if delay is not None]
        wait = max(known, default=0.0) if len(known) == len(delays) else None
        for bucket, amount, unit in asked:
            if bucket and bucket.delay(amount, now) != 0:
                raise RateLimited(
                    f"tenant {request.tenant!r} has asked for as much as it may for now",
                    need=amount,
                    have=max(0, int(bucket.level(now))),
                    unit=unit,
                    hint="its limit lets nothing more in" if wait is None else f"try again in {wait:.3g} s",
                    retry_after_s=wait,
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
