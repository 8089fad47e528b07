"""Right answers to lab 7.1, and wrong ones."""

from __future__ import annotations

from ..judging import Key, Mistake


def _batches(lengths: list[int], batch_size: int) -> list[list[int]]:
    return [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]


def _padded_tokens(lengths: list[int], batch_size: int) -> tuple[int, int]:
    batches = _batches(lengths, batch_size)
    return sum(len(b) * max(b) for b in batches), sum(lengths)


def _wasted_row_steps(lengths: list[int], batch_size: int) -> int:
    return sum(max(b) - n for b in _batches(lengths, batch_size) for n in b)


PADDING = Key(
    answer=_padded_tokens,
    mistakes=(
        Mistake(
            lambda n, b: (len(n) * max(n), sum(n)),
            "You pad all prompts to the longest of the whole list; a batch is padded to its own longest prompt.",
        ),
        Mistake(
            lambda n, b: (sum(b * max(batch) for batch in _batches(n, b)), sum(n)),
            "The last batch may be incomplete: it has fewer rows, and rows that do not exist cost nothing.",
        ),
        Mistake(
            lambda n, b: _padded_tokens(n[: len(n) // b * b], b),
            "The requests that do not fill a last batch are left out; they have to be served too.",
        ),
        Mistake(
            lambda n, b: _padded_tokens(sorted(n), b),
            "You sort the prompts first. Static batching takes them in order of arrival; sorting lowers the padding.",
        ),
        Mistake(
            lambda n, b: (_padded_tokens(n, b)[0] - sum(n), sum(n)),
            "The first number is the padding alone; it should be all computed tokens, the useful ones included.",
        ),
        Mistake(
            lambda n, b: _padded_tokens(n, b)[::-1],
            "The two numbers are swapped: computed tokens come first, useful ones second.",
        ),
    ),
)

FASTEST_FINISHER = Key(
    answer=_wasted_row_steps,
    mistakes=(
        Mistake(
            lambda n, b: sum(max(n) - x for x in n),
            "You let every request wait for the longest of the whole list; it waits for the longest of its own batch.",
        ),
        Mistake(
            lambda n, b: sum(max(batch) - min(batch) for batch in _batches(n, b)),
            "You count one row a batch, the shortest. Every row that has ended wastes a token in each further step.",
        ),
        Mistake(
            lambda n, b: sum(b * max(batch) - sum(batch) for batch in _batches(n, b)),
            "The last batch may be incomplete: slots without a request compute nothing, so they waste no row-steps.",
        ),
        Mistake(
            lambda n, b: sum(len(batch) * max(batch) for batch in _batches(n, b)),
            "These are all row-steps. Leave out the useful ones: a request of n tokens uses n of its row's steps.",
        ),
        Mistake(
            lambda n, b: sum(max(batch) for batch in _batches(n, b)),
            "This is the number of steps. Count row-steps: each row that has ended wastes one in each step.",
        ),
        Mistake(
            lambda n, b: _wasted_row_steps(sorted(n), b),
            "You sort the requests first. A server can't: it does not know how long an answer will be.",
        ),
        Mistake(
            lambda n, b: _wasted_row_steps(n[: len(n) // b * b], b),
            "The requests that do not fill a last batch are left out; they have to be served too.",
        ),
    ),
)

KEYS = {"7.1-padding": PADDING, "7.1-fastest-finisher": FASTEST_FINISHER}
