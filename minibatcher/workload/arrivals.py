"""When requests arrive, and the random streams that all synthetic workloads draw from."""

from __future__ import annotations

import math
from zlib import crc32

import numpy as np

from ..errors import WorkloadError

ARRIVALS = ("poisson", "gamma", "all-at-once")
LONGEST_S = 366 * 86_400.0  # a year: later arrivals are a mistake, most often of units


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream called `name` of this seed, independent of all other names."""
    if type(seed) is not int or seed < 0:
        raise WorkloadError(f"seed must be a whole number, 0 or more, not {seed!r}.")
    return np.random.default_rng([seed, crc32(name.encode())])


def arrival_times(
    num_requests: int, request_rate: float, arrivals: str = "poisson", *, cv: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Arrival times in seconds, float64 [num_requests], the first at 0.

    `request_rate` is the mean number of requests per second; `inf` means all at once. Gaps are exponential for
    `poisson`; for `gamma` they are gamma-distributed with the given coefficient of variation: above 1 bursty, below 1
    more even than Poisson.
    """
    check_count(num_requests)
    check_rate(request_rate)
    if arrivals not in ARRIVALS:
        raise WorkloadError(f"Unknown arrivals {arrivals!r}; known: {', '.join(ARRIVALS)}.")
    if arrivals == "all-at-once" or math.isinf(request_rate):
        return np.zeros(num_requests)
    check_cv(arrival_cv=cv)
    shape = 1.0 if arrivals == "poisson" else cv**-2
    gaps = stream(seed, "arrivals").gamma(shape, 1 / (shape * request_rate), num_requests)
    return from_gaps(gaps)


def from_gaps(gaps: np.ndarray) -> np.ndarray:
    """Arrival times, the first at 0, from the gaps that follow each arrival; the last gap is unused."""
    times = np.cumsum(gaps)
    return np.concatenate([[0.0], times[:-1]])


def check_count(num_requests: int) -> None:
    """Raise `WorkloadError` unless `num_requests` is a whole number of at least one."""
    if type(num_requests) is not int or num_requests < 1:
        raise WorkloadError(f"The number of requests must be a whole number, 1 or more, not {num_requests!r}.")


def check_rate(requests_per_s: float) -> None:
    """Raise `WorkloadError` unless the rate is above 0 (infinity: all at once) and at least one request a year."""
    if not isinstance(requests_per_s, int | float) or not requests_per_s > 0:
        raise WorkloadError(
            f"The request rate must be a number of requests per second above 0, or inf for all at once, "
            f"not {requests_per_s!r}."
        )
    if requests_per_s * LONGEST_S < 1:
        raise WorkloadError(
            f"The request rate is in requests per second; {requests_per_s:.3g} would be less than one request a year."
        )


def check_positive(at_least: float = 0.0, at_most: float = math.inf, **values: float) -> None:
    """Raise `WorkloadError` unless all are finite, above 0 and within bounds; the keywords name them in the message."""
    for name, value in values.items():
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise WorkloadError(f"{name} must be a finite number above 0, not {value!r}.")
        if not at_least <= value <= at_most:
            raise WorkloadError(f"{name} must lie between {at_least:,} and {at_most:,}, not at {value!r}.")


def check_cv(**values: float) -> None:
    """Raise `WorkloadError` unless all can be coefficients of variation; beyond these bounds draws lose all meaning."""
    check_positive(0.001, 1_000, **values)
