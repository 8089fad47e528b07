"""Rows 1.2, 1.3, 1.7: the two wastes of a padded, fixed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runners.roofline import CostModel
from ..simulate import run_simulation
from ..timeline import RowState, Timeline
from ..workload import lognormal


def padding_factors(prompt_lengths: Sequence[int]) -> list[float]:
    """For each prompt of one padded batch: tokens computed in its row of the prefill / tokens that it has."""
    longest = max(prompt_lengths)
    return [longest / length for length in prompt_lengths]


def ended_rows(output_lengths: Sequence[int]) -> list[int]:
    """For each step of a fixed batch, first to last: rows whose request has ended already.

    A request that generates n tokens is at work in n steps, the prefill being the first. The batch runs until its
    longest request has ended, and all its rows are computed in every step.
    """
    return [sum(length <= step for length in output_lengths) for step in range(max(output_lengths))]


@dataclass(frozen=True)
class PaddedRow:
    """What one prompt of a padded batch needs and what its row computes: tokens, and FLOPs of the whole model."""

    prompt_tokens: int
    row_tokens: int
    token_factor: float
    flops_factor: float


def padded_prefill(cost: CostModel, prompt_lengths: Sequence[int] = (50, 4_000)) -> list[PaddedRow]:
    """Row 1.2: what each prompt pays for its longest neighbour.

    token_factor is the book's 80 for 50 tokens beside 4,000: tokens through the linear layers. flops_factor is larger,
    because the pairs of attention grow with the square of the row's width.
    """
    model, longest = cost.model, max(prompt_lengths)

    def flops(n: int) -> float:
        return model.linear_flops(n, 1) + model.attention_flops(n * (n + 1) / 2)

    return [PaddedRow(n, longest, longest / n, flops(longest) / flops(n)) for n in prompt_lengths]


@dataclass(frozen=True)
class FastestFinisher:
    """A fixed batch whose requests end at two times. Shares are of the batch's steps, or of all its rows in all steps.

    max_ended_rows: the most rows that are computed for nobody at once. share_of_steps: steps with that many.
    share_of_decode_steps: the same without the first step, the prefill. wasted_share: rows computed for nobody.
    """

    num_short: int
    short_tokens: int
    num_long: int
    long_tokens: int
    num_steps: int
    max_ended_rows: int
    share_of_steps: float
    share_of_decode_steps: float
    wasted_share: float


def fastest_finisher(num_short: int = 31, short_tokens: int = 20, num_long: int = 1, long_tokens: int = 2_000):
    """Row 1.3: steps that a fixed batch runs for its slowest requests alone; returns a FastestFinisher.

    The book's 99 % holds for 31 requests of 20 tokens beside one of 2,000. With one of 20 beside 31 of 2,000 there are
    as many such steps, but one row is wasted in them, not 31.
    """
    ended = ended_rows([short_tokens] * num_short + [long_tokens] * num_long)
    most = max(ended)
    return FastestFinisher(
        num_short,
        short_tokens,
        num_long,
        long_tokens,
        num_steps=len(ended),
        max_ended_rows=most,
        share_of_steps=ended.count(most) / len(ended),
        share_of_decode_steps=ended[1:].count(most) / (len(ended) - 1),
        wasted_share=sum(ended) / (len(ended) * (num_short + num_long)),
    )


@dataclass(frozen=True)
class BatchWaste:
    """The two wastes of a run of fixed batches.

    prompt_padding: padding tokens in the prefills / prompt tokens computed there, padding included. ended_share: rows
    computed for a request that has ended / all rows computed, in steps x rows. prefill_s, decode_s: seconds in each.
    """

    num_batches: int
    prompt_padding: float
    ended_share: float
    prefill_s: float
    decode_s: float


def bucketing(
    cost: CostModel, *, num_requests: int = 256, max_num_seqs: int = 16, seed: int = 0
) -> dict[str, BatchWaste]:
    """Row 1.7: batches in order of arrival against batches of prompts of similar length ("arrival", "bucketed").

    All requests are there at once; prompt and output lengths are long-tailed and independent of each other, as nobody
    knows the length of an answer from that of its prompt.
    """
    workload = lognormal(num_requests, prompt_mean=400, output_mean=60, cv=1.2, seed=seed)
    runs = {}
    for name, bucket in (("arrival", False), ("bucketed", True)):
        options: dict[str, Any] = {"max_num_seqs": max_num_seqs, "bucket_by_length": bucket}
        runs[name] = batch_waste(run_simulation(workload, cost, strategies=["dynamic"], **options)["dynamic"])
    return runs


def batch_waste(timeline: Timeline) -> BatchWaste:
    """Both wastes of a timeline of fixed batches (static, dynamic)."""
    prefills = [step for step in timeline.steps if step.admitted]
    rows = [row for step in timeline.steps for row in step.rows]
    prefill_s = sum(step.duration for step in prefills)
    return BatchWaste(
        num_batches=len(prefills),
        prompt_padding=sum(s.num_padding_tokens for s in prefills) / sum(s.num_computed_tokens for s in prefills),
        ended_share=sum(row.state is RowState.FINISHED for row in rows) / len(rows),
        prefill_s=prefill_s,
        decode_s=sum(step.duration for step in timeline.steps) - prefill_s,
    )
