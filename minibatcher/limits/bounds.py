"""What an engine lets wait, and what each tenant may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import InvalidParameter
from ..numeric import is_number
from .bucket import TokenBucket

OTHERS = "*"  # in Limits.tenants: each tenant that has no limit of its own
BURST_S = 60.0  # a burst that is not named is what flows in within this time


@dataclass(frozen=True)
class TenantLimit:
    """What one tenant may ask for; None is without limit.

    tokens_per_s: prompt + max_tokens of its requests. burst_tokens: how much of that at once. requests_per_s,
    burst_requests: the same for their number. A burst that is None is what a minute brings. A quota is a slow rate with
    a large burst: a million tokens that come back within a day are burst_tokens=1_000_000, tokens_per_s=11.6.
    max_waiting_requests: how many of its requests may wait, so that its flood does not fill the queue of all.
    """

    tokens_per_s: float | None = None
    burst_tokens: float | None = None
    requests_per_s: float | None = None
    burst_requests: float | None = None
    max_waiting_requests: int | None = None

    def __post_init__(self) -> None:
        _check_count("max_waiting_requests", self.max_waiting_requests)
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
            _check_count(name, getattr(self, name))
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


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidParameter(f"{name} must be a whole number of at least 1, not {value!r}")
