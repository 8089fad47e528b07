"""Right answers to lab 7.4, and wrong ones."""

from __future__ import annotations

from typing import Any

from ..judging import Key, Mistake


def _up(tokens: int, size: int) -> int:
    return -(-tokens // size)


def _unused(requests: list, longest: int, size: int) -> tuple[int, int]:
    held = [prompt + made for prompt, answer in requests for made in range(answer)]
    return sum(longest - n for n in held), sum(_up(n, size) * size - n for n in held)


def _unused_of(lives: Any) -> Any:
    """With another opinion about what a request holds in its steps."""
    return lambda requests, longest, size: (
        sum(longest - n for p, a in requests for n in lives(p, a)),
        sum(_up(n, size) * size - n for p, a in requests for n in lives(p, a)),
    )


RESERVED = Key(
    answer=_unused,
    mistakes=(
        Mistake(
            _unused_of(lambda p, a: range(p + 1, p + a + 1)),
            "You count one token too many in each step: in its first step a request holds its prompt alone.",
        ),
        Mistake(
            _unused_of(lambda p, a: [p + a - 1]),
            "You look at the last step only; add up all steps, from the first one on.",
        ),
        Mistake(
            lambda r, n, b: (_unused(r, n, b)[0], sum((p + i) // b * b + b - p - i for p, a in r for i in range(a))),
            "A request whose last block is exactly full has no further block: round up, do not add one.",
        ),
        Mistake(
            lambda r, n, b: (
                _unused(r, n, b)[0],
                sum(_up(p + a - 1, b) * b - p - i for p, a in r for i in range(a)),
            ),
            "You reserve the blocks of the whole answer at once; a request takes a block when the last one is full.",
        ),
        Mistake(
            lambda r, n, b: (
                sum(n * a for p, a in r),
                sum(_up(p + i, b) * b for p, a in r for i in range(a)),
            ),
            "This is all that is reserved. Take away the tokens that are there.",
        ),
        Mistake(
            lambda r, n, b: _unused(r, n, b)[::-1],
            "The two numbers are swapped: slices come first, blocks second.",
        ),
        Mistake(
            lambda r, n, b: (_unused(r, n, b)[0], -sum(p + i for p, a in r for i in range(a)) % b),
            "You round the sum of all tokens. Two requests never share a block: round each one by itself.",
        ),
    ),
)


class _Pool:
    """Knows the owner of each block; the free ones have none."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.owner: list[str | None] = [None] * num_blocks
        self.tables: dict[str, list[int]] = {}
        self.size = block_size

    def missing(self, name: str, num_tokens: int) -> int:
        return max(0, _up(num_tokens, self.size) - len(self.table(name)))

    def allocate(self, name: str, num_tokens: int) -> bool:
        missing = self.missing(name, num_tokens)
        free = [i for i, owner in enumerate(self.owner) if owner is None]
        if missing > len(free):
            return False
        self.take(name, free[:missing])
        return True

    def take(self, name: str, blocks: list[int]) -> None:
        for block in blocks:
            self.owner[block] = name
        self.tables[name] = self.table(name) + blocks

    def free(self, name: str) -> None:
        for block in self.tables.pop(name, []):
            self.owner[block] = None

    def table(self, name: str) -> list[int]:
        return list(self.tables.get(name, []))

    @property
    def num_free(self) -> int:
        return self.owner.count(None)


class _TakesWhatIsThere(_Pool):
    def allocate(self, name: str, num_tokens: int) -> bool:
        missing = self.missing(name, num_tokens)
        free = [i for i, owner in enumerate(self.owner) if owner is None]
        self.take(name, free[:missing])
        return missing <= len(free)


class _TakesAnew(_Pool):
    def missing(self, name: str, num_tokens: int) -> int:
        return _up(num_tokens, self.size)


class _RoundsDown(_Pool):
    def missing(self, name: str, num_tokens: int) -> int:
        return max(0, num_tokens // self.size - len(self.table(name)))


class _OneTooMany(_Pool):
    def missing(self, name: str, num_tokens: int) -> int:
        return max(0, num_tokens // self.size + 1 - len(self.table(name)))


class _KeepsOneFree(_Pool):
    def allocate(self, name: str, num_tokens: int) -> bool:
        missing = self.missing(name, num_tokens)
        return False if missing and missing >= self.num_free else super().allocate(name, num_tokens)


class _FreesNothing(_Pool):
    def free(self, name: str) -> None:
        self.tables.pop(name, None)


class _FreesOne(_Pool):
    def free(self, name: str) -> None:
        for block in self.tables.pop(name, [])[-1:]:
            self.owner[block] = None


class _KeepsTable(_Pool):
    def free(self, name: str) -> None:
        for block in self.tables.get(name, []):
            self.owner[block] = None


class _Shrinks(_Pool):
    def allocate(self, name: str, num_tokens: int) -> bool:
        while len(self.table(name)) > _up(num_tokens, self.size):
            self.owner[self.tables[name].pop()] = None
        return super().allocate(name, num_tokens)


class _GrowsInFront(_Pool):
    def take(self, name: str, blocks: list[int]) -> None:
        old = self.table(name)
        super().take(name, blocks)
        self.tables[name] = blocks + old


BLOCK_POOL = Key(
    answer=_Pool,
    mistakes=(
        Mistake(_TakesWhatIsThere, "Where blocks run short you take those that are left. Compare first, then take."),
        Mistake(
            _TakesAnew, "num_tokens are all tokens of the request, not the new ones: take away what its table has."
        ),
        Mistake(_RoundsDown, "You round down. A block that is filled in part is needed whole."),
        Mistake(
            _OneTooMany, "You take one block too many where the last one is exactly full. Round up, don't add one."
        ),
        Mistake(_KeepsOneFree, "You refuse a request that needs exactly the blocks that are left. It fits."),
        Mistake(_FreesNothing, "free forgets the table, but its blocks never come back: put them on the free list."),
        Mistake(_FreesOne, "free gives back one block only; all blocks of the table come back at once."),
        Mistake(_KeepsTable, "free gives the blocks back and keeps the table, so that two requests own them."),
        Mistake(_Shrinks, "You take blocks away when num_tokens is smaller than before. A table only grows."),
        Mistake(_GrowsInFront, "New blocks go to the end of the table: position 0 stays in its first block."),
    ),
)


class _Cache:
    """A tree: under each block stand those that have followed it."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.root: dict = {}

    def blocks(self, tokens: list[int], num: int) -> list[tuple]:
        return [tuple(tokens[i : i + self.size]) for i in range(0, num - self.size + 1, self.size)]

    def lookup(self, tokens: list[int]) -> int:
        return self.found(tokens, len(tokens) - 1)

    def found(self, tokens: list[int], num: int) -> int:
        node, found = self.root, 0
        for block in self.blocks(tokens, num):
            if block not in node:
                break
            node, found = node[block], found + self.size
        return found

    def publish(self, tokens: list[int], num_computed: int) -> None:
        node = self.root
        for block in self.blocks(tokens, num_computed):
            node = node.setdefault(block, {})


class _FindsLast(_Cache):
    def lookup(self, tokens: list[int]) -> int:
        return self.found(tokens, len(tokens))


class _CutsOneToken(_Cache):
    def lookup(self, tokens: list[int]) -> int:
        return min(self.found(tokens, len(tokens)), len(tokens) - 1)


class _PublishesAll(_Cache):
    def publish(self, tokens: list[int], num_computed: int) -> None:
        super().publish(tokens, len(tokens))


class _PublishesPartOfBlock(_Cache):
    """The last block goes in whole, even if only its first tokens are computed."""

    def publish(self, tokens: list[int], num_computed: int) -> None:
        super().publish(tokens, _up(num_computed, self.size) * self.size if num_computed < len(tokens) else len(tokens))

    def blocks(self, tokens: list[int], num: int) -> list[tuple]:
        return super().blocks(tokens, min(num, len(tokens)))


class _CountsBlocks(_Cache):
    def lookup(self, tokens: list[int]) -> int:
        return super().lookup(tokens) // self.size


class _AloneStanding(_Cache):
    """Blocks without what came before."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.known: set = set()

    def key(self, i: int, tokens: list[int]) -> Any:
        return tuple(tokens[i * self.size : (i + 1) * self.size])

    def found(self, tokens: list[int], num: int) -> int:
        i = 0
        while (i + 1) * self.size <= num and self.key(i, tokens) in self.known:
            i += 1
        return i * self.size

    def publish(self, tokens: list[int], num_computed: int) -> None:
        self.known |= {self.key(i, tokens) for i in range(num_computed // self.size)}


class _ByPlace(_AloneStanding):
    def key(self, i: int, tokens: list[int]) -> Any:
        return i, super().key(i, tokens)


class _ByParent(_AloneStanding):
    """Knows the block and the one before it, and none further back."""

    def key(self, i: int, tokens: list[int]) -> Any:
        return tuple(tokens[max(0, i - 1) * self.size : (i + 1) * self.size]), i == 0


class _BySum(_AloneStanding):
    def key(self, i: int, tokens: list[int]) -> Any:
        return i, tuple(sorted(tokens[: (i + 1) * self.size]))


class _BySumAlone(_AloneStanding):
    def key(self, i: int, tokens: list[int]) -> Any:
        return sum(tokens[: (i + 1) * self.size])


class _ByText(_AloneStanding):
    def key(self, i: int, tokens: list[int]) -> Any:
        return "".join(map(str, tokens[: (i + 1) * self.size]))


class _FindsNothing(_Cache):
    """Also what comes of keeping the caller's list, which changes afterwards."""

    def lookup(self, tokens: list[int]) -> int:
        return 0


class _PublishesTooFew(_Cache):
    def publish(self, tokens: list[int], num_computed: int) -> None:
        super().publish(tokens, num_computed - 1)


class _ForgetsOld(_Cache):
    def publish(self, tokens: list[int], num_computed: int) -> None:
        self.root = {}
        super().publish(tokens, num_computed)


class _LeavesGaps(_AloneStanding):
    def key(self, i: int, tokens: list[int]) -> Any:
        return i, super().key(i, tokens)

    def found(self, tokens: list[int], num: int) -> int:
        return sum(self.size for i in range(max(0, num) // self.size) if self.key(i, tokens) in self.known)


class _Tokenwise(_Cache):
    def __init__(self, block_size: int) -> None:
        super().__init__(1)


PREFIX_CACHE = Key(
    answer=_Cache,
    mistakes=(
        Mistake(
            _FindsLast,
            "The last token is always computed, since its output is the next token: its block does not count as found.",
        ),
        Mistake(
            _CutsOneToken,
            "You leave out the last token, but keep a part of its block. Only full blocks are found.",
        ),
        Mistake(_PublishesAll, "You publish tokens that are not computed yet: stop at num_computed."),
        Mistake(_PublishesPartOfBlock, "You publish a block of which only a part is computed. Only full blocks count."),
        Mistake(_CountsBlocks, "You return blocks; the answer is in tokens."),
        Mistake(
            _AloneStanding,
            "A block's keys depend on all tokens before it: after another beginning it is another block.",
        ),
        Mistake(_ByPlace, "The same tokens at the same place are not enough: all tokens before must be the same too."),
        Mistake(_ByParent, "You compare the block before, and no further. The whole beginning must be the same."),
        Mistake(_BySum, "The order of the tokens matters: keep them as a tuple, not as a sum or sorted."),
        Mistake(_BySumAlone, "Different tokens have the same sum: keep all of them, in order, as a tuple."),
        Mistake(_ByText, "Digits that run together are no key: [1, 12] and [11, 2] read the same. Keep a tuple."),
        Mistake(
            _FindsNothing,
            "You find nothing at all. If you keep the list that publish gets: it changes afterwards, so keep a tuple.",
        ),
        Mistake(
            _PublishesTooFew,
            "publish leaves out a block that num_computed fills exactly. Only lookup stops before the last token.",
        ),
        Mistake(_ForgetsOld, "You know the last publish only; what was known before stays known."),
        Mistake(_LeavesGaps, "Stop at the first block that is missing; what stands behind a gap is of no use."),
        Mistake(_Tokenwise, "You find single tokens. Only full blocks can be shared."),
    ),
)


def _grow(
    running: list[str],
    tokens: dict[str, int],
    num_blocks: int,
    size: int,
    *,
    last: int = -1,
    needs: Any = lambda n, size: n % size == 0,
    holds: Any = _up,
) -> tuple[list[str], list[str]]:
    free = num_blocks - sum(_up(tokens[name], size) for name in running)
    going, preempted, rest = [], [], list(running)
    while rest:
        name = rest[0]
        if not needs(tokens[name], size) or free > 0:
            free -= bool(needs(tokens[name], size))
            going.append(rest.pop(0))
        else:
            victim = rest.pop(last)
            free += holds(tokens[victim], size)
            preempted.append(victim)
    return going, preempted


def _stops_itself(running: list, tokens: dict, num_blocks: int, size: int) -> tuple[list, list]:
    return _grow(running, tokens, num_blocks, size, last=0)


def _oldest(running: list, tokens: dict, num_blocks: int, size: int, *, grown: bool = True) -> tuple[list, list]:
    free = num_blocks - sum(_up(tokens[name], size) for name in running)
    alive, gone = list(running), []
    for name in running:
        while name in alive and tokens[name] % size == 0 and not free:
            victim = alive.pop(0)
            free += _up(tokens[victim] + (grown and running.index(victim) < running.index(name)), size)
            gone.append(victim)
        free -= name in alive and tokens[name] % size == 0
    return alive, gone


def _no_self(running: list, tokens: dict, num_blocks: int, size: int) -> tuple[list, list]:
    going, gone = _grow(running, tokens, num_blocks, size)
    return (going, gone) if going else (gone[-1:], gone[:-1])


def _once(running: list, tokens: dict, num_blocks: int, size: int) -> tuple[list, list]:
    """Takes a block after one preemption, whether there is one or not."""
    free, alive, gone = num_blocks - sum(_up(tokens[name], size) for name in running), list(running), []
    for name in running:
        if name in alive and tokens[name] % size == 0:
            if not free:
                gone.append(alive.pop())
                free += _up(tokens[gone[-1]], size)
            free -= 1
    return alive, gone


def _youngest_first(running: list, tokens: dict, num_blocks: int, size: int) -> tuple[list, list]:
    free, alive, gone = num_blocks - sum(_up(tokens[name], size) for name in running), list(running), []
    for name in reversed(running):
        if name in alive and tokens[name] % size == 0:
            while not free and name in alive:
                gone.append(alive.pop())
                free += _up(tokens[gone[-1]], size)
            free -= name in alive
    return alive, gone


def _never_itself(running: list, tokens: dict, num_blocks: int, size: int) -> tuple[list, list]:
    free, alive, gone = num_blocks - sum(_up(tokens[name], size) for name in running), list(running), []
    for name in running:
        if name in alive and tokens[name] % size == 0:
            while not free and alive[-1] != name:
                gone.append(alive.pop())
                free += _up(tokens[gone[-1]], size)
            free -= 1
    return alive, gone


def _gives_all_up(running: list, tokens: dict, num_blocks: int, size: int) -> tuple[list, list]:
    going = _grow(running, tokens, num_blocks, size)[0]
    return going, [name for name in running if name not in going]


def _forgets(running: list, tokens: dict, num_blocks: int, size: int) -> tuple[list, list]:
    going, gone = _grow(running, tokens, num_blocks, size)
    return going, gone[:1]


def _both(running: list, tokens: dict, num_blocks: int, size: int) -> tuple[list, list]:
    return list(running), _grow(running, tokens, num_blocks, size)[1]


def _nothing_back(running: list, tokens: dict, num_blocks: int, size: int) -> tuple[list, list]:
    return _grow(running, tokens, num_blocks, size, holds=lambda n, size: 0)


PREEMPTION = Key(
    answer=_grow,
    mistakes=(
        Mistake(_stops_itself, "You stop the request that needs a block. The youngest makes room, and it goes on."),
        Mistake(_oldest, "You preempt the oldest one, which has most to lose; preempt the youngest."),
        Mistake(
            lambda *a: _oldest(*a, grown=False),
            "You preempt from the front, where the oldest is, which has most to lose; take from the far end.",
        ),
        Mistake(_once, "One preemption may not be enough: repeat it until a block is free."),
        Mistake(_youngest_first, "You serve the youngest first; the oldest has the first claim on a free block."),
        Mistake(
            lambda r, t, n, b: _grow(r, t, n, b, needs=lambda tokens, size: tokens > 0 and tokens % size == 0),
            "A request that holds no token has no block, so its first token needs one.",
        ),
        Mistake(
            _nothing_back, "Whoever is preempted gives all its blocks back; you take them from everybody for nothing."
        ),
        Mistake(
            lambda r, t, n, b: _grow(r, t, n, b, holds=lambda tokens, size: int(tokens > 0)),
            "You get one block back from a preempted request; it gives back all its blocks.",
        ),
        Mistake(
            lambda r, t, n, b: _grow(r, t, n, b, needs=lambda tokens, size: True),
            "You take a new block for each token; a request needs one only when its last block is full.",
        ),
        Mistake(
            lambda r, t, n, b: _grow(r, t, n, b, needs=lambda tokens, size: (tokens + 1) % size == 0),
            "You are one token off: a block is missing when the tokens held now fill the last one exactly.",
        ),
        Mistake(
            _gives_all_up, "The preempted ones should stand in the order in which it happened: the youngest first."
        ),
        Mistake(_forgets, "You note the first that is preempted and lose the others; they have to come back later."),
        Mistake(_both, "A preempted request does not go on in this step: take it out of those that run."),
        Mistake(_never_itself, "Where no block is free and nobody younger is left, the request itself is preempted."),
        Mistake(_no_self, "A request may be the youngest itself: where nobody else is left, it is preempted too."),
    ),
)


def _payload(model: str, prompt: list[int], output: int) -> dict:
    return {"model": model, "prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True}


def _plan(
    trace: list,
    model: str,
    speed: int,
    longest: int,
    *,
    fits: Any = lambda p, n, longest: len(p) + n <= longest,
    first: Any = None,
    order: Any = lambda arrival: arrival,
    at: Any = lambda arrival, first, speed: (arrival - first) // speed,
) -> tuple[list, int]:
    kept = [row for row in trace if fits(row[1], row[2], longest)]
    start = first(trace, kept) if first else min((row[0] for row in trace), default=0)
    kept.sort(key=lambda row: order(row[0]))
    return [(at(t, start, speed), _payload(model, p, n)) for t, p, n in kept], len(trace) - len(kept)


REPLAY = Key(
    answer=_plan,
    mistakes=(
        Mistake(
            lambda *a: _plan(*a, order=lambda arrival: 0),
            "You keep the order of the trace; its rows need not be sorted by arrival.",
        ),
        Mistake(
            lambda trace, *a: _plan(sorted(trace), *a),
            "You sort whole rows. Sort by the arrival alone, so that rows of the same arrival keep their order.",
        ),
        Mistake(
            lambda *a: (sorted((made := _plan(*a, order=lambda arrival: 0))[0], key=lambda sent: sent[0]), made[1]),
            "You sort by the time of sending, which is rounded. Sort by the arrival, before you divide.",
        ),
        Mistake(
            lambda *a: _plan(*a, at=lambda t, first, speed: t // speed),
            "You divide the arrival itself. Take the first arrival away first, so that the replay begins at once.",
        ),
        Mistake(
            lambda *a: _plan(*a, at=lambda t, first, speed: (t - first) * speed),
            "You multiply by speed_up: the replay gets slower. Divide the times.",
        ),
        Mistake(
            lambda *a: _plan(*a, at=lambda t, first, speed: t - first),
            "You leave speed_up out; divide the times by it.",
        ),
        Mistake(
            lambda *a: _plan(*a, first=lambda trace, kept: trace[0][0] if trace else 0),
            "You count from the first row of the trace; it need not be the earliest.",
        ),
        Mistake(
            lambda *a: _plan(*a, first=lambda trace, kept: min((row[0] for row in kept), default=0)),
            "You count from the first request that is sent. Count from the first one of the trace, even if left out.",
        ),
        Mistake(
            lambda *a: _plan(*a, fits=lambda p, n, longest: True),
            "You send requests that are longer than max_model_len; a server refuses them.",
        ),
        Mistake(
            lambda *a: _plan(*a, fits=lambda p, n, longest: len(p) <= longest),
            "The output needs room too: prompt and output together have to fit.",
        ),
        Mistake(
            lambda *a: _plan(*a, fits=lambda p, n, longest: len(p) + n < longest),
            "A request that fills max_model_len exactly still fits.",
        ),
        Mistake(
            lambda *a: (_plan(*a)[0], 0),
            "You do not count those that are left out. A comparison that hides them is dishonest.",
        ),
    ),
)

KEYS = {
    "7.4-reserved": RESERVED,
    "7.4-block-pool": BLOCK_POOL,
    "7.4-prefix-cache": PREFIX_CACHE,
    "7.4-preemption": PREEMPTION,
    "7.4-replay": REPLAY,
}
