"""How far a cost model's prediction of a measured run is off, and for which part of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..metrics import PERCENTILES
from .replay import Outcome
from .runs import MeasuredRequest, MeasuredRun

WHOLE, HELD_OUT, FITTED = "whole run", "hold-out", "fitted part"


@dataclass(frozen=True)
class Row:
    """One figure. error: (predicted - measured) / measured."""

    part: str
    metric: str
    predicted: float
    measured: float
    num_samples: int

    @property
    def error(self) -> float:
        return (self.predicted - self.measured) / self.measured


def compare(run: MeasuredRun, outcomes: dict[str, Outcome], horizon: float) -> list[Row]:
    """Rows for the whole run, and latencies of the requests whose token came after `horizon` and of all the others.

    The percentiles are those of `minibatcher compare`: interpolated linearly between sorted samples.
    """
    ended = [o.last_token_time for o in outcomes.values() if o.last_token_time is not None]
    makespan = max(ended)
    tokens, count = sum(r.output_tokens for r in run.requests), len(run.requests)
    rows = [
        Row(WHOLE, "makespan_s", makespan, run.makespan, count),
        Row(WHOLE, "output_tokens_per_s", tokens / makespan, tokens / run.makespan, count),
    ]
    if 0 < horizon < run.makespan:
        rows.append(Row(HELD_OUT, "seconds_left", makespan - horizon, run.makespan - horizon, count))
    for part in (HELD_OUT, FITTED) if horizon > 0 else (WHOLE,):
        for metric, moment, of_run, of_outcome in _LATENCIES:
            late = [
                r
                for r in run.requests
                if of_run(r) is not None and (part == WHOLE or (getattr(r, moment) > horizon) == (part == HELD_OUT))
            ]
            rows += _percentiles(part, metric, late, of_run, of_outcome, outcomes)
    return rows


def _percentiles(
    part: str,
    metric: str,
    requests: Sequence[MeasuredRequest],
    of_run: Callable[[MeasuredRequest], float],
    of_outcome: Callable[[MeasuredRequest, Outcome], float],
    outcomes: dict[str, Outcome],
) -> list[Row]:
    if not requests:
        return []
    measured = np.percentile([of_run(r) for r in requests], PERCENTILES) * 1e3
    predicted = np.percentile([of_outcome(r, outcomes[r.request_id]) for r in requests], PERCENTILES) * 1e3
    return [
        Row(part, f"{metric}_ms p{p}", float(a), float(b), len(requests))
        for p, a, b in zip(PERCENTILES, predicted, measured)
    ]


_LATENCIES = (
    (
        "ttft",
        "first_token_time",
        lambda r: r.ttft,
        lambda r, o: o.first_token_time - r.arrival_time,
    ),
    (
        "tpot",
        "last_token_time",
        lambda r: r.tpot,
        lambda r, o: (o.last_token_time - o.first_token_time) / (r.output_tokens - 1),
    ),
)


def table(rows: Sequence[Row]) -> str:
    """The rows as text: part, metric, predicted, measured, error in per cent, samples."""
    lines = [f"{'part':<12}{'metric':<22}{'predicted':>12}{'measured':>12}{'error':>9}{'n':>6}"]
    for row in rows:
        numbers = "".join(f"{value:>12,.{1 if abs(value) < 1000 else 0}f}" for value in (row.predicted, row.measured))
        lines.append(f"{row.part:<12}{row.metric:<22}{numbers}{row.error:>+8.1%}{row.num_samples:>7}")
    return "\n".join(lines)
