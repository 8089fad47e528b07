"""What the answers of lab 7.1 are put through."""

from __future__ import annotations

import random

from ..judging import Task, pair_of, returns, whole_number


def _cases(rng: random.Random) -> list[tuple[list[int], int]]:
    """Lengths and a batch size: an incomplete last batch, a batch of one, one single batch, then anything."""
    cases = [([3, 7, 5], 2), ([4, 9, 2], 1), ([6, 2, 11, 5], 8)]
    for size in sorted(rng.randint(2, 40) for _ in range(60)):
        lengths = [round(rng.lognormvariate(3, 1)) + 1 for _ in range(size)]
        cases.append((lengths, rng.randint(1, 12)))
    return cases


TASKS = {
    "7.1-padding": Task(
        cases=_cases,
        play=returns(pair_of("computed tokens", "useful tokens")),
        names=("prompt_lengths", "batch_size"),
        success="right, every batch is padded to its own longest prompt",
    ),
    "7.1-fastest-finisher": Task(
        cases=_cases,
        play=returns(whole_number),
        names=("output_lengths", "batch_size"),
        success="right, every row waits for the longest one of its batch",
    ),
}
