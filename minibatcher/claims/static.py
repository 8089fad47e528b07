"""Rows 1.4, 1.5, 1.6: what fixed batches cost in the tail, where they are fine, and what a queue delay buys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..metrics import e2el, queue_time, summarize
from ..request import SamplingParams
from ..runners.roofline import CostModel
from ..simulate import run_simulation, simulated_engine
from ..timeline import Timeline
from ..workload import profile, uniform
from .common import mean, percentile


@dataclass(frozen=True)
class TailLatency:
    """Throughput and latency of one strategy. Latencies in seconds, from arrival to the last token (end to end).

    whole_batch_*: the same where a server answers when the whole batch is done; equal to the above unless batches are
    fixed. per_token_*: end-to-end latency / output tokens, Orca's normalised latency.
    """

    strategy: str
    request_rate: float
    output_tokens_per_s: float
    p50_s: float
    p99_s: float
    whole_batch_p50_s: float
    whole_batch_p99_s: float
    per_token_p50_s: float
    per_token_p99_s: float

    @property
    def spread(self) -> float:
        """p99 / p50."""
        return self.p99_s / self.p50_s


def tail_latency(
    cost: CostModel,
    *,
    request_rate: float = 1.0,
    num_requests: int = 300,
    strategies: Sequence[str] = ("static", "continuous"),
    max_num_seqs: int = 32,
    seed: int = 0,
) -> dict[str, TailLatency]:
    """Rows 1.4, 2.7: p50 and p99 of latency on requests that resemble the Azure conversation trace, by strategy."""
    workload = profile("azure-conv", num_requests, request_rate=request_rate, seed=seed).fit_to_context(8_192)
    options: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2_048}
    found = {}
    for name, timeline in run_simulation(workload, cost, strategies=strategies, **options).items():
        records = list(timeline.requests.values())
        latency = [e2el(r) for r in records]
        left = _left_at(timeline)
        whole = [left[r.request_id] - r.arrival_time for r in records]
        per_token = [t / r.num_output_tokens for t, r in zip(latency, records)]
        found[name] = TailLatency(
            name,
            request_rate,
            summarize(timeline)["output_tokens_per_s"],
            *(percentile(samples, q) for samples in (latency, whole, per_token) for q in (50, 99)),
        )
    return found


def _left_at(timeline: Timeline) -> dict[str, float]:
    """When each request gave its slot back: the end of the last step that had a row for it."""
    return {row.request_id: step.end for step in timeline.steps for row in step.rows}


@dataclass(frozen=True)
class BatchEnd:
    """One fixed batch: how long it ran in steps, its longest and its mean output in tokens."""

    num_requests: int
    num_steps: int
    longest_output: int
    mean_output: float


def batch_ends(cost: CostModel, *, num_requests: int = 256, max_num_seqs: int = 32, seed: int = 0) -> list[BatchEnd]:
    """Row 1.4: a static batch runs for as many steps as its longest request has output tokens, whatever the mean."""
    workload = profile("azure-conv", num_requests, request_rate=math.inf, seed=seed).fit_to_context(8_192)
    timeline = run_simulation(workload, cost, strategies=["static"], max_num_seqs=max_num_seqs)["static"]
    starts = [i for i, step in enumerate(timeline.steps) if step.admitted] + [len(timeline.steps)]
    batches = []
    for first, stop in pairwise(starts):
        outputs = [timeline.requests[name].num_output_tokens for name in timeline.steps[first].admitted]
        batches.append(BatchEnd(len(outputs), stop - first, max(outputs), mean(outputs)))
    return batches


@dataclass(frozen=True)
class EqualLengths:
    """Output tokens per second of both strategies on one workload, all requests there at once."""

    workload: str
    static_tokens_per_s: float
    continuous_tokens_per_s: float

    @property
    def ratio(self) -> float:
        """Continuous / static."""
        return self.continuous_tokens_per_s / self.static_tokens_per_s


def equal_lengths(
    cost: CostModel, *, num_requests: int = 128, max_num_seqs: int = 32, seed: int = 0
) -> dict[str, EqualLengths]:
    """Row 1.5: with equal lengths a static batch wastes nothing, so continuous batching gains nothing; else it does."""
    workloads = {
        "equal": uniform(num_requests, prompt_min=512, prompt_max=512, output_min=128, output_max=128),
        "uniform": uniform(num_requests, prompt_min=24, prompt_max=1_000, output_min=8, output_max=248, seed=seed),
        "azure-conv": profile("azure-conv", num_requests, request_rate=math.inf, seed=seed).fit_to_context(8_192),
    }
    options: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 1 << 20,
    }  # whole batches of prompts in one step
    found = {}
    for name, workload in workloads.items():
        runs = run_simulation(workload, cost, strategies=["static", "continuous"], **options)
        rates = (summarize(runs[s])["output_tokens_per_s"] for s in ("static", "continuous"))
        found[name] = EqualLengths(name, *rates)
    return found


@dataclass(frozen=True)
class DelayPoint:
    """One queue delay at one arrival rate. tokens_per_busy_s: output tokens per second in which a step ran."""

    request_rate: float
    delay_s: float
    mean_batch: float
    output_tokens_per_s: float
    tokens_per_busy_s: float
    busy_share: float
    queue_mean_s: float
    queue_p99_s: float
    latency_mean_s: float


def delay_sweep(
    cost: CostModel,
    *,
    delays_s: Sequence[float] = (0.0, 0.05, 0.2, 0.8),
    request_rates: Sequence[float] = (2.0, 8.0, 24.0, 80.0),
    num_requests: int = 300,
    max_num_seqs: int = 32,
    seed: int = 0,
) -> list[DelayPoint]:
    """Row 1.6: dynamic batching against its maximum queue delay, at several arrival rates (requests per second).

    All requests are equal (100 + 30 tokens), so that batches differ in size alone. Below saturation the throughput is
    the arrival rate, whatever the delay; what a delay buys is larger batches, hence tokens per *busy* second.
    """
    points = []
    for rate in request_rates:
        lengths: dict[str, Any] = {"prompt_min": 100, "prompt_max": 100, "output_min": 30, "output_max": 30}
        workload = uniform(num_requests, **lengths, request_rate=rate, seed=seed)
        for delay in delays_s:
            options: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_queue_delay_s": delay}
            timeline = run_simulation(workload, cost, strategies=["dynamic"], **options)["dynamic"]
            points.append(_delay_point(timeline, rate, delay))
    return points


def _delay_point(timeline: Timeline, rate: float, delay: float) -> DelayPoint:
    metrics, records = summarize(timeline), list(timeline.requests.values())
    batches = [len(step.admitted) for step in timeline.steps if step.admitted]
    return DelayPoint(
        rate,
        delay,
        mean(batches),
        metrics["output_tokens_per_s"],
        metrics["output_tokens_per_s"] / metrics["busy_share"],
        metrics["busy_share"],
        mean(queue_time(r) for r in records),
        percentile((queue_time(r) for r in records), 99),
        mean(e2el(r) for r in records),
    )


def closed_loop_delay(
    cost: CostModel,
    *,
    delays_s: Sequence[float] = (0.0, 1.0),
    num_clients: int = 32,
    rounds: int = 8,
    prompt_tokens: int = 100,
    output_tokens: int = 30,
) -> list[DelayPoint]:
    """Row 1.6, clients that ask again as soon as they are answered: here a delay buys throughput itself.

    With no delay the first request is launched alone, and from then on two groups take turns for ever, each waiting
    while the other runs. A delay longer than a batch brings them together. `request_rate` is 0: nobody sets it.
    """
    points = []
    for delay in delays_s:
        options: dict[str, Any] = {"max_num_seqs": num_clients, "max_queue_delay_s": delay}
        engine = simulated_engine(cost, "dynamic", max_model_len=prompt_tokens + output_tokens, **options)
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        engine.add(range(prompt_tokens), params)
        engine.step()  # the first is launched before the others are there, or not, as the delay says
        asked = 1
        answered = num_clients - 1
        while engine.has_work():
            for _ in range(min(answered, rounds * num_clients - asked)):
                engine.add(range(prompt_tokens), params)
                asked += 1
            outputs = engine.step()
            answered = sum(output.finish_reason is not None for output in outputs)
            if not outputs:
                engine.clock.advance(1e-3)  # the batch is still filling
        points.append(_delay_point(engine.timeline, 0.0, delay))
    return points
