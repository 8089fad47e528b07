"""Right answers to lab 7.1, and wrong ones."""

from __future__ import annotations

from collections.abc import Callable

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
            lambda n, b: (_padded_tokens(n, b)[0], _padded_tokens(n, b)[0] - sum(n)),
            "The second number is the padding; it should be the tokens that are no padding.",
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


def _bucketed(
    lengths: list[int],
    batch_size: int,
    tie: Callable[[int, int], int] = lambda number, _: number,
    arrange: Callable[[list[int]], list[int]] = sorted,
) -> list[list[int]]:
    """tie(number, its length): decides between equally near ones. arrange: the order within a batch."""
    waiting, batches = set(range(len(lengths))), []
    while waiting:
        oldest = min(waiting)
        near = sorted(waiting, key=lambda i: (i != oldest, abs(lengths[i] - lengths[oldest]), tie(i, lengths[i])))
        batches.append(arrange(near[:batch_size]))
        waiting.difference_update(batches[-1])
    return batches


def _sorted_by_length(lengths: list[int], batch_size: int) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return [sorted(batch) for batch in _batches(order, batch_size)]


def _nearest_to_the_last(lengths: list[int], batch_size: int) -> list[list[int]]:
    waiting, batches = list(range(len(lengths))), []
    while waiting:
        batch = [waiting.pop(0)]
        while waiting and len(batch) < batch_size:
            last = lengths[batch[-1]]
            batch.append(waiting.pop(min(range(len(waiting)), key=lambda k: abs(lengths[waiting[k]] - last))))
        batches.append(sorted(batch))
    return batches


def _left_by_nearness(lengths: list[int], batch_size: int) -> list[list[int]]:
    waiting, batches = list(range(len(lengths))), []
    while waiting:
        first = waiting.pop(0)  # the oldest in the first batch only
        waiting.sort(key=lambda i: abs(lengths[i] - lengths[first]))
        batches.append(sorted([first, *waiting[: batch_size - 1]]))
        waiting = waiting[batch_size - 1 :]
    return batches


BUCKETS = Key(
    answer=_bucketed,
    mistakes=(
        Mistake(
            _sorted_by_length,
            "You sort all requests by length, so the oldest may wait to the end. Each batch begins with the oldest.",
        ),
        Mistake(
            lambda n, b: _bucketed(n, b, tie=lambda i, _: -i),
            "Two requests are equally near, and you take the younger; the older one goes first.",
        ),
        Mistake(
            lambda n, b: _bucketed(n, b, tie=lambda _, length: length),
            "Two requests are equally near, and you take the shorter; the older one goes first.",
        ),
        Mistake(
            lambda n, b: _bucketed(n, b, arrange=list),
            "The batches are right, but the numbers within a batch are not in order of arrival.",
        ),
        Mistake(
            lambda n, b: _batches(list(range(len(n))), b),
            "These are the batches in order of arrival. Fill a batch with those nearest in length to its oldest.",
        ),
        Mistake(
            _nearest_to_the_last,
            "You compare with the request added last, so a batch drifts away. Compare with the oldest of the batch.",
        ),
        Mistake(
            _left_by_nearness,
            "The first batch is right. Then those who wait stand in order of length: look for the oldest again.",
        ),
        Mistake(
            lambda n, b: [[n[i] for i in batch] for batch in _bucketed(n, b)],
            "You return the lengths; return the numbers of the requests, counted from zero.",
        ),
        Mistake(
            lambda n, b: [batch for batch in _bucketed(n, b) if len(batch) == b],
            "The requests that do not fill a last batch are left out; they have to be served too.",
        ),
    ),
)


def _static_batch(
    prompts: list[list[int]],
    max_tokens: list[int],
    forward: Callable,
    eos: int,
    *,
    ends: Callable[[list[int], int], bool] | None = None,
    stop: Callable = all,
    grow: bool = False,
    keep_writing: bool = False,
    shrink: bool = False,
    drop_eos: bool = False,
) -> list[list[int]]:
    """ends(answer, limit): whether a request has ended. The other switches make the mistakes below."""
    ends = ends or (lambda answer, limit: eos in answer or len(answer) >= limit)
    answers: list[list[int]] = [[] for _ in prompts]
    rows = [list(prompt) for prompt in prompts]
    over = [False] * len(prompts)
    while not stop(over):
        there = [i for i in range(len(rows)) if not (shrink and over[i])]
        width = max(len(rows[i]) for i in there)
        tokens = forward([rows[i] + [0] * (width - len(rows[i])) for i in there], [len(rows[i]) for i in there])
        for i, token in zip(there, tokens):
            if drop_eos and token == eos:
                over[i] = True
                continue
            if not over[i] or grow or keep_writing:
                rows[i].append(token)
            if not over[i] or keep_writing:
                answers[i].append(token)
            over[i] = over[i] or ends(answers[i], max_tokens[i])
    return answers


def _without_eos(prompts, max_tokens, forward, eos):
    return [[token for token in answer if token != eos] for answer in _static_batch(prompts, max_tokens, forward, eos)]


STATIC_LOOP = Key(
    answer=_static_batch,
    mistakes=(
        Mistake(
            lambda p, m, f, e: _static_batch(p, m, f, e, ends=lambda answer, limit: len(answer) >= limit),
            "You let every request run to its max_tokens. It also ends when its new token is eos.",
        ),
        Mistake(
            lambda p, m, f, e: _static_batch(p, m, f, e, ends=lambda a, _: e in a or len(a) >= max(m)),
            "Each request has a max_tokens of its own; you give all of them the largest one.",
        ),
        Mistake(
            lambda p, m, f, e: _static_batch(p, m, f, e, ends=lambda a, limit: e in a or len(a) > limit),
            "A request may get max_tokens tokens and no more; yours gets one more.",
        ),
        Mistake(
            lambda p, m, f, e: _static_batch(p, m, f, e, stop=any),
            "You stop when the first request has ended. A static batch runs until every one has.",
        ),
        Mistake(
            lambda p, m, f, e: _static_batch(p, m, f, e, keep_writing=True),
            "You go on writing to a request that has ended. Throw its further tokens away.",
        ),
        Mistake(
            lambda p, m, f, e: _static_batch(p, m, f, e, grow=True),
            "The answers are right, but the row of a request that has ended still grows. Leave that row as it is.",
        ),
        Mistake(
            lambda p, m, f, e: _static_batch(p, m, f, e, shrink=True),
            "You take the rows of ended requests out of the batch. That is chapter 7.2; in a static batch they stay.",
        ),
        Mistake(
            lambda p, m, f, e: _static_batch(p, m, f, e, drop_eos=True),
            "You end a request at its eos and do not write it down. It belongs to the answer, and to the row.",
        ),
        Mistake(_without_eos, "The eos that ends an answer is part of it; you leave it out."),
        Mistake(
            lambda p, m, f, e: [a + b for a, b in zip(p, _static_batch(p, m, f, e))],
            "You return the whole sequences; return the new tokens alone, without the prompt.",
        ),
        Mistake(
            lambda p, m, f, e: _static_batch(p, m, lambda rows, _: f(rows, [len(row) for row in rows]), e),
            "The lengths are those of the padded rows. Give the lengths without padding; the token depends on them.",
        ),
    ),
)


def _launches(
    arrivals: list[int],
    size: int,
    delay: int,
    service: int,
    *,
    ready: Callable[[list[int], int], int] | None = None,
    busy: bool = True,
    joins: Callable[[int, int, int], bool] = lambda arrival, start, ready_at: arrival <= start,
    idle_first: bool = False,
    no_limit: bool = False,
) -> list[tuple[int, list[int]]]:
    """ready(arrivals of those left, delay): when the batch would launch on a free server."""

    def usual(left: list[int], wait: int) -> int:
        return min([left[0] + wait, *left[size - 1 : size]])

    made: list[tuple[int, list[int]]] = []
    first = free = 0
    while first < len(arrivals):
        left = arrivals[first:]
        ready_at = (ready or usual)(left, delay)
        if idle_first:  # the clock starts only when the server is free
            start = max(free, min([max(left[0], free) + delay, *left[size - 1 : size]]))
        else:
            start = max(ready_at, free) if busy else ready_at
        count = max(1, sum(joins(arrival, start, ready_at) for arrival in left))
        batch = list(range(first, first + (count if no_limit else min(count, size))))
        made.append((start, batch))
        first, free = batch[-1] + 1, start + service
    return made


DYNAMIC = Key(
    answer=_launches,
    mistakes=(
        Mistake(
            lambda a, b, d, s: _launches(a, b, d, s, busy=False),
            "You launch while the previous batch is still running. There is one server; wait for its end.",
        ),
        Mistake(
            lambda a, b, d, s: _launches(a, b, d, s, ready=lambda left, wait: left[0] + wait),
            "You always wait for the whole delay. A batch that is full has nobody to wait for.",
        ),
        Mistake(
            lambda a, b, d, s: _launches(a, b, d, s, ready=lambda left, _: left[min(b, len(left)) - 1]),
            "You wait until the batch is full, or for the last request of all. A batch waits max_delay_ms at most.",
        ),
        Mistake(
            lambda a, b, d, s: _launches(
                a, b, d, s, ready=lambda left, wait: min(left[0] + wait, left[min(b, len(left)) - 1])
            ),
            "You launch when the last request of all is there. The batcher can't know that nobody else comes.",
        ),
        Mistake(
            lambda a, b, d, s: _launches(a, b, d, s, ready=lambda left, _: left[0]),
            "You launch as soon as the server is free. A batch that is not full waits for max_delay_ms.",
        ),
        Mistake(
            lambda a, b, d, s: _launches(a, b, d, s, joins=lambda arrival, start, _: arrival < start),
            "A request that arrives exactly at the launch joins the batch; you leave it out.",
        ),
        Mistake(
            lambda a, b, d, s: _launches(a, b, d, s, joins=lambda arrival, _, ready_at: arrival <= ready_at),
            "You close the batch before it launches. While it waits for the server, others may join up to the size.",
        ),
        Mistake(
            lambda a, b, d, s: _launches(a, b, d, s, idle_first=True),
            "You start the delay when the server is free. It starts when the oldest request arrives.",
        ),
        Mistake(
            lambda a, b, d, s: _launches(a, b, d, s, no_limit=True),
            "A batch holds at most max_batch_size requests; the others wait for the next one.",
        ),
        Mistake(
            lambda a, b, d, s: [(start, [a[i] for i in batch]) for start, batch in _launches(a, b, d, s)],
            "You return the arrivals; return the numbers of the requests, counted from zero.",
        ),
    ),
)

KEYS = {
    "7.1-padding": PADDING,
    "7.1-fastest-finisher": FASTEST_FINISHER,
    "7.1-buckets": BUCKETS,
    "7.1-static-loop": STATIC_LOOP,
    "7.1-dynamic": DYNAMIC,
}
