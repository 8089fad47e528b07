"""The highest request rate that a server sustains within latency objectives, by bisection.

A rate is sustained if the same requests, arriving at it, are served well enough: at least the wanted share of *all* of
them is within its objectives (of each class, where classes have their own; refused and failed ones are not), and the
queue does not grow: those who arrive in the last third of a run do not find half as many again waiting as those of the
middle third, unless that is below a twentieth of all requests. The second rule stops a rate that only looks good since
the run is too short for delays to add up; a server that falls behind by more than about 6 % of what arrives breaks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from .errors import InvalidParameter
from .metrics import goodput, summarize
from .numeric import is_number
from .timeline import Timeline

GROWTH, LEAST_SHARE = 1.5, 0.05  # of the queue from the middle to the last third; of all requests
NOISE = 0.02  # of the share of good requests, by which a higher rate may do better than a lower one
SHORT_RUN = 4  # a run whose arrivals last fewer times as long as a request hardly leaves its beginning

FOUND, BELOW, ABOVE, INTERRUPTED = "found", "below the lowest", "above the highest", "interrupted"


@dataclass(frozen=True)
class Probe:
    """One run at one request rate.

    ttft_ms, tpot_ms: spreads as in metrics. waiting: in the middle, in the end. failed_by: what was not sustained, as
    "queue grew", "paid 98.1 %" or "all requests 97.2 %"; empty where it was.
    """

    request_rate: float
    sustained: bool
    good_share: float
    shares_by_class: dict[str, float]
    queue_grows: bool
    waiting: tuple[float, float]
    output_tokens_per_s: float | None
    ttft_ms: dict[str, Any]
    tpot_ms: dict[str, Any]
    failed_by: tuple[str, ...] = ()

    def sentence(self) -> str:
        """The outcome in words."""
        told = f"failed by: {', '.join(self.failed_by)}" if self.failed_by else "sustained"
        return f"{self.request_rate:.3g} requests/s: {share_text(self.good_share)} within the objectives, {told}"


def share_text(share: float) -> str:
    """In per cent, rounded down: what falls short of 99 % must not read as 99.0 %."""
    return f"{math.floor(1e3 * share + 1e-9) / 10:.1f} %"


@dataclass(frozen=True)
class Capacity:
    """What a search has found.

    outcome: "found"; "below the lowest" or "above the highest" rate that was to be tried, and then request_rate is
    None or that highest one; or "interrupted". request_rate: the highest that was seen to be sustained. failed_rate:
    the lowest that was seen not to be. probes: in the order made. warnings: sentences. clock, header: of the last run.
    """

    outcome: str
    request_rate: float | None
    failed_rate: float | None
    probes: list[Probe]
    share: float
    low: float
    high: float
    warnings: list[str] = field(default_factory=list)
    clock: str = "measured"
    header: dict[str, Any] = field(default_factory=dict)

    def sentence(self) -> str:
        """The finding in words."""
        worst = next((probe for probe in self.probes if probe.request_rate == self.failed_rate), None)
        why = f" ({', '.join(worst.failed_by)})" if worst and worst.failed_by else ""
        if self.outcome == BELOW:
            return f"not even the lowest rate, {self.low:.3g} requests/s, was sustained{why}"
        if self.outcome == ABOVE:
            return f"even the highest rate, {self.high:.3g} requests/s, was sustained: the limit lies above it"
        best = "none" if self.request_rate is None else f"{self.request_rate:.3g} requests/s"
        lowest = "none" if self.failed_rate is None else f"{self.failed_rate:.3g} requests/s"
        told = "interrupted; " if self.outcome == INTERRUPTED else ""
        return f"{told}of the rates tried, {best} was the highest sustained, {lowest} the lowest that failed{why}"


def find_capacity(
    serve: Callable[[float], Timeline],
    objectives: Mapping[str, float] | None = None,
    *,
    class_objectives: Mapping[str, Mapping[str, float]] | None = None,
    share: float = 0.99,
    low: float,
    high: float,
    start: float | None = None,
    tolerance: float = 0.05,
    max_probes: int = 12,
    on_probe: Callable[[Probe], None] | None = None,
) -> Capacity:
    """Bisect between `low` and `high` requests per second, until the two ends lie within `tolerance` of each other.

    serve: serves the same requests at a given rate, from the start, and returns the timeline. objectives and
    class_objectives: as metrics.goodput takes them. start: the rate to try first, best near the limit; None is `high`.
    Middles are geometric; the highest rate comes next if the first one held, and the lowest only when its double has
    failed, since runs at low rates take long. on_probe: called after each. An interrupt ends the search and keeps what
    was found. Raises InvalidParameter.
    """
    _check(share, low, high, start, tolerance, max_probes)
    best = worst = best_run = timeline = None
    probes: list[Probe] = []
    rate: float | None = high if start is None else start
    outcome = FOUND
    try:
        while rate is not None and len(probes) < max_probes:
            run = serve(rate)
            if run.header.get("interrupted"):
                raise KeyboardInterrupt
            probe, timeline = _judge(rate, run, objectives or {}, class_objectives, share), run
            probes.append(probe)
            if probe.sustained:
                best, best_run = rate, run
            else:
                worst = rate
            rate = _next_rate(low, high, best, worst, tolerance)
            if on_probe is not None:
                on_probe(probe)
    except KeyboardInterrupt:
        outcome = INTERRUPTED
    if outcome == FOUND:
        outcome = ABOVE if best == high else BELOW if worst == low else FOUND
    warnings = []
    if timeline is not None:
        patience = None if outcome == ABOVE else _patience(timeline, objectives or {}, class_objectives or {})
        warnings = _warnings(len(timeline.requests), share, best_run) + ([patience] if patience else [])
        warnings += _unsteady(probes, timeline.clock, bool(patience))
    if outcome == FOUND and rate is not None:
        warnings.append(f"the search ended after {len(probes)} probes, before its ends met")
    clock, header = (timeline.clock, timeline.header) if timeline else ("measured", {})
    return Capacity(outcome, best, worst, probes, share, low, high, warnings, clock, header)


def _next_rate(low: float, high: float, best: float | None, worst: float | None, tolerance: float) -> float | None:
    """The rate to try when `best` is the highest that held and `worst` the lowest that failed; None: that was all."""
    if best == high or worst == low:
        return None
    if worst is None:
        return high
    if best is None and worst <= 2 * low:  # time to know whether any rate holds
        return low
    bottom = low if best is None else best
    return math.sqrt(bottom * worst) if worst / bottom > 1 + tolerance else None


def queue_growth(timeline: Timeline) -> tuple[float, float]:
    """How many requests were waiting when another arrived: mean over the middle and over the last third of arrivals.

    Who was let in (or ended without) at the moment of an arrival is not waiting any more; the newcomer does not count.
    """
    requests = sorted(timeline.requests.values(), key=lambda r: r.arrival_time)
    never = math.inf
    arrivals = np.array([r.arrival_time for r in requests])
    starts = [r.first_scheduled_time if r.first_scheduled_time is not None else r.finish_time for r in requests]
    started = np.searchsorted(np.sort([never if start is None else start for start in starts]), arrivals, "right")
    found = np.maximum(np.arange(len(arrivals)) - started, 0)
    third = max(1, len(arrivals) // 3)
    return float(found[-2 * third : -third].mean() if len(found) > third else 0.0), float(found[-third:].mean())


def _judge(
    rate: float,
    timeline: Timeline,
    objectives: Mapping[str, float],
    class_objectives: Mapping[str, Mapping[str, float]] | None,
    share: float,
) -> Probe:
    good = goodput(timeline, **objectives, classes=class_objectives)
    by_class = {name: g["good_share"] for name, g in good["classes"].items() if g["good_share"] is not None}
    middle, end = queue_growth(timeline)
    grows = end > max(GROWTH * middle, LEAST_SHARE * len(timeline.requests))
    wanted = (by_class if class_objectives else {}) | {"all requests": good["good_share"]}
    failed_by = ["queue grew"] * grows + [f"{name} {share_text(one)}" for name, one in wanted.items() if one < share]
    summary = summarize(timeline)
    return Probe(
        rate,
        not failed_by,
        good["good_share"],
        by_class,
        grows,
        (middle, end),
        summary["output_tokens_per_s"],
        summary["ttft_ms"],
        summary["tpot_ms"],
        tuple(failed_by),
    )


def _warnings(num_requests: int, share: float, best_run: Timeline | None) -> list[str]:
    """What makes the finding doubtful, in sentences."""
    found = []
    needed = math.ceil(1 / (1 - share) - 1e-9) if share < 1 else 0
    if num_requests < needed:
        found.append(
            f"{num_requests:,} requests are few for a share of {100 * share:g} %, since one late request decides; take "
            f"at least {needed:,} (--num-requests)"
        )
    if best_run is not None:
        requests = best_run.requests.values()
        span = max(r.arrival_time for r in requests) - min(r.arrival_time for r in requests)
        lasting = float(np.mean([r.finish_time - r.arrival_time for r in requests if r.finish_time is not None]))
        if span < SHORT_RUN * lasting:
            found.append(
                f"at the highest rate sustained all requests arrive within {span:.3g} s, and one takes {lasting:.3g} s "
                "on average: such a run is hardly more than its beginning; take more requests (--num-requests)"
            )
    return found


def _patience(
    timeline: Timeline, objectives: Mapping[str, float], class_objectives: Mapping[str, Mapping[str, float]]
) -> str | None:
    """A sentence if a batch that is not full waits for company as long as a request may wait for its first token."""
    header = timeline.header
    name = {"static": "batch_timeout_s", "dynamic": "max_queue_delay_s"}.get(header.get("strategy", ""))
    limits = [limits["ttft_ms"] for limits in (objectives, *class_objectives.values()) if "ttft_ms" in limits]
    if name is None or not limits or 1e3 * header.get(name, 0.0) < min(limits):
        return None
    return (
        f"a batch that is not full waits {header[name]:g} s for company, and the TTFT objective is {min(limits):g} ms: "
        f"at low rates the wait alone breaks it; lower --{name.replace('_', '-')}"
    )


def _unsteady(probes: list[Probe], clock: str, explained: bool) -> list[str]:
    """A sentence if a higher rate did clearly better than a lower one. explained: by what another warning says."""
    ordered = sorted(probes, key=lambda probe: probe.request_rate)
    for slower, faster in pairwise(ordered):
        if faster.good_share > slower.good_share + NOISE:
            told = (
                f"{share_text(slower.good_share)} were within the objectives at {slower.request_rate:.3g} requests/s "
                f"and {share_text(faster.good_share)} at {faster.request_rate:.3g}: "
            )
            if explained:
                return [f"{told}with more traffic a batch fills sooner"]
            machine = " or a quieter machine" if clock == "measured" else ""
            return [
                f"{told}where more traffic does better, chance decides; take more requests (--num-requests){machine}"
            ]
    return []


def _check(share: float, low: float, high: float, start: float | None, tolerance: float, max_probes: int) -> None:
    if not is_number(share) or not 0 < share <= 1:
        raise InvalidParameter(f"share must be above 0 and at most 1, not {share!r}")
    if not (is_number(low) and is_number(high)) or not 0 < low < high:
        raise InvalidParameter(f"request rates must go from a number above 0 to a higher one, not {low!r} to {high!r}")
    if start is not None and (not is_number(start) or not low <= start <= high):
        raise InvalidParameter(f"start must be a request rate from {low!r} to {high!r}, not {start!r}")
    if not is_number(tolerance) or tolerance <= 0:
        raise InvalidParameter(f"tolerance must be a number above 0, not {tolerance!r}")
    if type(max_probes) is not int or max_probes < 2:
        raise InvalidParameter(f"max_probes must be a whole number of at least 2, not {max_probes!r}")
