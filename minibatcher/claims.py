"""Small calculations behind the claims of the chapters. A chapter prints them, a test asserts them."""

from __future__ import annotations

from collections.abc import Sequence


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
