"""Fitting the few efficiency factors of a cost model on a part of a measured run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..runners.roofline import CostModel, Efficiency, StepWork
from .replay import replay
from .runs import MeasuredRequest, MeasuredRun, MeasuredSecond, MeasuredStep


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

GROUP = 8  # neighbours in time whose gaps are averaged: which step a request just caught or missed is chance
GROUP_NOISE = 0.03  # spread of a group's mean gap that no factor explains
LOG_NOISE = 0.05  # the same for a server's log: when within a line requests came and went, what was computed again
STEP_NOISE = 0.1
STEPS_WORTH = 100  # independent ones: what the cost model gets wrong it gets wrong in all steps alike
BEYOND = 1.2
FLOOR_S = 0.010  # latencies below are as good as equal: the recording server's own hand-over takes as long
GENERATIONS = 20
TEMPERED = 0.03  # how far the local shape of the data's fit is trusted in a search


def fit_requests(run: MeasuredRun, cost: CostModel, horizon: float) -> Efficiency:
    """Fit on what the run's requests had seen by `horizon`: their first tokens (TTFT), and their last ones (TPOT).

    Where the server kept a log, each second of it is an equation, too: what was done in it must take a second. A run's
    batch sizes vary most while it fills up, and that is where the log tells what a small batch costs.
    Each candidate replays the run up to a little beyond the horizon; what is still missing then takes at least that
    long.
    """
    until = BEYOND * horizon
    begun = [r for r in run.requests if r.first_token_time is not None and r.first_token_time <= horizon]

    def last_token(request: MeasuredRequest) -> float:
        return math.inf if request.last_token_time is None else request.last_token_time

    ended = [r for r in run.requests if r.tpot is not None and last_token(r) <= horizon]
    ended.sort(key=last_token)

    budget = run.config.max_num_batched_tokens
    logged = [
        (at, (before.num_running + at.num_running) / 2)
        for before, at in zip(run.log, run.log[1:])
        if at.end <= horizon and min(before.num_running, at.num_running) >= 1 and at.output_tokens
    ]

    def residuals(efficiency: Efficiency) -> np.ndarray:
        outcomes = replay(run, replace(cost, efficiency=efficiency), until)
        ttft, tpot = [], []
        for r in begun:
            assert r.ttft is not None  # or it would not have begun
            first = outcomes[r.request_id].first_token_time
            ttft.append(log_gap((until if first is None else first) - r.arrival_time, r.ttft, FLOOR_S))
        for r in ended:
            assert r.tpot is not None
            first, last = outcomes[r.request_id].first_token_time, outcomes[r.request_id].last_token_time
            seconds = math.inf if first is None else (until if last is None else last) - first
            tpot.append(log_gap(seconds / (r.output_tokens - 1), r.tpot))
        candidate = replace(cost, efficiency=efficiency)
        busy = [log_gap(busy_seconds(at, running, candidate, budget), at.seconds) for at, running in logged]
        return np.concatenate([grouped(ttft) / GROUP_NOISE, grouped(tpot) / GROUP_NOISE, grouped(busy, 3) / LOG_NOISE])

    return minimise(residuals, {name: PRIORS[name] for name in FROM_REQUESTS}, cost.efficiency, generations=GENERATIONS)


def grouped(gaps: Sequence[float], size: int = GROUP) -> np.ndarray:
    """Means of each `size` neighbours."""
    if not gaps:
        return np.zeros(0)
    return np.array([part.mean() for part in np.array_split(np.array(gaps), max(1, len(gaps) // size))])


def busy_seconds(at: MeasuredSecond, num_running: float, cost: CostModel, budget: int) -> float:
    """Seconds that the cost model wants for what a server logged: decode steps, some of which carry prompts as well."""
    with_prompts = max(at.num_first_steps, math.ceil(at.prompt_tokens / budget)) if at.prompt_tokens else 0
    num_steps = max(at.output_tokens / num_running, with_prompts)
    rows, kv = num_running, at.kv_tokens
    seconds = (num_steps - with_prompts) * cost.seconds(StepWork(rows, rows, rows, kv, kv, 0.0))
    if with_prompts:
        chunk = at.prompt_tokens / with_prompts
        mixed = StepWork(rows + chunk, rows + 1, rows + 1, kv + chunk, kv, chunk * chunk / 2)
        seconds += with_prompts * cost.seconds(mixed)
    return seconds


def fit_steps(steps: Sequence[MeasuredStep], cost: CostModel, priors: Mapping[str, Prior] = PRIORS) -> Efficiency:
    """Fit on the measured seconds of steps; long steps weigh more, since they are what makes up a makespan."""
    measured = np.array([step.seconds for step in steps])
    weights = STEPS_WORTH * measured / measured.sum()

    def residuals(efficiency: Efficiency) -> np.ndarray:
        candidate = replace(cost, efficiency=efficiency)
        predicted = np.array([candidate.seconds(step.work) for step in steps])
        return np.log(predicted / measured) / STEP_NOISE

    return minimise(residuals, {name: priors[name] for name in FROM_STEPS}, cost.efficiency, 50, weights)


def log_gap(predicted: float, measured: float, floor: float = 1e-9) -> float:
    """ln(predicted / measured), cut at a factor of two."""
    gap = math.log((max(predicted, 0.0) + floor) / (max(measured, 0.0) + floor))
    return max(-math.log(2), min(math.log(2), gap))


def huber(values: np.ndarray) -> np.ndarray:
    """Squares near zero, straight lines beyond ±1, so that a few odd requests do not decide (Huber, 1964)."""
    size = np.abs(values)
    return np.where(size <= 1, 0.5 * size**2, size - 0.5)


def minimise(
    residuals: Callable[[Efficiency], np.ndarray],
    priors: Mapping[str, Prior],
    base: Efficiency,
    iterations: int = 12,
    weights: np.ndarray | float = 1.0,
    generations: int = 0,
) -> Efficiency:
    """The factors named in `priors` with the least sum of weighted Huber residuals and squared distances to the priors.

    Damped Gauss-Newton steps on reweighted residuals in the logarithms of the factors (Levenberg, 1944; Marquardt,
    1963; Holland and Welsch, 1977, for the weights). Derivatives are differences over a tenth of a prior's spread: a
    replay is rugged at a closer look, since who is let in when jumps. The others stay as in `base`.
    """
    names, limits = list(priors), list(priors.values())
    low, high = np.log([p.low for p in limits]), np.log([p.high for p in limits])
    typical, spread = np.log([p.typical for p in limits]), np.array([p.spread for p in limits])

    def at(point: np.ndarray) -> Efficiency:
        figures: dict[str, Any] = {n: min(float(v), p.high) for n, v, p in zip(names, np.exp(point), limits)}
        return replace(base, **figures)

    def total(point: np.ndarray, values: np.ndarray) -> float:
        return float((weights * huber(values)).sum() + 0.5 * (((point - typical) / spread) ** 2).sum())

    point = typical.copy()
    values = residuals(at(point))
    best, damping = total(point, values), 1e-2
    for _ in range(iterations):
        steps = np.where(point + 0.1 * spread > high, -0.1, 0.1) * spread
        columns = [
            (residuals(at(point + np.eye(len(point))[i] * steps[i])) - values) / steps[i] for i in range(len(point))
        ]
        jacobian = np.stack(columns, axis=1)
        robust = weights / np.maximum(1.0, np.abs(values))
        normal = jacobian.T @ (robust[:, None] * jacobian) + np.diag(1 / spread**2)
        slope = jacobian.T @ (robust * values) + (point - typical) / spread**2
        gained = 0.0
        for _ in range(5):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope)
            trial = np.clip(point + np.clip(move, -1.0, 1.0), low, high)
            trial_values = residuals(at(trial))
            value = total(trial, trial_values)
            if value < best:
                gained, best = best - value, value
                point, values, damping = trial, trial_values, damping / 5
                break
            damping *= 5
        if gained < 1e-3 * (1 + best):
            break
    if generations:
        around = np.linalg.inv(TEMPERED * normal + np.diag(1 / spread**2))
        point = evolve(lambda p: total(p, residuals(at(p))), point, around, low, high, generations)
    return at(point)


def evolve(
    function: Callable[[np.ndarray], float],
    start: np.ndarray,
    covariance: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    generations: int,
) -> np.ndarray:
    """A minimum of a rugged function within limits: the mean of a normal distribution that moves to where the better
    samples are and takes their shape (CMA-ES; Hansen, «The CMA Evolution Strategy: A Tutorial», 2016). Same seed, same
    result. The best point seen is returned.
    """
    n = len(start)
    samples = 4 + int(3 * math.log(n)) + 2
    weights = np.log(samples / 2 + 0.5) - np.log(np.arange(1, samples // 2 + 1))
    weights /= weights.sum()
    effective = 1 / (weights**2).sum()
    to_path, to_size = (4 + effective / n) / (n + 4 + 2 * effective / n), (effective + 2) / (n + effective + 5)
    rank_one = 2 / ((n + 1.3) ** 2 + effective)
    rank_many = min(1 - rank_one, 2 * (effective - 2 + 1 / effective) / ((n + 2) ** 2 + effective))
    slow_down = 1 + 2 * max(0.0, math.sqrt((effective - 1) / (n + 1)) - 1) + to_size
    expected = math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n))

    rng, mean, size = np.random.default_rng(0), start.copy(), 0.5
    path, size_path = np.zeros(n), np.zeros(n)
    best, best_value = start, function(start)
    for generation in range(generations):
        scales, axes = np.linalg.eigh(covariance)
        scales = np.sqrt(np.maximum(scales, 1e-12))
        moves = (rng.standard_normal((samples, n)) * scales) @ axes.T
        points = np.clip(mean + size * moves, low, high)
        values = [function(point) for point in points]
        order = np.argsort(values, kind="stable")[: len(weights)]
        if values[order[0]] < best_value:
            best, best_value = points[order[0]], values[order[0]]
        moves = (points - mean) / size
        step = weights @ moves[order]
        mean = mean + size * step
        whitened = axes @ ((axes.T @ step) / scales)
        size_path = (1 - to_size) * size_path + math.sqrt(to_size * (2 - to_size) * effective) * whitened
        length = np.linalg.norm(size_path)
        steady = length / math.sqrt(1 - (1 - to_size) ** (2 * generation + 2)) < (1.4 + 2 / (n + 1)) * expected
        path = (1 - to_path) * path + steady * math.sqrt(to_path * (2 - to_path) * effective) * step
        many = np.einsum("i,ij,ik->jk", weights, moves[order], moves[order])
        covariance = (1 - rank_one - rank_many) * covariance + rank_one * np.outer(path, path) + rank_many * many
        size *= math.exp(to_size / slow_down * (length / expected - 1))
    return best
