"""How far a cost model's prediction of a measured run is off, and for which part of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..metrics import PERCENTILES
from .replay import Outcome
from .runs import MeasuredRequest, MeasuredRun

WHOLE, HELD_OUT, FITTED = "whole run", "hold-out", "fitted part"


@dataclass(frozen=True)
class Row:
    """One figure of one part of a run. error: (predicted - measured) / measured."""

    run: str
    part: str
    metric: str
    predicted: float
    measured: float
    num_samples: int

    @property
    def error(self) -> float:
        return (self.predicted - self.measured) / self.measured


class _Pair(NamedTuple):
    """One request's latency as predicted and as measured, in seconds, and when it was complete."""

    predicted: float
    measured: float
    moment: float


def compare(run: MeasuredRun, outcomes: dict[str, Outcome], horizon: float | None = None) -> list[Row]:
    """Makespan and throughput of the whole run; TTFT and TPOT of the whole run too, or, with a horizon, of the tokens
    that came after it (held out) and before it (fitted).

    The percentiles are those of `minibatcher compare`: interpolated linearly between sorted samples.
    """
    makespan = max(o.last_token_time for o in outcomes.values() if o.last_token_time is not None)
    tokens, count = sum(r.output_tokens for r in run.requests), len(run.requests)
    rows = [
        Row(run.name, WHOLE, "makespan_s", makespan, run.makespan, count),
        Row(run.name, WHOLE, "output_tokens_per_s", tokens / makespan, tokens / run.makespan, count),
    ]
    latencies = {"ttft_ms": _ttft_pairs(run, outcomes), "tpot_ms": _tpot_pairs(run, outcomes)}
    if horizon is None:
        parts = {WHOLE: latencies}
    else:
        rows.append(Row(run.name, HELD_OUT, "seconds_left", makespan - horizon, run.makespan - horizon, count))
        late = {name: [p for p in pairs if p.moment > horizon] for name, pairs in latencies.items()}
        early = {name: [p for p in pairs if p.moment <= horizon] for name, pairs in latencies.items()}
        parts = {HELD_OUT: late, FITTED: early}
    for part, samples in parts.items():
        for metric, pairs in samples.items():
            rows += _percentiles(run.name, part, metric, pairs)
    return rows


def _ttft_pairs(run: MeasuredRun, outcomes: dict[str, Outcome]) -> list[_Pair]:
    pairs = []
    for r in run.requests:
        if r.first_token_time is not None:
            first = outcomes[r.request_id].first_token_time
            assert first is not None  # the whole run was replayed
            pairs.append(_Pair(first - r.arrival_time, r.first_token_time - r.arrival_time, r.first_token_time))
    return pairs


def _tpot_pairs(run: MeasuredRun, outcomes: dict[str, Outcome]) -> list[_Pair]:
    return [
        _Pair(_tpot(outcomes[r.request_id], r), r.tpot, r.last_token_time)
        for r in run.requests
        if r.tpot is not None and r.last_token_time is not None
    ]


def _tpot(outcome: Outcome, request: MeasuredRequest) -> float:
    assert outcome.first_token_time is not None and outcome.last_token_time is not None  # the whole run was replayed
    return (outcome.last_token_time - outcome.first_token_time) / (request.output_tokens - 1)


def _percentiles(run: str, part: str, metric: str, pairs: Sequence[_Pair]) -> list[Row]:
    if not pairs:
        return []
    predicted = np.percentile([p.predicted for p in pairs], PERCENTILES) * 1e3
    measured = np.percentile([p.measured for p in pairs], PERCENTILES) * 1e3
    return [
        Row(run, part, f"{metric} p{p}", float(a), float(b), len(pairs))
        for p, a, b in zip(PERCENTILES, predicted, measured)
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows as text: part, metric, predicted, measured, error in per cent, samples; a heading for each run."""
    lines = [f"{'part':<12}{'metric':<22}{'predicted':>12}{'measured':>12}{'error':>9}{'n':>6}"]
    several = len({row.run for row in rows}) > 1
    heading = None
    for row in rows:
        if several and row.run != heading:
            lines.append(f"{row.run}:")
        heading = row.run
        numbers = "".join(f"{value:>12,.{1 if abs(value) < 1000 else 0}f}" for value in (row.predicted, row.measured))
        lines.append(f"{row.part:<12}{row.metric:<22}{numbers}{row.error:>+9.1%}{row.num_samples:>6}")
    return "\n".join(lines)
