"""Rows 3.1, 3.2, 3.3: a long prompt in front of running decodes, and what a token budget does about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..metrics import itl, summarize, ttft
from ..runners.roofline import CostModel
from ..simulate import run_simulation
from ..timeline import RowState, Timeline
from ..workload import Workload, WorkloadRequest, profile
from .common import percentile


@dataclass(frozen=True)
class Stall:
    """Running decodes while a newcomer's prompt is computed. Times in seconds.

    typical_itl_s: median gap between their tokens before it came. worst_itl_s: longest gap from its arrival to its
    first token. stalled: decodes that got no token in a step of that time. ttft_s: its time to first token.
    prefill_steps: steps that computed some of its prompt.
    """

    policy: str
    num_decodes: int
    typical_itl_s: float
    worst_itl_s: float
    stalled: int
    ttft_s: float
    prefill_steps: int

    @property
    def spike(self) -> float:
        """Longest gap / typical gap."""
        return self.worst_itl_s / self.typical_itl_s


def prefill_stall(
    cost: CostModel, *, num_decodes: int = 30, prompt_tokens: int = 4_000, chunks: Sequence[int] = (128, 512, 2_048)
) -> dict[str, Stall]:
    """Rows 3.1, 3.2: `num_decodes` running sequences, then one prompt of `prompt_tokens`, under several policies.

    "whole": continuous batching computes the prompt in one step, and all wait. "late": it is let in when a running
    sequence has ended. "chunk N": a token budget of N a step (chunked prefill), the decodes' tokens among them.
    """
    policies = {
        "whole": ("continuous", {"max_num_seqs": num_decodes + 1}),
        "late": ("continuous", {"max_num_seqs": num_decodes}),
    }
    for size in chunks:
        policies[f"chunk {size}"] = ("chunked", {"max_num_seqs": num_decodes + 1, "max_num_batched_tokens": size})
    rows = [WorkloadRequest(f"d{i}", 0.0, 500, 400) for i in range(num_decodes)]
    rows.append(WorkloadRequest("newcomer", 6.0, prompt_tokens, 20))
    workload = Workload("decodes, then one prompt", tuple(rows), "Made up for this claim.")
    found = {}
    for policy, (strategy, options) in policies.items():
        knobs: dict[str, Any] = {"max_num_batched_tokens": 8_192, **options}
        timeline = run_simulation(workload, cost, strategies=[strategy], **knobs)[strategy]
        found[policy] = _stall(timeline, policy)
    return found


def _stall(timeline: Timeline, policy: str) -> Stall:
    newcomer = timeline.requests["newcomer"]
    came, answered = newcomer.arrival_time, newcomer.token_times[0]
    before, during = [], []
    for record in timeline.requests.values():
        if record is newcomer:
            continue
        gaps = list(pairwise(record.token_times))
        before += [end - start for start, end in gaps if end <= came]
        during.append(max((end - start for start, end in gaps if end > came and start < answered), default=0.0))
    typical = percentile(before, 50)
    steps = [step for step in timeline.steps if step.end > came and step.start < answered]
    working = [{row.request_id for row in step.rows if row.num_tokens} for step in steps]
    prefill_steps = sum("newcomer" in names for names in working)
    stalled = {row.request_id for step in steps for row in step.rows if row.state is RowState.STALLED}
    first = ttft(newcomer)
    assert first is not None  # it was served
    return Stall(policy, len(during), typical, max(during), len(stalled), first, prefill_steps)


@dataclass(frozen=True)
class BudgetPoint:
    """One token budget. TTFT and ITL in seconds, over all requests."""

    max_num_batched_tokens: int
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    longest_step_s: float


def budget_sweep(
    cost: CostModel,
    *,
    budgets: Sequence[int] = (128, 256, 512, 1_024, 2_048, 8_192),
    request_rate: float = 2.0,
    num_requests: int = 200,
    max_num_seqs: int = 64,
    seed: int = 0,
) -> list[BudgetPoint]:
    """Row 3.3: chunked prefill against its token budget, on requests that resemble the Azure conversation trace.

    A larger budget ends prompts sooner (TTFT) and makes the steps longer that running requests wait for (ITL).
    Source: Agrawal et al., Sarathi-Serve, OSDI 2024, section 4.
    """
    workload = profile("azure-conv", num_requests, request_rate=request_rate, seed=seed).fit_to_context(8_192)
    points = []
    for budget in budgets:
        options: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
        timeline = run_simulation(workload, cost, strategies=["chunked"], **options)["chunked"]
        records = timeline.requests.values()
        first, gaps = [ttft(r) for r in records], [gap for r in records for gap in itl(r)]
        points.append(
            BudgetPoint(
                budget,
                summarize(timeline)["output_tokens_per_s"],
                percentile(first, 50),
                percentile(first, 99),
                percentile(gaps, 50),
                percentile(gaps, 99),
                max(step.duration for step in timeline.steps),
            )
        )
    return points
