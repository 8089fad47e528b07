"""Workloads drawn from the fitted profiles of real traces: figures that describe a trace, none of its rows.

`profiles.json` (made by `python -m minibatcher.workload.fit`) holds for each trace the quantiles of prompt and output
lengths, their rank correlation and the arrival statistics, with source, licence and citation.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UnknownName
from .arrivals import arrival_times, check_count, check_rate, from_gaps, stream
from .base import Workload
from .generators import assemble

# Uniform draws are stratified: each block of this many requests has one draw in each of as many equal slices of (0, 1).
# So a sample of a trace's own size meets its 99th percentile, and its mean rate however bursty; independent draws miss
# them by more than 5 % now and then. Blocks are drawn one after the other, which keeps shorter samples prefixes.
BLOCK = 10_000


@cache
def profiles() -> dict[str, dict[str, Any]]:
    """All fitted profiles by name, as `profiles.json` has them."""
    return json.loads(Path(__file__).with_name("profiles.json").read_text(encoding="utf-8"))


def profile(
    name: str,
    num_requests: int,
    *,
    seed: int = 0,
    request_rate: float | None = None,
    arrivals: str = "trace",
    arrival_cv: float = 1.0,
) -> Workload:
    """Draw a workload that resembles a trace, for instance `azure-conv`.

    Lengths (tokens) follow the trace's quantiles, interpolated between; a Gaussian copula gives prompt and output
    lengths the trace's rank correlation. `request_rate` is in requests per second: None keeps the trace's own. With
    `arrivals="trace"` gaps follow the trace (its quantiles of gaps, or a gamma law where its clock is too coarse);
    `poisson`, `gamma` (with `arrival_cv`) and `all-at-once` replace them. Gaps are drawn independently of each other:
    slow swings of the load within the traced hour are not reproduced. Raises `UnknownName`.
    """
    if name not in profiles():
        raise UnknownName("profile", name, sorted(profiles()))
    check_count(num_requests)
    fitted = profiles()[name]
    rate = fitted["arrivals"]["rate_per_s"] if request_rate is None else request_rate
    check_rate(rate)
    levels = np.array(fitted["levels_percent"]) / 100
    rho = 2 * math.sin(math.pi * fitted["spearman"] / 6)  # of the normal pair whose ranks correlate as the trace's
    u_prompt, u_output = _stratified_pair(seed, f"{name}/lengths", num_requests, rho)
    prompt = np.interp(u_prompt, levels, fitted["prompt_tokens"]["quantiles"])
    output = np.interp(u_output, levels, fitted["output_tokens"]["quantiles"])

    gaps = fitted["arrivals"]["gap_quantiles_s"]
    if arrivals != "trace":
        times = arrival_times(num_requests, rate, arrivals, cv=arrival_cv, seed=seed)
    elif gaps is None or math.isinf(rate):
        times = arrival_times(num_requests, rate, "gamma", cv=fitted["arrivals"]["gap_cv"], seed=seed)
    else:
        gaps = np.array(gaps)
        mean_gap = ((gaps[1:] + gaps[:-1]) / 2 * np.diff(levels)).sum()  # of the interpolated table
        u_gap, _ = _stratified_pair(seed, f"{name}/gaps", num_requests, 0.0)
        times = from_gaps(np.interp(u_gap, levels, gaps) / (mean_gap * rate))
    source = f"Drawn from a profile fitted to {fitted['source']} Licence: {fitted['licence']}. {fitted['citation']}"
    return assemble(name, prompt, output, times, source=source)


def _stratified_pair(seed: int, name: str, count: int, rho: float) -> np.ndarray:
    """Two rows of uniform draws, float64 [2, count], each stratified, whose normal scores correlate by `rho`."""
    shape = (-(-count // BLOCK), 2, BLOCK)
    normal = stream(seed, f"{name}/ranks").standard_normal(shape)
    normal[:, 1] = rho * normal[:, 0] + math.sqrt(1 - rho * rho) * normal[:, 1]
    ranks = normal.argsort(axis=-1).argsort(axis=-1)
    draws = (ranks + stream(seed, f"{name}/within").random(shape)) / BLOCK
    return draws.swapaxes(0, 1).reshape(2, -1)[:, :count]
