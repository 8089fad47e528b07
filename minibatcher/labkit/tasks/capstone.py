"""What the answers of the capstone are put through. The loop is played with the parts in ..stand_ins."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from ..judging import Log, Task, Unfit, list_of, text, whole_number

MOST_STEPS = 5_000
STEP_US, TOKEN_US = 5_000, 50  # what a step costs, and each of its tokens

Requests = dict[str, tuple[list[int], int, int]]
Arrival = tuple[str, int, int, int, int, int]  # name, arrival in µs, prompt, output tokens, both deadlines in µs


# The loop


def _loop_cases(rng: random.Random) -> list[tuple]:
    """Requests, blocks, block size, seats, budget, salt: alone; a queue for a seat; one that never fits; anything."""
    cases: list[tuple] = [
        ({"a": ([5, 6, 7], 3, 9)}, 4, 4, 2, 8, 1),
        ({"a": ([5, 6, 7, 8, 2], 3, 9), "b": ([3], 2, 9), "c": ([4, 4], 4, 9)}, 8, 2, 2, 4, 2),
        ({"a": ([5, 6, 7], 4, 9), "b": ([1] * 9, 9, 9), "c": ([4, 4], 4, 9), "d": ([2], 1, 9)}, 4, 2, 3, 4, 5),
    ]
    for size in sorted(rng.randint(2, 9) for _ in range(40)):
        block, eos = rng.randint(1, 5), rng.randrange(30)
        requests: Requests = {}
        for name in rng.sample("abcdefghijklm", size):
            longest = rng.choice([3, 8, 20])
            prompt = [rng.randrange(30) for _ in range(rng.randint(1, longest))]
            requests[name] = prompt, rng.randint(1, 9), eos
        most = max(len(prompt) + limit for prompt, limit, _ in requests.values())
        blocks = max(2, -(-most // block) + rng.choice([-1, 0, 1, 6, 30]))
        cases.append((requests, blocks, block, rng.randint(1, 5), rng.randint(2, 12), rng.randrange(1, 1000)))
    return cases


def _next_token(tokens: list[int], eos: int, salt: int) -> int:
    state = salt
    for token in tokens:
        state = (state * 31 + token + 7) % 1_000_003
    return eos if state % 7 == 0 else state // 7 % 30


class _Model:
    """A forward pass that keeps tokens in the blocks that it is given, and reads its context from there alone."""

    def __init__(self, log: Log, eos: int, block_size: int, num_blocks: int, salt: int) -> None:
        self._log, self._eos, self._size, self._num_blocks, self._salt = log, eos, block_size, num_blocks, salt
        self._cache: dict[tuple[int, int], int] = {}
        self.pools: list[Any] = []
        self._steps = 0

    def forward(self, pieces: Any) -> list[int]:
        self._steps += 1
        self._log.at(f"step {self._steps}")
        if self._steps > MOST_STEPS:
            raise Unfit("one step too many; does every request end?")
        read = [self._piece(piece) for piece in list_of(lambda piece: piece)(pieces)]
        if not read:
            raise Unfit("a forward pass over nothing; stop when nobody runs")
        owners: dict[int, str] = {}
        for name, _, _, table in read:
            for block in table:
                if owners.setdefault(block, name) != name:
                    raise Unfit(f"block {block} is in the tables of {owners[block]!r} and of {name!r}")
        pieces_seen = {name: [start, len(tokens)] for name, tokens, start, _ in sorted(read)}
        self._log.see(
            "pieces, [start, tokens] of each request", pieces_seen, "Compare who is there, and what plan_step gets."
        )
        self._log.see("free blocks", self._free(), "Blocks for prompt and max_tokens are taken on entry.")
        return [self._next(*piece) for piece in read]

    def _free(self) -> int:
        if len(self.pools) != 1:
            raise Unfit(f"{len(self.pools)} block pools; make one, parts.BlockPool(num_blocks, block_size)")
        return self.pools[0].num_free

    def _piece(self, piece: Any) -> tuple[str, list[int], int, list[int]]:
        parts = list_of(lambda part: part)(piece)
        if len(parts) != 4:
            raise Unfit(f"a piece has four parts, (name, tokens, start, table); got {len(parts)}")
        name, start = text(parts[0]), whole_number(parts[2])
        tokens, table = list_of(whole_number)(parts[1]), list_of(whole_number)(parts[3])
        if not tokens:
            raise Unfit(f"the piece of {name!r} holds no tokens")
        if not all(0 <= block < self._num_blocks for block in table) or start < 0:
            raise Unfit(f"the piece of {name!r} starts at {start}, with the block table {table}")
        if len(table) * self._size < start + len(tokens):
            few = f"{name!r} has {len(table)} blocks of {self._size}, too few for {start + len(tokens)} tokens"
            raise Unfit(f"{few}; did pool.allocate say True?")
        return name, tokens, start, table

    def _next(self, name: str, tokens: list[int], start: int, table: list[int]) -> int:
        places = [(table[i // self._size], i % self._size) for i in range(start + len(tokens))]
        self._cache.update(zip(places[start:], tokens))
        if missing := [i for i, place in enumerate(places) if place not in self._cache]:
            raise Unfit(f"the cache of {name!r} holds nothing at position {missing[0]}; what was computed so far?")
        return _next_token([self._cache[place] for place in places], self._eos, self._salt)


def _play_loop(
    answer: Callable, log: Log, requests: Requests, num_blocks: int, block_size: int, seats: int, budget: int, salt: int
) -> None:
    from .. import stand_ins

    model = _Model(log, next(iter(requests.values()))[2], block_size, num_blocks, salt)

    class BlockPool(stand_ins.BlockPool):
        def __init__(self, num_blocks: int, block_size: int) -> None:
            super().__init__(num_blocks, block_size)
            model.pools.append(self)

    parts = SimpleNamespace(
        next_batch=stand_ins.next_batch,
        finish_reason=stand_ins.finish_reason,
        plan_step=stand_ins.plan_step,
        BlockPool=BlockPool,
    )
    names = list(requests)
    answers = answer(requests, parts, model.forward, num_blocks, block_size, seats, budget)
    log.at("at the end")
    if not isinstance(answers, dict):
        raise Unfit(f"expected a dict of name to token ids, got {answers!r} ({type(answers).__name__})")
    found = {text(name): list_of(whole_number)(tokens) for name, tokens in answers.items()}
    log.see("names in the result", sorted(found), "Everybody, also who was refused: with an empty list.")
    for name in names:
        log.see(f"answer of {name!r}", found.get(name), "New tokens only; the end token is the last of them.")
    log.see(
        "free blocks",
        model.pools[0].num_free if model.pools else None,
        "Whoever ends returns its blocks, by pool.free.",
    )


# The tournament


class BadPlan(Exception):
    """A plan that can't be carried out; the message is a sentence without the step."""


def workload(rng: random.Random, size: int, pace: float = 1.0) -> list[Arrival]:
    """Short chats that want each token soon, and now and then a long document; in bursts. pace: how fast they come."""
    now, arrivals = 0, []
    for i in range(size):
        now += round(rng.choice([0, rng.randint(1_000, 20_000), rng.randint(20_000, 60_000)]) / pace)
        if rng.random() < 0.2:
            arrivals.append((f"doc{i}", now, rng.randint(500, 1200), rng.randint(4, 12), 1_200_000, 40_000))
        else:
            arrivals.append((f"chat{i}", now, rng.randint(20, 120), rng.randint(10, 40), 250_000, 25_000))
    return arrivals


def _policy_cases(rng: random.Random) -> list[tuple[list[Arrival], int, int]]:
    tiny = [
        ("chat0", 0, 20, 40, 250_000, 25_000),
        ("doc1", 6_000, 1000, 3, 1_200_000, 40_000),
        ("chat2", 10_000, 30, 8, 150_000, 25_000),
    ]
    return [(tiny, 512, 200), *((workload(rng, size), 512, 240) for size in (40, 60, 60))]


def play_requests(arrivals: list[Arrival], budget: int, num_blocks: int, decide: Callable) -> list[str]:
    """The names of those who met both deadlines. Raises BadPlan.

    decide(running, waiting, free_blocks, budget, now_ms): the plan of the next step. All times are whole microseconds.
    """
    coming, waiting, running, good, now = sorted(arrivals, key=lambda a: a[1]), [], [], [], 0
    while coming or waiting or running:
        if not (waiting or running):
            now = max(now, coming[0][1])
        while coming and coming[0][1] <= now:
            waiting.append(_state(coming.pop(0)))
        free = num_blocks - sum(r["blocks"] for r in running)
        plan = decide([_view(r) for r in running], [_view(r) for r in waiting], free, budget, now // 1000)
        _check(plan, running, waiting, free, budget, idle=bool(coming))
        if not plan:
            now = coming[0][1]
            continue
        running += [r for r in waiting if r["name"] in plan]
        waiting = [r for r in waiting if r["name"] not in plan]
        now += STEP_US + TOKEN_US * sum(plan.values())
        for r in running:
            r["behind"] -= plan.get(r["name"], 0)
            if not r["behind"]:
                r["late"], r["made"], r["behind"] = r["late"] or now > r["due"], r["made"] + 1, 1
                r["due"] = now + r["each"]
        good += [r["name"] for r in running if r["made"] == r["output"] and not r["late"]]
        running = [r for r in running if r["made"] < r["output"]]
    return good


def _state(arrival: Arrival) -> dict[str, Any]:
    name, at, prompt, output, first, each = arrival
    blocks = -(-(prompt + output) // 16)
    return dict(name=name, behind=prompt, made=0, output=output, blocks=blocks, due=at + first, each=each, late=False)


def _view(r: dict[str, Any]) -> dict[str, Any]:
    """What a policy may know of a request."""
    return {k: r[k] for k in ("name", "behind", "made", "blocks", "late")} | {"due_ms": r["due"] // 1000}


def _check(plan: Any, running: list[dict], waiting: list[dict], free: int, budget: int, *, idle: bool) -> None:
    """Raises BadPlan. Nothing is believed of a plan, which may come from a file."""
    if type(plan) is not dict:
        raise BadPlan("expected a dict of name to tokens, got something else")
    behind = {r["name"]: r["behind"] for r in running + waiting}
    for name, tokens in plan.items():
        if name not in behind:
            raise BadPlan(f"expected names of running or waiting requests, got {name!r}")
        if type(tokens) is not int or not 1 <= tokens <= behind[name]:
            raise BadPlan(f"expected 1 to {behind[name]} tokens for {name!r}, got {tokens!r}")
    if sum(plan.values()) > budget:
        raise BadPlan(f"expected at most {budget} tokens in all, got {sum(plan.values())}")
    blocks = sum(r["blocks"] for r in waiting if r["name"] in plan)
    if blocks > free:
        raise BadPlan(f"expected newcomers of at most {free} blocks in all, the free ones, got {blocks}")
    if not plan and not idle:
        left = (
            "the late ones are left, to be served too"
            if all(r["late"] for r in running + waiting)
            else "requests are left"
        )
        raise BadPlan(f"expected somebody in the plan, got nobody: nobody else will come, and {left}")


def _play_policy(answer: Callable, log: Log, arrivals: list[Arrival], budget: int, num_blocks: int) -> None:
    """Writes down the plan of every step; what they are worth is counted elsewhere, from the plans."""
    steps = 0

    def decide(*view: Any) -> dict[str, int]:
        nonlocal steps
        steps += 1
        log.at(f"step {steps}")
        plan = answer(*view)
        if not isinstance(plan, dict):
            raise Unfit(f"expected a dict of name to tokens, got {plan!r} ({type(plan).__name__})")
        plan = {text(name): whole_number(tokens) for name, tokens in plan.items()}
        log.see("plan", plan)
        return plan

    with suppress(BadPlan):  # whoever replays the plans finds it again
        play_requests(arrivals, budget, num_blocks, decide)


TASKS = {
    "capstone-loop": Task(
        cases=_loop_cases,
        play=_play_loop,
        describe=lambda requests, blocks, size, seats, budget, salt: (
            f"with requests={requests}, num_blocks={blocks}, block_size={size}, max_num_seqs={seats}, budget={budget}"
        ),
        success="right, this is a server: everybody is answered, step by step, and every block came back",
    ),
    "capstone-policy": Task(
        cases=_policy_cases,
        play=_play_policy,
        describe=lambda arrivals, budget, blocks: (
            f"with {len(arrivals)} requests, {blocks} blocks and a budget of {budget}"
        ),
        success="right, more requests in time than both naive policies, on every workload",
    ),
}
