"""Rows 2.4, 2.6, 2.12: what iteration-level scheduling gives each request, the hardware, and an empty queue."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..metrics import e2el, summarize
from ..runners.roofline import CostModel
from ..simulate import run_simulation
from ..timeline import Timeline
from ..utilisation import utilisation
from ..workload import Workload, WorkloadRequest, longtail, profile, uniform
from .common import mean, percentile


@dataclass(frozen=True)
class FairShare:
    """One request among neighbours. Counts are iterations of the engine.

    waiting: from its arrival until it starts. running: from its start to its last token, both included. stalled: those
    of them in which it got no token and none of its prompt was computed. holding: as long as it keeps its slot.
    """

    strategy: str
    neighbour_tokens: int
    newcomers_per_s: float
    output_tokens: int
    waiting: int
    running: int
    stalled: int
    holding: int


def fair_share(
    cost: CostModel,
    *,
    output_tokens: int = 20,
    neighbour_tokens: Sequence[int] = (20, 200, 2_000),
    newcomers_per_s: Sequence[float] = (0.0, 4.0),
    strategies: Sequence[str] = ("static", "continuous", "chunked"),
    num_neighbours: int = 30,
    max_num_seqs: int = 64,
    arrival_s: float = 1.0,
) -> list[FairShare]:
    """Row 2.4: iterations that a request of `output_tokens` takes, whoever is beside it (Orca, OSDI 2022, section 3).

    It arrives `arrival_s` seconds after `num_neighbours` others, which want `neighbour_tokens` each. With newcomers,
    prompts of 1,000 tokens go on arriving while it runs: `continuous` lets them in whole, at the cost of an iteration
    each.
    """
    shares = []
    for tokens in neighbour_tokens:
        for rate in newcomers_per_s:
            rows = [WorkloadRequest(f"n{i}", 0.0, 100, tokens) for i in range(num_neighbours)]
            rows.append(WorkloadRequest("target", arrival_s, 100, output_tokens))
            if rate:
                rows += [WorkloadRequest(f"c{i}", arrival_s + 0.05 + i / rate, 1_000, 50) for i in range(int(2 * rate))]
            workload = Workload("one among others", tuple(rows), "Made up for this claim.")
            options: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 1_100}
            runs = run_simulation(workload, cost, strategies=strategies, **options)
            shares += [_share(timeline, tokens, rate) for timeline in runs.values()]
    return shares


def _share(timeline: Timeline, neighbour_tokens: int, rate: float) -> FairShare:
    record = timeline.requests["target"]
    mine = [[row for row in step.rows if row.request_id == "target"] for step in timeline.steps]
    held = [i for i, rows in enumerate(mine) if rows]
    begun = record.first_scheduled_time
    assert begun is not None  # it was served
    waiting = sum(record.arrival_time < s.end and s.start < begun for s in timeline.steps)
    ended = next(i for i, step in enumerate(timeline.steps) if "target" in step.finished)
    running = range(held[0], ended + 1)
    stalled = sum(mine[i][0].num_tokens == 0 for i in running)
    return FairShare(
        timeline.header["strategy"],
        neighbour_tokens,
        rate,
        record.num_output_tokens,
        waiting,
        len(running),
        stalled,
        len(held),
    )


SWEEP_DEFINITIONS: dict[str, str] = {  # of the first one, nvidia-smi shows at most as much
    "busy_share": "time inside steps",
    "mfu": "model FLOPs utilisation",
    "bandwidth_utilisation": "memory-bandwidth utilisation",
    "useful_slot_share": "useful slots, by time",
    "slot_occupancy": "useful slots, by steps",
    "useful_token_share": "useful tokens of those computed",
}


@dataclass(frozen=True)
class UtilisationRow:
    """One run, or the part of it under backlog. shares: 0 to 1 by the names of SWEEP_DEFINITIONS.

    window: "run" is the whole run, its end included, when the queue is empty and slots fall idle; "backlog" ends with
    the last step that left somebody waiting.
    """

    workload: str
    max_num_seqs: int
    strategy: str
    window: str
    output_tokens_per_s: float
    shares: Mapping[str, float]


def sweep_workloads(num_requests: int, seed: int = 0) -> dict[str, Workload]:
    """Traffic for row 2.6: equal lengths, traces' profiles with all requests at once or at a rate, a heavy tail."""
    workloads = {
        "equal": uniform(num_requests, prompt_min=500, prompt_max=500, output_min=200, output_max=200),
        "azure-conv": profile("azure-conv", num_requests, request_rate=math.inf, seed=seed),
        "azure-code": profile("azure-code", num_requests, request_rate=math.inf, seed=seed),
        "azure-conv at 2/s": profile("azure-conv", num_requests, request_rate=2.0, seed=seed),
        "longtail": longtail(num_requests, prompt_mean=100, output_min=16, output_max=2_000, alpha=1.1, seed=seed),
    }
    return {name: workload.fit_to_context(8_192) for name, workload in workloads.items()}


def utilisation_sweep(
    cost: CostModel,
    *,
    workloads: Sequence[str] | None = None,
    batch_limits: Sequence[int] = (8, 32, 128),
    strategies: Sequence[str] = ("static", "continuous", "chunked"),
    batches: int = 6,
    max_num_batched_tokens: int = 2_048,
    seed: int = 0,
) -> list[UtilisationRow]:
    """Row 2.6: utilisation of static and continuous batching under every definition, workload and batch limit.

    Each run has `batches` x batch limit requests (at least 64). workloads: names of `sweep_workloads`, None for all.
    """
    rows = []
    for limit in batch_limits:
        for name, workload in sweep_workloads(max(64, batches * limit), seed).items():
            if workloads is not None and name not in workloads:
                continue
            options: dict[str, Any] = {"max_num_seqs": limit, "max_num_batched_tokens": max_num_batched_tokens}
            for strategy, timeline in run_simulation(workload, cost, strategies=strategies, **options).items():
                queued = [i for i, step in enumerate(timeline.steps) if step.num_waiting]
                windows = {"run": timeline, "backlog": timeline.slice(0, queued[-1] + 1) if queued else None}
                rows += [_row(name, limit, strategy, w, t, cost) for w, t in windows.items() if t is not None]
    return rows


def _row(workload: str, limit: int, strategy: str, window: str, timeline: Timeline, cost: CostModel) -> UtilisationRow:
    metrics = summarize(timeline)
    found = utilisation(timeline, cost) | {
        "slot_occupancy": metrics["slot_occupancy"],
        "useful_token_share": 1 - metrics["padding_share"],
    }
    shares = {name: found[name] for name in SWEEP_DEFINITIONS}
    return UtilisationRow(workload, limit, strategy, window, metrics["output_tokens_per_s"], shares)


@dataclass(frozen=True)
class Verdict:
    """One definition of utilisation, over all configurations (workload, batch limit) of one window.

    holds_in: those in which static batching lies in 10–20 % *and* the other strategy in 60–80 %. static, other: lowest
    and highest share. gain: lowest and highest quotient of the two.
    """

    definition: str
    strategy: str
    window: str
    num_configurations: int
    static_in_range: tuple[str, ...]
    other_in_range: tuple[str, ...]
    holds_in: tuple[str, ...]
    static: tuple[float, float]
    other: tuple[float, float]
    gain: tuple[float, float]

    @property
    def sentence(self) -> str:
        where = f"in {len(self.holds_in)} of {self.num_configurations} configurations"
        where += f" ({'; '.join(self.holds_in)})" if self.holds_in else ""
        return (
            f"{SWEEP_DEFINITIONS[self.definition]} ({self.window}): static {100 * self.static[0]:.0f}–"
            f"{100 * self.static[1]:.0f} %, {self.strategy} {100 * self.other[0]:.0f}–{100 * self.other[1]:.0f} %, "
            f"{self.gain[0]:.1f}–{self.gain[1]:.1f} times as much; 10–20 % → 60–80 % holds {where}"
        )


def utilisation_verdicts(
    rows: Sequence[UtilisationRow],
    *,
    strategy: str = "continuous",
    window: str = "backlog",
    static_range: tuple[float, float] = (0.1, 0.2),
    other_range: tuple[float, float] = (0.6, 0.8),
) -> list[Verdict]:
    """Row 2.6: for each definition, where the book's 10–20 % → 60–80 % holds among the rows of `utilisation_sweep`."""
    by_place: dict[str, dict[str, UtilisationRow]] = {}
    for row in rows:
        if row.window == window:
            by_place.setdefault(f"{row.workload}, {row.max_num_seqs} slots", {})[row.strategy] = row
    places = {place: runs for place, runs in by_place.items() if {"static", strategy} <= set(runs)}
    verdicts = []
    for name in SWEEP_DEFINITIONS:
        static = {place: runs["static"].shares[name] for place, runs in places.items()}
        other = {place: runs[strategy].shares[name] for place, runs in places.items()}
        low = tuple(p for p in places if static_range[0] <= static[p] <= static_range[1])
        high = tuple(p for p in places if other_range[0] <= other[p] <= other_range[1])
        gains = [other[p] / static[p] for p in places]
        verdicts.append(
            Verdict(
                name,
                strategy,
                window,
                len(places),
                low,
                high,
                tuple(p for p in low if p in high),
                (min(static.values()), max(static.values())),
                (min(other.values()), max(other.values())),
                (min(gains), max(gains)),
            )
        )
    return verdicts


@dataclass(frozen=True)
class TrafficPoint:
    """All strategies at one arrival rate, by name. Latency is end to end, in seconds."""

    request_rate: float
    output_tokens_per_s: Mapping[str, float]
    latency_mean_s: Mapping[str, float]
    latency_p99_s: Mapping[str, float]
    requests_in_step: Mapping[str, float]

    def throughput_ratio(self, strategy: str = "static") -> float:
        """Output tokens per second: continuous / `strategy`."""
        return self.output_tokens_per_s["continuous"] / self.output_tokens_per_s[strategy]

    def latency_ratio(self, strategy: str = "static") -> float:
        """Mean latency: `strategy` / continuous."""
        return self.latency_mean_s[strategy] / self.latency_mean_s["continuous"]


def low_traffic(
    cost: CostModel,
    *,
    request_rates: Sequence[float] = (0.005, 0.05, 0.5, 2.0, 8.0),
    num_requests: int = 60,
    max_num_seqs: int = 32,
    seed: int = 0,
) -> list[TrafficPoint]:
    """Row 2.12: continuous against fixed batches, by arrival rate. With an empty queue there is nobody to fill a slot.

    `static` waits half a second for company, `dynamic` (delay zero) does not, so at low traffic only `dynamic` becomes
    the same as `continuous`.
    """
    points = []
    for rate in request_rates:
        workload = profile("azure-conv", num_requests, request_rate=rate, arrivals="poisson", seed=seed)
        runs = run_simulation(
            workload.fit_to_context(8_192),
            cost,
            strategies=["static", "dynamic", "continuous"],
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2_048,
        )
        latency = {name: [e2el(r) for r in t.requests.values()] for name, t in runs.items()}
        points.append(
            TrafficPoint(
                rate,
                {name: summarize(t)["output_tokens_per_s"] for name, t in runs.items()},
                {name: mean(samples) for name, samples in latency.items()},
                {name: percentile(samples, 99) for name, samples in latency.items()},
                {name: mean(sum(row.num_tokens > 0 for row in s.rows) for s in t.steps) for name, t in runs.items()},
            )
        )
    return points
