"""Right answers to lab 7.2, and wrong ones."""

from __future__ import annotations

from math import ceil
from typing import Any

from ..judging import Key, Mistake

# 7.2-next-batch


def _next_batch(running: list, finished: set, waiting: list, most: int) -> tuple[list, list]:
    line = [name for name in running if name not in finished]
    free = most - len(line)
    return line + waiting[:free], waiting[free:]


def _static(running: list, finished: set, waiting: list, most: int) -> tuple[list, list]:
    line = [name for name in running if name not in finished]
    return (line, waiting) if line else (waiting[:most], waiting[most:])


def _one_a_step(running: list, finished: set, waiting: list, most: int) -> tuple[list, list]:
    line = [name for name in running if name not in finished]
    came = 1 if len(line) < most else 0
    return line + waiting[:came], waiting[came:]


def _newcomers_first(running: list, finished: set, waiting: list, most: int) -> tuple[list, list]:
    line = [name for name in running if name not in finished]
    free = most - len(line)
    return waiting[:free] + line, waiting[free:]


def _in_place(running: list, finished: set, waiting: list, most: int) -> tuple[list, list]:
    queue = list(waiting)
    line = [(queue.pop(0) if queue else None) if name in finished else name for name in running]
    line = [name for name in line if name is not None]
    free = most - len(line)
    return line + queue[:free], queue[free:]


def _newest_first(running: list, finished: set, waiting: list, most: int) -> tuple[list, list]:
    line, queue = [name for name in running if name not in finished], list(waiting)
    while len(line) < most and queue:
        line.append(queue.pop())
    return line, queue


def _counts_before(running: list, finished: set, waiting: list, most: int) -> tuple[list, list]:
    free = most - len(running)
    return [name for name in running if name not in finished] + waiting[:free], waiting[free:]


def _nobody_leaves(running: list, finished: set, waiting: list, most: int) -> tuple[list, list]:
    free = most - len(running)
    return running + waiting[:free], waiting[free:]


def _too_many(running: list, finished: set, waiting: list, most: int) -> tuple[list, list]:
    return [name for name in running if name not in finished] + waiting[:most], waiting[most:]


def _drains(running: list, finished: set, waiting: list, most: int) -> tuple[list, list]:
    line = [name for name in running if name not in finished]
    while len(line) < most and waiting:
        line.append(waiting.pop(0))
    return line, waiting


NEXT_BATCH = Key(
    answer=_next_batch,
    mistakes=(
        Mistake(_static, "You let newcomers in when all have ended. That is static batching: fill each free slot now."),
        Mistake(_one_a_step, "You let in one newcomer a step. When several slots are free, several come in at once."),
        Mistake(_newcomers_first, "Newcomers stand in front; those who go on keep their order and come first."),
        Mistake(
            _in_place,
            "You put each newcomer where the ended request stood. Here those who go on close up, and newcomers follow.",
        ),
        Mistake(_newest_first, "You take the newest waiting request first; the oldest stands at index `0`."),
        Mistake(
            _counts_before,
            "You count the free slots before the ended requests leave, so each slot stays empty for a step.",
        ),
        Mistake(_nobody_leaves, "Ended requests stay in the batch. Take out every name that is in `finished`."),
        Mistake(_too_many, "You let in `max_num_seqs` newcomers. There is room for that number less those who go on."),
        Mistake(
            lambda r, f, w, m: (_next_batch(r, f, w, m)[0], list(w)),
            "Who came in is still among those who wait, and would come in twice.",
        ),
        Mistake(
            lambda r, f, w, m: _next_batch(r, f, w, m)[::-1],
            "The two lists are swapped: the running list comes first.",
        ),
        Mistake(_drains, "You take requests out of the caller's own list; build a new one, with a slice for example."),
    ),
)

# 7.2-four-ends


def _finish_reason(ids: list, text: str, most: int, eos: int, stop: list, aborted: bool) -> str | None:
    if aborted:
        return "abort"
    if ids[-1:] == [eos] or any(word in text for word in stop):
        return "stop"
    return "length" if len(ids) >= most else None


def _length_first(ids: list, text: str, most: int, eos: int, stop: list, aborted: bool) -> str | None:
    return "length" if len(ids) >= most and not aborted else _finish_reason(ids, text, most, eos, stop, aborted)


def _abort_last(ids: list, text: str, most: int, eos: int, stop: list, aborted: bool) -> str | None:
    return _finish_reason(ids, text, most, eos, stop, False) or ("abort" if aborted else None)


def _any_eos(ids: list, text: str, most: int, eos: int, stop: list, aborted: bool) -> str | None:
    return _finish_reason([*ids, eos] if eos in ids else ids, text, most + (eos in ids), eos, stop, aborted)


def _endswith(ids: list, text: str, most: int, eos: int, stop: list, aborted: bool) -> str | None:
    return _finish_reason(ids, text, most, eos, [word for word in stop if text.endswith(word)], aborted)


def _all_stops(ids: list, text: str, most: int, eos: int, stop: list, aborted: bool) -> str | None:
    return _finish_reason(ids, text, most, eos, stop if all(word in text for word in stop) else [], aborted)


FOUR_ENDS = Key(
    answer=_finish_reason,
    mistakes=(
        Mistake(
            lambda i, t, m, e, s, a: "length" if len(i) >= m else _finish_reason(i, t, m, e, s, a),
            "You look at the limit before anything else; it is the last of the reasons.",
        ),
        Mistake(_length_first, "You look at the limit first. An answer that ends by itself at the limit is complete."),
        Mistake(_abort_last, "You look at `aborted` last. Once the client is gone, nothing else matters."),
        Mistake(
            _any_eos, "You look for the end token anywhere. Only the last token counts; an earlier one was let pass."
        ),
        Mistake(
            _endswith,
            "You ask whether the text *ends* with a stop string. A token may bring more letters after it.",
        ),
        Mistake(_all_stops, "You want all stop strings in the text; one of them is enough."),
        Mistake(
            lambda i, t, m, e, s, a: _finish_reason(i, t, m, e, [], a),
            "You never look for stop strings in the text.",
        ),
        Mistake(
            lambda i, t, m, e, s, a: _finish_reason(i, t, m, e, s[:1], a),
            "You look for the first stop string only; there may be several.",
        ),
        Mistake(
            lambda i, t, m, e, s, a: _finish_reason(i, t, m + 1, e, s, a),
            "You stop one token too late: with `max_tokens` tokens the answer is full.",
        ),
        Mistake(
            lambda i, t, m, e, s, a: _finish_reason(i, t, m - 1, e, s, a),
            "You stop one token too early: `max_tokens` tokens are allowed.",
        ),
        Mistake(
            lambda i, t, m, e, s, a: _finish_reason(i, t, m, -1, s, a),
            "You never look for the end token.",
        ),
        Mistake(
            lambda i, t, m, e, s, a: _finish_reason(i, t, m, e, s, a) or "",
            "A request that goes on has no finish reason: return None, not an empty text.",
        ),
    ),
)

# 7.2-ragged


def _pack(rows: list) -> tuple[list, list, list]:
    places = [(ids, place) for ids, done, count in rows for place in range(done, done + count)]
    counts = [count for *_, count in rows]
    starts = [sum(counts[:row]) for row in range(len(rows) + 1)]
    return [ids[place] for ids, place in places], [place for _, place in places], starts


def _padded(rows: list) -> tuple[list, list, list]:
    widest = max((count for *_, count in rows), default=0)
    tokens, positions = [], []
    for ids, done, count in rows:
        tokens += ids[done : done + count] + [0] * (widest - count)
        positions += range(done, done + widest)
    return tokens, positions, [row * widest for row in range(len(rows) + 1)]


def _everything_left(rows: list) -> tuple[list, list, list]:
    return _pack([(ids, done, len(ids) - done) for ids, done, _ in rows])


def _first_tokens(rows: list) -> tuple[list, list, list]:
    return [token for ids, _, count in rows for token in ids[:count]], *_pack(rows)[1:]


def _last_tokens(rows: list) -> tuple[list, list, list]:
    return [token for ids, _, count in rows for token in ids[len(ids) - count :]], *_pack(rows)[1:]


RAGGED = Key(
    answer=_pack,
    mistakes=(
        Mistake(_padded, "You pad every row to the longest one; in a packed batch there is nothing between two rows."),
        Mistake(
            lambda rows: (_pack(rows)[0], [i for *_, n in rows for i in range(n)], _pack(rows)[2]),
            "Your positions start at zero in each row. A token's position counts what was computed before, too.",
        ),
        Mistake(
            lambda rows: (_pack(rows)[0], [*range(len(_pack(rows)[0]))], _pack(rows)[2]),
            "Your positions count through the packed list. A position is a token's place in its own request.",
        ),
        Mistake(
            lambda rows: (*_pack(rows)[:2], _pack(rows)[2][:-1]),
            "The last entry of `starts` is missing: where the last row ends. There is one entry more than rows.",
        ),
        Mistake(
            lambda rows: (*_pack(rows)[:2], _pack(rows)[2][1:]),
            "The first entry of `starts` is missing: the first row starts at zero.",
        ),
        Mistake(
            lambda rows: (*_pack(rows)[:2], [*(n for *_, n in rows), len(_pack(rows)[0])]),
            "These are the lengths of the rows; `starts` adds them up.",
        ),
        Mistake(
            lambda rows: (*_pack(rows)[:2], [0, *(n for *_, n in rows)]),
            "Behind the zero stand the lengths of the rows; each entry is how many tokens there are by then.",
        ),
        Mistake(
            lambda rows: _pack([row for row in rows if row[2]]),
            "You leave out rows with nothing to compute. They have an entry in `starts`, too.",
        ),
        Mistake(_first_tokens, "You take the first tokens of each request again; begin behind those computed already."),
        Mistake(
            _last_tokens, "You take the last tokens of each request. A prompt may go in pieces: begin at the next."
        ),
        Mistake(
            _everything_left, "You take all that is left of a request; the plan may want fewer tokens in this step."
        ),
    ),
)

# 7.2-admission


def _blocks(tokens: int, size: int) -> int:
    return ceil(tokens / size)


def _need(request: int, most: int, running: list, size: int) -> int:
    return _blocks(request + most, size) + sum(_blocks(b, size) - _blocks(a, size) for a, b in running)


def _may_enter(request: int, most: int, running: list, free: int, size: int, watermark: int) -> bool:
    return free - watermark >= _need(request, most, running, size)


def _in_tokens(request: int, most: int, running: list, free: int, size: int, watermark: int) -> bool:
    tokens = request + most + sum(b - a for a, b in running)
    return tokens <= (free - watermark) * size


def _growth(request: int, most: int, running: list, free: int, size: int, watermark: int) -> bool:
    grow = sum(_blocks(b - a, size) for a, b in running)
    return _blocks(request + most, size) + grow + watermark <= free


def _twice(request: int, most: int, running: list, free: int, size: int, watermark: int) -> bool:
    return _blocks(request + most, size) + sum(_blocks(b, size) for _, b in running) + watermark <= free


def _rounded_down(request: int, most: int, running: list, free: int, size: int, watermark: int) -> bool:
    return (request + most) // size + sum(b // size - a // size for a, b in running) + watermark <= free


def _one_more(request: int, most: int, running: list, free: int, size: int, watermark: int) -> bool:
    return (request + most) // size + 1 + sum(b // size - a // size for a, b in running) + watermark <= free


def _rounded_twice(request: int, most: int, running: list, free: int, size: int, watermark: int) -> bool:
    grow = sum(_blocks(b, size) - _blocks(a, size) for a, b in running)
    return _blocks(request, size) + _blocks(most, size) + grow + watermark <= free


ADMISSION = Key(
    answer=_may_enter,
    mistakes=(
        Mistake(
            lambda r, m, run, f, s, w: _may_enter(r, 0, run, f, s, w),
            "You let in whoever fits now; in the worst case its answer grows to `max_tokens`.",
        ),
        Mistake(
            lambda r, m, run, f, s, w: _may_enter(r, m, [], f, s, w),
            "You forget that running requests grow: what they may still take is promised to them.",
        ),
        Mistake(lambda r, m, run, f, s, w: _may_enter(r, m, run, f, s, 0), "You give away the watermark's blocks too."),
        Mistake(
            lambda r, m, run, f, s, w: _need(r, m, run, s) + w < f,
            "You keep one block too many: what fits exactly fits.",
        ),
        Mistake(_in_tokens, "You add up tokens. Memory is given in whole blocks: round up for each request."),
        Mistake(
            _growth, "You round up the growth alone. A running request's last block may have room: compare blocks."
        ),
        Mistake(_twice, "You count blocks twice that running requests hold already; they are not among the free ones."),
        Mistake(_rounded_down, "You round down. A block that is begun is taken whole."),
        Mistake(_one_more, "You add a block in any case. Tokens that fill their blocks exactly need no further one."),
        Mistake(_rounded_twice, "You round up prompt and answer apart; they share a block where one ends."),
        Mistake(
            lambda r, m, run, f, s, w: not _may_enter(r, m, run, f, s, w),
            "True and False are swapped: True lets the request in.",
        ),
    ),
)

# 7.2-priorities


def _class_now(request: tuple, now: float, ageing: float) -> int:
    return request[1] - int((now - request[2]) // ageing)


def _next_request(waiting: list, now: float, ageing: float) -> str:
    return sorted(waiting, key=lambda r: (_class_now(r, now, ageing), r[2]))[0][0]


def _by(rank: Any) -> Any:
    """An answer that takes the least by `rank(request, now, ageing_s)`."""
    return lambda waiting, now, ageing: min(waiting, key=lambda r: rank(r, now, ageing))[0]


PRIORITIES = Key(
    answer=_next_request,
    mistakes=(
        Mistake(
            _by(lambda r, now, ageing: (r[1], r[2])), "Nobody ages: under a stream of urgent requests others starve."
        ),
        Mistake(_by(lambda r, now, ageing: r[2]), "You take the oldest, whatever its class."),
        Mistake(
            _by(lambda r, now, ageing: (-_class_now(r, now, ageing), r[2])),
            "You take the least urgent: a lower number is more urgent.",
        ),
        Mistake(
            _by(lambda r, now, ageing: _class_now(r, now, ageing)),
            "Among equals you take the first of the list; the list is in no order, so compare arrivals.",
        ),
        Mistake(
            _by(lambda r, now, ageing: (_class_now(r, now, ageing), -r[2])),
            "Among equals you take the newest; the older one goes first.",
        ),
        Mistake(
            _by(lambda r, now, ageing: (max(0, _class_now(r, now, ageing)), r[2])),
            "You stop at class zero. Ageing has no end: a class may become negative.",
        ),
        Mistake(
            _by(lambda r, now, ageing: (r[1] - (now - r[2]) / ageing, r[2])),
            "You count parts of `ageing_s`; only a full one lifts a request.",
        ),
        Mistake(
            _by(lambda r, now, ageing: r[1] - (now - r[2]) / ageing),
            "Only a full `ageing_s` lifts a request, no part of it; and among equals the older one goes first.",
        ),
        Mistake(
            _by(lambda r, now, ageing: (r[1] + (now - r[2]) // ageing, r[2])),
            "Waiting makes a request less urgent in your rule; it should be lifted, to a lower number.",
        ),
        Mistake(
            _by(lambda r, now, ageing: (r[1] - (now - r[2] >= ageing), r[2])),
            "You lift a request once. Each further `ageing_s` lifts it by one more class.",
        ),
        Mistake(
            _by(lambda r, now, ageing: (r[1] - max(0, -(-(now - r[2]) // ageing) - 1), r[2])),
            "After exactly `ageing_s` seconds a request is lifted already.",
        ),
    ),
)

# 7.2-fair-share


class _FairShare:
    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def comes(self, tenant: str, waiting: list[str]) -> None:
        mine = self.tokens.setdefault(tenant, 0)
        floor = min((self.tokens[other] for other in waiting), default=mine)
        self.tokens[tenant] = max(mine, floor)

    def served(self, tenant: str, tokens: int) -> None:
        self.tokens[tenant] += tokens

    def next_tenant(self, waiting: list[str]) -> str:
        return min(waiting, key=self.tokens.__getitem__)


class _NoLift(_FairShare):
    def comes(self, tenant: str, waiting: list[str]) -> None:
        self.tokens.setdefault(tenant, 0)


class _Forgives(_FairShare):
    def comes(self, tenant: str, waiting: list[str]) -> None:
        self.tokens[tenant] = min((self.tokens[other] for other in waiting), default=self.tokens.get(tenant, 0))


class _LiftedToHighest(_FairShare):
    def comes(self, tenant: str, waiting: list[str]) -> None:
        self.tokens[tenant] = max(self.tokens.get(tenant, 0), *(self.tokens[other] for other in waiting), 0)


class _StartsAtZero(_FairShare):
    def comes(self, tenant: str, waiting: list[str]) -> None:
        self.tokens[tenant] = 0


class _CountsRequests(_FairShare):
    def served(self, tenant: str, tokens: int) -> None:
        self.tokens[tenant] += 1


class _LastOnly(_FairShare):
    def served(self, tenant: str, tokens: int) -> None:
        self.tokens[tenant] = tokens


class _First(_FairShare):
    def next_tenant(self, waiting: list[str]) -> str:
        return waiting[0]


class _Highest(_FairShare):
    def next_tenant(self, waiting: list[str]) -> str:
        return max(waiting, key=self.tokens.__getitem__)


class _LastOfEquals(_FairShare):
    def next_tenant(self, waiting: list[str]) -> str:
        return min(reversed(waiting), key=self.tokens.__getitem__)


class _FirstByName(_FairShare):
    def next_tenant(self, waiting: list[str]) -> str:
        return min(sorted(waiting), key=self.tokens.__getitem__)


class _AmongAll(_FairShare):
    def next_tenant(self, waiting: list[str]) -> str:
        return min(self.tokens, key=self.tokens.__getitem__)


class _LiftedToAnybody(_FairShare):
    def comes(self, tenant: str, waiting: list[str]) -> None:
        self.tokens[tenant] = max(self.tokens.get(tenant, 0), min(self.tokens.values(), default=0))


FAIR_SHARE = Key(
    answer=_FairShare,
    mistakes=(
        Mistake(_NoLift, "Nobody is lifted: who was away comes back with a low counter, and shuts all others out."),
        Mistake(_Forgives, "A newcomer is lifted, never lowered: one with a high counter must not get rid of it."),
        Mistake(_LiftedToHighest, "You lift a newcomer to the highest of those who wait; the lowest is enough."),
        Mistake(
            _StartsAtZero, "You forget a tenant's counter when it comes back; keep what it had, if that is higher."
        ),
        Mistake(_CountsRequests, "You count requests. A long request is more service than a short one: count tokens."),
        Mistake(_LastOnly, "A counter holds the tokens of the last request only; add them up."),
        Mistake(_First, "You take the tenant that waits longest, whatever it has had."),
        Mistake(_Highest, "You take the tenant that has had most; the lowest counter goes first."),
        Mistake(_LastOfEquals, "Among equal counters you take the last of the list; the first has waited longest."),
        Mistake(_FirstByName, "Among equal counters you take the first by name; who stands first in `waiting` goes."),
        Mistake(_AmongAll, "You choose among all tenants; only one that waits can go."),
        Mistake(_LiftedToAnybody, "You lift to the lowest of all tenants; only those who wait count."),
    ),
)

KEYS = {
    "7.2-next-batch": NEXT_BATCH,
    "7.2-four-ends": FOUR_ENDS,
    "7.2-ragged": RAGGED,
    "7.2-admission": ADMISSION,
    "7.2-priorities": PRIORITIES,
    "7.2-fair-share": FAIR_SHARE,
}
