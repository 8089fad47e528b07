"""What the answers of lab 7.1 are put through."""

from __future__ import annotations

import random
from collections.abc import Callable

from ..judging import Log, Task, Unfit, list_of, pair_of, returns, whole_number


def _cases(rng: random.Random) -> list[tuple[list[int], int]]:
    """Lengths and a batch size: an incomplete last batch, a batch of one, one single batch, then anything."""
    cases = [([3, 7, 5], 2), ([4, 9, 2], 1), ([6, 2, 11, 5], 8)]
    for size in sorted(rng.randint(2, 40) for _ in range(60)):
        lengths = [round(rng.lognormvariate(3, 1)) + 1 for _ in range(size)]
        cases.append((lengths, rng.randint(1, 12)))
    return cases


def _bucket_cases(rng: random.Random) -> list[tuple[list[int], int]]:
    """Ties, a batch of one, one single batch, then few different lengths (many ties) and many."""
    cases = [([5, 40, 6, 38, 4], 2), ([9, 3, 7], 1), ([4, 30, 5], 8), ([10, 13, 7, 10, 30, 12, 8], 3)]
    for size in sorted(rng.randint(2, 24) for _ in range(50)):
        longest = rng.choice([12, 60, 2000])
        cases.append(([rng.randint(1, longest) for _ in range(size)], rng.randint(1, 7)))
    return cases


def _loop_cases(rng: random.Random) -> list[tuple[list[list[int]], list[int], int, int]]:
    """Prompts, max_tokens, the end-of-sequence token, and a number that makes each case's model another one."""
    cases = [([[5, 6]], [2], 9, 1), ([[5, 6], [7]], [3, 1], 9, 2), ([[3, 9, 4], [8], [2, 2]], [2, 6, 4], 9, 3)]
    for size in sorted(rng.randint(1, 7) for _ in range(40)):
        vocabulary = rng.choice([6, 12, 40])
        prompts = [[rng.randrange(vocabulary) for _ in range(rng.randint(1, 9))] for _ in range(size)]
        limits = [rng.randint(1, 12) for _ in range(size)]
        cases.append((prompts, limits, rng.randrange(vocabulary), rng.randrange(1, 1000)))
    return cases


def _next_token(tokens: list[int], eos: int, salt: int) -> int:
    """A model of a few lines: every token of the sequence counts, and where it stands; about one in six is eos."""
    state = salt
    for token in tokens:
        state = (state * 31 + token + 7) % 1_000_003
    return eos if state % 6 == 0 else (state // 6) % 40


def _forward(log: Log, limits: list[int], eos: int, salt: int) -> Callable[..., list[int]]:
    """The forward pass that an answer gets; it looks at what it is given, and at whether anybody needs it."""
    passes = 0
    ended: set[int] = set()

    def forward(rows: list[list[int]], lengths: list[int]) -> list[int]:
        nonlocal passes
        passes += 1
        log.at(f"forward pass {passes}")
        if len(ended) == len(limits):
            raise Unfit("one pass too many: every request has ended, by eos or by its max_tokens")
        sequences, width = _read_rows(rows, lengths)
        log.see("sequences, without their padding", sequences, "Every row, ended or not: prompt and tokens so far.")
        log.see("width", width, "Pad to the longest sequence, and no further.")
        tokens = [_next_token(sequence, eos, salt) for sequence in sequences]
        ended.update(i for i, token in enumerate(tokens) if i < len(limits) and (token == eos or passes >= limits[i]))
        return tokens

    return forward


def _read_rows(rows: list[list[int]], lengths: list[int]) -> tuple[list[list[int]], int]:
    """The sequences without padding, and the width. Raises Unfit."""
    rows, lengths = list_of(list_of(whole_number))(rows), list_of(whole_number)(lengths)
    widths = [len(row) for row in rows]
    if len(set(widths)) != 1:
        raise Unfit(f"got rows of {widths} tokens; a pass needs equally long rows, at least one")
    if len(lengths) != len(rows):
        raise Unfit(f"got {len(rows)} rows and {len(lengths)} lengths")
    for i, (row, length) in enumerate(zip(rows, lengths)):
        if not 1 <= length <= len(row):
            raise Unfit(f"length {length} of row {i} does not fit into its {len(row)} tokens")
        if any(row[length:]):
            raise Unfit(f"row {i} is {row} with length {length}; what stands behind the sequence must be 0")
    return [row[:length] for row, length in zip(rows, lengths)], widths[0]


def _play_loop(answer: Callable, log: Log, prompts: list[list[int]], limits: list[int], eos: int, salt: int) -> None:
    given = [list(prompt) for prompt in prompts], list(limits)
    answers = list_of(list_of(whole_number))(answer(prompts, limits, _forward(log, given[1], eos, salt), eos))
    log.at("")
    log.see("answers", answers, "The new tokens of each request, eos included, in the order of the requests.")
    unchanged = (prompts, limits) == given
    log.see("prompts and max_tokens are as they were", unchanged, "Copy a prompt before you append to it.")


def _arrival_cases(rng: random.Random) -> list[tuple[list[int], int, int, int]]:
    """A lone request, one full batch, the lab's worked case; then bursts and gaps, a delay of zero, size one."""
    cases = [
        ([5], 4, 10, 20),
        ([0, 3], 2, 10, 20),
        ([0, 4, 15, 28, 52, 53, 54], 3, 10, 20),
        ([0, 10, 20, 21], 3, 10, 9),
    ]
    for size in sorted(rng.randint(2, 24) for _ in range(50)):
        now, arrivals, gap = rng.randint(0, 5), [], rng.choice([3, 12, 40])
        for _ in range(size):
            arrivals.append(now)
            now += rng.choice([0, rng.randint(0, gap), gap])
        delay = rng.choice([0, gap, rng.randint(1, 60)])
        cases.append((arrivals, rng.randint(1, 6), delay, rng.randint(1, 50)))
    return cases


def _play_launches(answer: Callable, log: Log, *arguments) -> None:
    launch = pair_of("launch", "requests", read=lambda part: part)
    for i, made in enumerate(list_of(launch)(answer(*arguments)), start=1):
        log.at(f"batch {i}")
        log.see("launch in ms", whole_number(made["launch"]), "Full, or the oldest has waited; and the server is free.")
        log.see("requests", list_of(whole_number)(made["requests"]), "Who has arrived by the launch, up to the size.")


TASKS = {
    "7.1-padding": Task(
        cases=_cases,
        play=returns(pair_of("computed tokens", "useful tokens")),
        names=("prompt_lengths", "batch_size"),
        success="right, every batch is padded to its own longest prompt",
    ),
    "7.1-fastest-finisher": Task(
        cases=lambda rng: [([2, 5, 3], 2), *_cases(rng)],
        play=returns(whole_number),
        names=("output_lengths", "batch_size"),
        success="right, every row waits for the longest one of its batch",
    ),
    "7.1-buckets": Task(
        cases=_bucket_cases,
        play=returns(list_of(list_of(whole_number))),
        names=("prompt_lengths", "batch_size"),
        success="right, alike lengths share a batch and the oldest request never waits for a younger one",
    ),
    "7.1-static-loop": Task(
        cases=_loop_cases,
        play=_play_loop,
        describe=lambda prompts, limits, eos, _: f"with prompts={prompts}, max_tokens={limits}, eos={eos}",
        success="right, the batch runs until its last request has ended, and not one pass longer",
    ),
    "7.1-dynamic": Task(
        cases=_arrival_cases,
        play=_play_launches,
        names=("arrivals_ms", "max_batch_size", "max_delay_ms", "service_ms"),
        success="right, a batch waits for the size, the delay and the server, and for nothing else",
    ),
}
