"""Further answers to lab 7.1: right ones, built differently, and wrong ones with a part of what they are told."""

import heapq
from itertools import count


def padding_by_request(lengths, size):
    longest = {}
    for i, length in enumerate(lengths):
        longest[i // size] = max(longest.get(i // size, 0), length)
    return [sum(longest[i // size] for i in range(len(lengths))), sum(lengths)]


def padding_recursive(lengths, size):
    if not lengths:
        return 0, 0
    computed, useful = padding_recursive(lengths[size:], size)
    return computed + len(lengths[:size]) * max(lengths[:size]), useful + sum(lengths[:size])


def wasted_step_by_step(lengths, size):
    wasted, left = 0, list(lengths)
    while left:
        batch, left = left[:size], left[size:]
        while any(batch):
            wasted += batch.count(0)
            batch = [max(0, n - 1) for n in batch]
    return wasted


def wasted_by_difference(lengths, size):
    computed, useful = padding_by_request(lengths, size)
    return computed - useful


def bucketed_one_by_one(lengths, size):
    waiting, batches = dict(enumerate(lengths)), []
    while waiting:
        oldest = next(iter(waiting))
        target, batch = waiting.pop(oldest), [oldest]
        while waiting and len(batch) < size:
            batch.append(min(waiting, key=lambda i: abs(waiting[i] - target)))
            del waiting[batch[-1]]
        batches.append(tuple(sorted(batch)))
    return tuple(batches)


def bucketed_heap(lengths, size):
    done, batches = set(), []
    for oldest in range(len(lengths)):
        if oldest in done:
            continue
        others = (i for i in range(oldest + 1, len(lengths)) if i not in done)
        near = heapq.nsmallest(size - 1, ((abs(lengths[i] - lengths[oldest]), i) for i in others))
        batches.append([oldest, *sorted(i for _, i in near)])
        done.update(batches[-1])
    return batches


def loop_with_flags(prompts, max_tokens, forward, eos):
    texts, left = [tuple(p) for p in prompts], list(max_tokens)
    while any(left):
        width = max(map(len, texts))
        for i, token in enumerate(forward([[*t, *[0] * (width - len(t))] for t in texts], [len(t) for t in texts])):
            if left[i]:
                texts[i] += (token,)
                left[i] = 0 if token == eos else left[i] - 1
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts)]


def loop_in_place(prompts, max_tokens, forward, eos):
    """One buffer that is as wide as it may ever get; a pass sees a part of it."""
    buffer = [[*p, *[0] * m] for p, m in zip(prompts, max_tokens)]
    ends = [len(p) for p in prompts]
    over = [False] * len(prompts)
    while not all(over):
        width = max(ends)
        rows = [[row[k] if k < end else 0 for k in range(width)] for row, end in zip(buffer, ends)]
        tokens = forward(rows, list(ends))
        for i in range(len(prompts)):
            if not over[i]:
                buffer[i][ends[i]] = tokens[i]
                ends[i] += 1
                over[i] = tokens[i] == eos or ends[i] == len(buffer[i])
    return [row[len(p) : end] for row, p, end in zip(buffer, prompts, ends)]


def launches_by_the_clock(arrivals, size, delay, service):
    """Millisecond by millisecond, as a server would see it."""
    queue, made, free, coming = [], [], 0, list(enumerate(arrivals))
    for now in count():
        while coming and coming[0][1] <= now:
            queue.append(coming.pop(0))
        if queue and now >= free and (len(queue) >= size or now - queue[0][1] >= delay):
            made.append([now, [i for i, _ in queue[:size]]])
            queue, free = queue[size:], now + service
        if not queue and not coming:
            return made


def launches_by_events(arrivals, size, delay, service):
    made, free, i = [], 0, 0
    while i < len(arrivals):
        batch = [i]
        due = max(arrivals[i] + delay, free)
        while len(batch) < size and batch[-1] + 1 < len(arrivals) and arrivals[batch[-1] + 1] <= due:
            batch.append(batch[-1] + 1)
        start = max(free, arrivals[batch[-1]]) if len(batch) == size else due
        made.append((start, batch))
        free, i = start + service, batch[-1] + 1
    return made


RIGHT = {
    "7.1-padding": [padding_by_request, padding_recursive],
    "7.1-fastest-finisher": [wasted_step_by_step, wasted_by_difference],
    "7.1-buckets": [bucketed_one_by_one, bucketed_heap],
    "7.1-static-loop": [loop_with_flags, loop_in_place],
    "7.1-dynamic": [launches_by_the_clock, launches_by_events],
}


def empties_its_input(lengths, size):
    lengths.clear()
    return []


def appends_to_the_prompts(prompts, max_tokens, forward, eos):
    answers = loop_with_flags(prompts, max_tokens, forward, eos)
    for prompt, answer in zip(prompts, answers):
        prompt.extend(answer)
    return answers


def counts_down_the_limits(prompts, max_tokens, forward, eos):
    answers = loop_with_flags(prompts, max_tokens, forward, eos)
    max_tokens[:] = [0] * len(max_tokens)
    return answers


def without_padding(prompts, max_tokens, forward, eos):
    return loop_with_flags(prompts, max_tokens, lambda rows, n: forward([row[:k] for row, k in zip(rows, n)], n), eos)


def padded_on_the_left(prompts, max_tokens, forward, eos):
    return loop_with_flags(
        prompts, max_tokens, lambda rows, n: forward([row[k:] + row[:k] for row, k in zip(rows, n)], n), eos
    )


def padded_with_eos(prompts, max_tokens, forward, eos):
    def padded(rows, n):
        return forward([row[:k] + [eos] * (len(row) - k) for row, k in zip(rows, n)], n)

    return loop_with_flags(prompts, max_tokens, padded, eos)


def never_stops(prompts, max_tokens, forward, eos):
    rows = [list(p) for p in prompts]
    while True:
        width = max(map(len, rows))
        for row, token in zip(rows, forward([r + [0] * (width - len(r)) for r in rows], [len(r) for r in rows])):
            row.append(token)


def one_pass_too_many(prompts, max_tokens, forward, eos):
    answers = loop_with_flags(prompts, max_tokens, forward, eos)
    forward([[1] for _ in prompts], [1] * len(prompts))
    return answers


def never_asks_the_model(prompts, max_tokens, forward, eos):
    return [[eos] for _ in prompts]


def too_wide(prompts, max_tokens, forward, eos):
    return loop_with_flags(prompts, max_tokens, lambda rows, n: forward([[*r, 0] for r in rows], n), eos)


WRONG = {
    "7.1-padding": [
        (lambda n, b: (19, 15), "expected"),
        (lambda n, b: padding_by_request(n, b)[0], "expected 2 values"),
        (lambda n, b: None, "expected 2 values"),
    ],
    "7.1-fastest-finisher": [
        (lambda n, b: 3, "expected"),
        (lambda n, b: float(wasted_step_by_step(n, b)), "expected a whole number"),
        (lambda n, b: None, "expected a whole number"),
    ],
    "7.1-buckets": [
        (lambda n, b: [[0, 2], [1, 3], [4]], "expected"),
        (lambda n, b: [i for batch in bucketed_heap(n, b) for i in batch], "expected a list"),
        (lambda n, b: None, "expected a list"),
        (empties_its_input, "expected"),
        (lambda n, b: bucketed_heap(n, b)[::-1], "expected"),
    ],
    "7.1-static-loop": [
        (lambda p, m, f, e: [[4, 9], [8]], "forward pass 1"),
        (lambda p, m, f, e: None, "expected a list"),
        (never_asks_the_model, "forward pass 1"),
        (appends_to_the_prompts, "Copy a prompt before you append to it"),
        (counts_down_the_limits, "as they were: expected True, got False"),
        (without_padding, "a pass needs equally long rows"),
        (padded_on_the_left, "must be 0"),
        (padded_with_eos, "must be 0"),
        (never_stops, "one pass too many"),
        (one_pass_too_many, "one pass too many"),
        (too_wide, "Pad to the longest sequence, and no further"),
        (lambda p, m, f, e: [list(a)[::-1] for a in loop_with_flags(p, m, f, e)], "answers: expected"),
    ],
    "7.1-dynamic": [
        (lambda a, b, d, s: [(10, [0, 1]), (30, [2, 3]), (54, [4, 5, 6])], "expected"),
        (lambda a, b, d, s: [start for start, _ in launches_by_events(a, b, d, s)], "expected 2 values"),
        (lambda a, b, d, s: [batch for _, batch in launches_by_events(a, b, d, s)], "expected"),
        (lambda a, b, d, s: launches_by_events(a, b, d, s)[:-1], "missing"),
        (lambda a, b, d, s: [(float(start), x) for start, x in launches_by_events(a, b, d, s)], "whole number"),
        (lambda a, b, d, s: None, "expected a list"),
    ],
}
