"""How much may wait, and how much each tenant may ask for: refused at the door rather than queued without bound."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .errors import InvalidParameter, QueueFull, RateLimited
from .numeric import is_number
from .request import Request

OTHERS = "*"  # in Limits.tenants: each tenant that has no limit of its own
BURST_S = 60.0  # a burst that is not named is what flows in within this time
NUM_ENTRIES = 100  # over so many entries the speed of the queue is measured
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
        return 0.0 if delay <= CLOCK_S + now * CLOCK_ROUNDING else delay

    def take(self, amount: float, now: float) -> None:
        """Take out what `delay` says is in it; a negative amount is put back, as far as `level` finds room for it."""
        self._level, self._time = self.level(now) - amount, now


@dataclass(frozen=True)
class TenantLimit:
    """What one tenant may ask for; None is without limit.

    tokens_per_s: prompt + max_tokens of its requests. burst_tokens: how much of that at once. requests_per_s,
    burst_requests: the same for their number. A burst that is None is what a minute brings. A quota is a slow rate with
    a large burst: a million tokens that come back within a day are burst_tokens=1_000_000, tokens_per_s=11.6.
    """

    tokens_per_s: float | None = None
    burst_tokens: float | None = None
    requests_per_s: float | None = None
    burst_requests: float | None = None

    def __post_init__(self) -> None:
        for what in ("tokens", "requests"):
            rate, burst = getattr(self, f"{what}_per_s"), getattr(self, f"burst_{what}")
            if rate is None:
                if burst is not None:
                    raise InvalidParameter(f"burst_{what} {burst!r} says nothing without {what}_per_s; give both")
                continue
            if not is_number(rate) or rate < 0:
                raise InvalidParameter(f"{what}_per_s must be a number of at least 0, not {rate!r}")
            if burst is None:
                burst = max(1.0, rate * BURST_S)
                object.__setattr__(self, f"burst_{what}", burst)
            if not is_number(burst) or burst < 1:
                raise InvalidParameter(f"burst_{what} must be a number of at least 1, not {burst!r}")

    def buckets(self) -> tuple[TokenBucket | None, TokenBucket | None]:
        """Full buckets for tokens and for requests; None where there is no limit."""

        def full(rate: float | None, burst: float | None) -> TokenBucket | None:
            return None if rate is None or burst is None else TokenBucket(rate, burst)

        return full(self.tokens_per_s, self.burst_tokens), full(self.requests_per_s, self.burst_requests)


@dataclass(frozen=True)
class Limits:
    """What an engine lets wait, and what each tenant may ask for; None is without limit.

    max_waiting_requests: length of the queue. max_waiting_tokens: prompt + max_tokens of all that are in it. Whatever
    arrives between two steps waits for the next one, so a queue shorter than a burst of arrivals turns some of them
    away although slots are free. tenants: a TenantLimit by name; "*" is for each tenant that is not named.
    Raises InvalidParameter.
    """

    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    tenants: Mapping[str, TenantLimit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_waiting_requests", "max_waiting_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidParameter(f"{name} must be a whole number of at least 1, not {value!r}")
        if not isinstance(self.tenants, Mapping):
            raise InvalidParameter(f"tenants must be a dict of names and TenantLimits, not {self.tenants!r}")
        for tenant, limit in self.tenants.items():
            if not isinstance(tenant, str):
                raise InvalidParameter(f"the name of a tenant must be a text, not {tenant!r}")
            if not isinstance(limit, TenantLimit):
                raise InvalidParameter(f"the limit of tenant {tenant!r} must be a TenantLimit, not {limit!r}")
        object.__setattr__(self, "tenants", dict(self.tenants))

    def of(self, tenant: str) -> TenantLimit | None:
        """What this tenant may ask for; None is without limit."""
        return self.tenants.get(tenant, self.tenants.get(OTHERS))


class Door:
    """Holds requests against Limits. Every `now` is in seconds on one clock, which started at 0.

    A request is charged prompt + max_tokens when it is let in. When it ends, what it did not use flows back: tokens
    never generated, and all of them if it was never scheduled. That it was made stays counted.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._buckets: dict[str, tuple[TokenBucket | None, TokenBucket | None]] = {}
        self._sweep_at = 1000
        self._charged: set[Request] = set()  # let in, not ended: these wait or run
        self._charged_tokens = 0  # theirs
        self._num_entered = self._tokens_entered = 0
        self._entries: deque[tuple[float, int, int]] = deque(maxlen=NUM_ENTRIES)  # time; requests, tokens gone by then

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
        waiting = self.waiting(running)
        gone = self._num_entered - waiting[0], self._tokens_entered - waiting[1]
        self._check_queue(request, waiting, gone, now)
        tokens, requests = self._tenant_buckets(request.tenant, now)
        self._check_rate(request, tokens, requests, now)
        if tokens:
            tokens.take(request.max_total_tokens, now)
        if requests:
            requests.take(1, now)
        self._charged.add(request)
        self._charged_tokens += request.max_total_tokens
        self._num_entered += 1
        self._tokens_entered += request.max_total_tokens
        self._entries.append((now, *gone))

    def waiting(self, running: Collection[Request]) -> tuple[int, int]:
        """How many wait, and prompt + max_tokens of them all: who was let in, less who runs.

        The queue may be long, and is asked at each arrival; those that run are few.
        """
        served = [r.max_total_tokens for r in running if r in self._charged]  # a static batch keeps who has ended
        return len(self._charged) - len(served), self._charged_tokens - sum(served)

    def leave(self, request: Request, now: float) -> None:
        """It has ended, or was not let in after all; one that never entered is no error."""
        if request not in self._charged:
            return
        self._charged.remove(request)
        self._charged_tokens -= request.max_total_tokens
        tokens, _ = self._tenant_buckets(request.tenant, now)
        if tokens:
            used = 0 if request.first_scheduled_time is None else request.num_tokens
            tokens.take(used - request.max_total_tokens, now)

    def clear(self, now: float) -> None:
        """Everybody has left."""
        for request in list(self._charged):
            self.leave(request, now)
        self._charged_tokens = 0  # an interrupt may have torn it

    def _check_queue(self, request: Request, waiting: tuple[int, int], gone: tuple[int, int], now: float) -> None:
        bounds = self.limits.max_waiting_requests, self.limits.max_waiting_tokens
        for i, (unit, size, bound) in enumerate(zip(("requests", "tokens"), (1, request.max_total_tokens), bounds)):
            if bound is None or waiting[i] + size <= bound:
                continue
            wait = self._time_to_move(i, waiting[i] + size - bound, gone[i], now)
            raise QueueFull(
                f"the queue has no room for request {request.request_id!r}",
                need=size,
                have=max(0, bound - waiting[i]),
                unit=unit,
                hint=f"try again {'later' if wait is None else f'in about {wait:.2g} s'}, or raise max_waiting_{unit}",
                retry_after_s=wait,
            )

    def _time_to_move(self, i: int, amount: int, gone: int, now: float) -> float | None:
        """Seconds until `amount` more have left the queue, if it goes on as it did over the last entries."""
        if not self._entries:
            return None
        since, *before = self._entries[0]
        moved = gone - before[i]
        return amount * (now - since) / moved if moved > 0 and now > since else None

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
