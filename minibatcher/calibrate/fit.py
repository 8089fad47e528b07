"""Fitting the few efficiency factors of a cost model on a part of a measured run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..runners.roofline import CostModel, Efficiency
from .replay import replay
from .runs import MeasuredRun, MeasuredStep


@dataclass(frozen=True)
class Prior:
    """What is known of a factor before any measurement: its limits, a typical value, and a spread of its logarithm.

    Where the data cannot tell two factors apart (a step's fixed seconds from the streaming of weights, say), the prior
    decides, and both stay plausible.
    """

    low: float
    high: float
    typical: float
    spread: float


PRIORS = {
    "bandwidth": Prior(0.2, 1.0, 0.85, 0.15),
    "compute": Prior(0.05, 1.0, 0.7, 0.4),
    "attention_bandwidth": Prior(0.02, 1.0, 0.75, 0.25),
    "attention_compute": Prior(0.005, 1.0, 0.35, 0.8),
    "step_s": Prior(1e-5, 0.1, 1.5e-3, 0.7),
    "request_s": Prior(1e-7, 1e-2, 1e-5, 1.0),
    "token_s": Prior(1e-9, 1e-3, 1e-7, 1.5),
    "attention_call_s": Prior(1e-7, 1e-3, 1e-6, 1.0),
}
# PyTorch on a CPU: a call costs tens of microseconds whatever it computes, products are small, and keys and values are
# gathered and repeated for each group of heads before they are used.
CPU_PRIORS = PRIORS | {
    "compute": Prior(0.05, 1.0, 0.7, 0.4),
    "attention_bandwidth": Prior(0.02, 1.0, 0.25, 0.3),
    "attention_compute": Prior(0.005, 1.0, 0.3, 0.4),
    "step_s": Prior(1e-5, 0.1, 1e-3, 0.7),
    "request_s": Prior(1e-6, 1e-2, 1e-4, 0.5),
    "attention_call_s": Prior(1e-6, 1e-3, 2e-5, 0.5),
}
FROM_REQUESTS = ("bandwidth", "compute", "attention_bandwidth", "step_s", "request_s")
FROM_STEPS = tuple(PRIORS)

REQUEST_NOISE = 0.05  # spread of a request's log latency that no factor explains
STEP_NOISE = 0.05
BEYOND = 1.2
FLOOR_S = 0.010  # latencies below are as good as equal: the recording server's own hand-over takes as long


def fit_requests(run: MeasuredRun, cost: CostModel, horizon: float) -> tuple[Efficiency, float]:
    """Fit on what the run's requests had seen by `horizon`: their first tokens (TTFT), and their last ones (TPOT).

    Each candidate replays the run up to a little beyond the horizon; what is still missing then takes at least that
    long. Returns the factors and the loss reached.
    """
    until = BEYOND * horizon
    ttft = {r.request_id: r for r in run.requests if r.first_token_time is not None and r.first_token_time <= horizon}
    done = {r.request_id: r for r in run.requests if r.tpot is not None and r.last_token_time <= horizon}

    def loss(efficiency: Efficiency) -> float:
        outcomes = replay(run, replace(cost, efficiency=efficiency), until)
        gaps = []
        for name, r in ttft.items():
            first = outcomes[name].first_token_time
            gaps.append(log_gap((until if first is None else first) - r.arrival_time, r.ttft, FLOOR_S))
        for name, r in done.items():
            first, last = outcomes[name].first_token_time, outcomes[name].last_token_time
            if first is not None:
                gaps.append(log_gap(((until if last is None else last) - first) / (r.output_tokens - 1), r.tpot))
        return float(huber(np.array(gaps) / REQUEST_NOISE).sum())

    return minimise(loss, {name: PRIORS[name] for name in FROM_REQUESTS}, cost.efficiency)


def fit_steps(
    steps: Sequence[MeasuredStep], cost: CostModel, priors: Mapping[str, Prior] = PRIORS
) -> tuple[Efficiency, float]:
    """Fit on the measured seconds of steps; long steps weigh more, since they are what makes up a makespan."""
    measured = np.array([step.seconds for step in steps])
    weights = len(steps) * measured / measured.sum()

    def loss(efficiency: Efficiency) -> float:
        candidate = replace(cost, efficiency=efficiency)
        predicted = np.array([candidate.seconds(step.work) for step in steps])
        return float((weights * huber(np.log(predicted / measured) / STEP_NOISE)).sum())

    return minimise(loss, {name: priors[name] for name in FROM_STEPS}, cost.efficiency, 1500)


def log_gap(predicted: float, measured: float, floor: float = 1e-9) -> float:
    """ln(predicted / measured), cut at a factor of two."""
    gap = math.log((max(predicted, 0.0) + floor) / (max(measured, 0.0) + floor))
    return max(-math.log(2), min(math.log(2), gap))


def huber(values: np.ndarray) -> np.ndarray:
    """Squares near zero, straight lines beyond ±1, so that a few odd requests do not decide (Huber, 1964)."""
    size = np.abs(values)
    return np.where(size <= 1, 0.5 * size**2, size - 0.5)


def minimise(
    loss: Callable[[Efficiency], float],
    priors: Mapping[str, Prior],
    base: Efficiency,
    max_evaluations: int = 240,
) -> tuple[Efficiency, float]:
    """The factors named in `priors` of smallest loss plus prior; the others stay as in `base`."""
    names, priors = list(priors), list(priors.values())
    low, high = np.log([p.low for p in priors]), np.log([p.high for p in priors])
    typical, spread = np.log([p.typical for p in priors]), np.array([p.spread for p in priors])

    def at(point: np.ndarray) -> Efficiency:
        values = np.exp(np.clip(point, low, high))
        return replace(base, **{n: min(float(v), p.high) for n, v, p in zip(names, values, priors)})

    def total(point: np.ndarray) -> float:
        outside = np.abs(point - np.clip(point, low, high)).sum()
        return loss(at(point)) + 0.5 * float((((point - typical) / spread) ** 2).sum()) + 1e3 * float(outside)

    best, value, size = typical, math.inf, 0.5 * spread
    for _ in range(2 if len(names) < 7 else 4):  # again and again from a fresh simplex: it may have collapsed too soon
        best, value = nelder_mead(total, best, size, max_evaluations // 2)
        size = 0.25 * spread
    return at(best), value


def nelder_mead(
    function: Callable[[np.ndarray], float],
    start: np.ndarray,
    size: np.ndarray,
    max_evaluations: int,
    tolerance: float = 4e-3,
) -> tuple[np.ndarray, float]:
    """A minimum of a rugged function, without derivatives. Source: Nelder and Mead, The Computer Journal 7 (1965).

    Stops when the simplex is smaller than `tolerance` in every direction.
    """
    points = [np.array(start), *(start + np.eye(len(start))[i] * size[i] for i in range(len(start)))]
    values = [function(p) for p in points]
    count = len(points)
    while count < max_evaluations:
        order = np.argsort(values, kind="stable")
        points, values = [points[i] for i in order], [values[i] for i in order]
        if np.ptp(np.array(points), axis=0).max() < tolerance:
            break
        centre = np.mean(points[:-1], axis=0)
        away = centre - points[-1]
        point, value = _at(function, centre + away)
        count += 1
        if value < values[0]:
            further = _at(function, centre + 2 * away)
            count += 1
            point, value = min((point, value), further, key=lambda pair: pair[1])
        elif value >= values[-2]:
            point, value = _at(function, centre + (0.5 if value < values[-1] else -0.5) * away)
            count += 1
        if value < values[-1]:
            points[-1], values[-1] = point, value
        else:
            points = [points[0], *(points[0] + 0.5 * (p - points[0]) for p in points[1:])]
            values = [values[0], *(function(p) for p in points[1:])]
            count += len(points) - 1
    best = int(np.argmin(values))
    return points[best], values[best]


def _at(function: Callable[[np.ndarray], float], point: np.ndarray) -> tuple[np.ndarray, float]:
    return point, function(point)
