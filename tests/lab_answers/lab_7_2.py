"""More answers to lab 7.2: right ones, built differently, and wrong ones with a part of what they are told."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import accumulate


def batch_with_a_deque(running, finished, waiting, max_num_seqs):
    queue, line = deque(waiting), [name for name in running if name not in finished]
    while queue and len(line) < max_num_seqs:
        line.append(queue.popleft())
    return line, list(queue)


def batch_of_one_line(running, finished, waiting, max_num_seqs):
    everybody = [*(name for name in running if name not in finished), *waiting]
    return tuple(everybody[:max_num_seqs]), tuple(everybody[max_num_seqs:])


def batch_that_changes_running(running, finished, waiting, max_num_seqs):
    for name in finished:
        running.remove(name)
    free = max_num_seqs - len(running)
    return running + waiting[:free], waiting[free:]


def batch_that_empties_finished(running, finished, waiting, max_num_seqs):
    line = [name for name in running if name not in finished]
    finished.clear()
    return batch_of_one_line(line, set(), waiting, max_num_seqs)


def reason_by_table(token_ids, text, max_tokens, eos, stop, aborted):
    ended = token_ids[-1:] == [eos] or any(text.find(word) >= 0 for word in stop)
    table = (aborted, "abort"), (ended, "stop"), (max_tokens <= len(token_ids), "length"), (True, None)
    return next(reason for holds, reason in table if holds)


def reason_overwritten(token_ids, text, max_tokens, eos, stop, aborted):
    reason = "length" if len(token_ids) == max_tokens else None
    for word in stop:
        if len(text.split(word)) > 1:
            reason = "stop"
    if token_ids[-1:] == [eos]:
        reason = "stop"
    return "abort" if aborted else reason


def reason_without_a_first_token(token_ids, text, max_tokens, eos, stop, aborted):
    return "stop" if token_ids[-1] == eos else reason_by_table(token_ids, text, max_tokens, eos, stop, aborted)


def pack_in_lists(rows):
    pieces = [list(enumerate(tokens))[done:][:count] for tokens, done, count in rows]
    flat = [pair for piece in pieces for pair in piece]
    return [token for _, token in flat], [place for place, _ in flat], list(accumulate(map(len, pieces), initial=0))


def pack_with_torch(rows):
    import torch

    tokens = torch.tensor([token for ids, done, count in rows for token in ids[done : done + count]])
    positions = torch.tensor([done + i for _, done, count in rows for i in range(count)])
    return tokens.long(), positions.long(), torch.tensor([0, *(row[2] for row in rows)]).cumsum(0)


def may_enter_by_counting(request_tokens, max_tokens, running, num_free_blocks, block_size, watermark_blocks):
    free = num_free_blocks - watermark_blocks - len(range(0, request_tokens + max_tokens, block_size))
    for now, most in running:
        free -= len(range(0, most, block_size)) - len(range(0, now, block_size))
    return free >= 0


def may_enter_by_flooring(request_tokens, max_tokens, running, num_free_blocks, block_size, watermark_blocks):
    still = [-(-most // block_size) + (-now // block_size) for now, most in running]
    needed = sum(still) - (-(request_tokens + max_tokens) // block_size)
    return not needed + watermark_blocks > num_free_blocks


def next_sorted(waiting, now, ageing_s):
    oldest_first = sorted(waiting, key=lambda request: request[2])
    return min(oldest_first, key=lambda request: request[1] - (now - request[2]) // ageing_s)[0]


def next_by_loop(waiting, now, ageing_s):
    def rank(request):
        _, priority, arrival = request
        while now - arrival >= ageing_s:
            priority, arrival = priority - 1, arrival + ageing_s
        return priority, request[2]

    waiting.sort(key=rank)
    return waiting[0][0]


class ShareWithADefault:
    def __init__(self):
        self.had = defaultdict(int)

    def comes(self, tenant, waiting):
        others = [self.had[other] for other in waiting]
        if others and self.had[tenant] < min(others):
            self.had[tenant] = min(others)

    def served(self, tenant, tokens):
        self.had[tenant] += tokens

    def next_tenant(self, waiting):
        return min(waiting, key=lambda tenant: self.had[tenant])


class ShareOfPairs:
    def __init__(self):
        self.pairs = []

    def _of(self, tenant):
        return next((pair for pair in self.pairs if pair[0] == tenant), [tenant, 0])

    def comes(self, tenant, waiting):
        pair = self._of(tenant)
        self.pairs = [other for other in self.pairs if other is not pair] + [pair]
        pair[1] = max(pair[1], sorted(self._of(other)[1] for other in waiting)[0] if waiting else 0)

    def served(self, tenant, tokens):
        self._of(tenant)[1] += tokens

    def next_tenant(self, waiting):
        return sorted(waiting, key=lambda tenant: self._of(tenant)[1])[0]


class ShareWithoutMemory(ShareWithADefault):
    def served(self, tenant, tokens):
        pass


class ShareOfAStranger(ShareWithADefault):
    def next_tenant(self, waiting):
        return "Z"


class ShareWithoutComes:
    def next_tenant(self, waiting):
        return waiting[0]


RIGHT = {
    "7.2-next-batch": [batch_with_a_deque, batch_of_one_line],
    "7.2-four-ends": [reason_by_table, reason_overwritten],
    "7.2-ragged": [pack_in_lists, pack_with_torch],
    "7.2-admission": [may_enter_by_counting, may_enter_by_flooring],
    "7.2-priorities": [next_sorted, next_by_loop],
    "7.2-fair-share": [ShareWithADefault, ShareOfPairs],
}

WRONG = {
    "7.2-next-batch": [
        (
            lambda r, f, w, m: (["ROMEO", "HAMLET", "PUCK"], ["LEAR"]),
            "waiting=['ROMEO', 'BRUTUS', 'HAMLET', 'PUCK', 'LEAR']: the new running list: expected",
        ),
        (lambda r, f, w, m: None, "expected 2 values, (running, waiting), got None"),
        (lambda r, f, w, m: r + w, "expected 2 values"),
        (lambda r, f, w, m: ("ROMEO", []), "expected a list, got 'ROMEO' (str)"),
        (lambda r, f, w, m: ([], w), "the new running list: expected ['ROMEO', 'BRUTUS', 'HAMLET'], got []"),
        (lambda r, f, w, m: (sorted(r + w)[:m], sorted(r + w)[m:]), "the new running list: expected"),
        (batch_that_changes_running, "the caller's own `running` after the call: expected"),
        (batch_that_empties_finished, "the caller's own `finished` after the call: expected"),
    ],
    "7.2-four-ends": [
        (lambda *_: "stop", "expected None, got 'stop'"),
        (lambda *_: None, "expected 'stop', got None"),
        (lambda *_: True, "expected a text, got True (bool)"),
        (reason_without_a_first_token, "raised IndexError"),
    ],
    "7.2-ragged": [
        (lambda rows: ([], [], []), "tokens: expected [11, 12, 13, 14, 23, 32, 33, 34], got []"),
        (lambda rows: pack_in_lists(rows)[:2], "expected 3 values, (tokens, positions, starts)"),
        (lambda rows: ([11, 12, 13, 14, 23, 32, 33, 34], [0, 1, 2, 3, 2, 1, 2, 3], [0, 4, 5, 8]), "expected [8], got"),
        (lambda rows: [[str(token) for token in part] for part in pack_in_lists(rows)], "expected a whole number"),
    ],
    "7.2-admission": [
        (lambda *_: True, "expected False, got True"),
        (lambda *_: False, "expected True, got False"),
        (lambda *_: 1, "expected True or False, got 1 (int)"),
        (lambda *_: None, "expected True or False, got None"),
    ],
    "7.2-priorities": [
        (lambda waiting, now, ageing_s: "paid", "who goes next: expected"),
        (lambda waiting, now, ageing_s: waiting[0], "expected a text, got ("),
        (lambda waiting, now, ageing_s: 0, "expected a text, got 0 (int)"),
        (lambda waiting, now, ageing_s: max(waiting)[0], "who goes next: expected"),
    ],
    "7.2-fair-share": [
        (ShareWithoutMemory, "expected 'B', got 'A'"),
        (ShareOfAStranger, "expected 'A', got 'Z'"),
        (ShareWithoutComes, "turn 1: comes('A', []) raised AttributeError"),
        (lambda: None, "raised AttributeError"),
    ],
}
