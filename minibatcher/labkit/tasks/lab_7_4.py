"""What the answers of lab 7.4 are put through."""

from __future__ import annotations

import random
from typing import Any

from ..judging import Log, Task, Unfit, list_of, pair_of, reading, returns, text, truth, whole_number

_numbers = list_of(whole_number)


def _reserved_cases(rng: random.Random) -> list[tuple]:
    """Blocks that end evenly and unevenly, a slice that no number of blocks fills, then anything."""
    cases = [([(3, 3)], 8, 4), ([(4, 1), (5, 2)], 16, 4), ([(7, 5)], 30, 1)]
    for _ in range(40):
        size, longest = rng.choice((2, 3, 4, 8, 16)), rng.randint(40, 90)
        requests = [(rng.randint(1, 30), rng.randint(1, 10)) for _ in range(rng.randint(2, 9))]
        cases.append((requests, longest, size))
    return cases


def _pool_cases(rng: random.Random) -> list[tuple]:
    """Number of blocks, their size and a script of (name, tokens): room for so many in all; None: the request ends."""
    cases: list[tuple] = [
        (4, 2, [("a", 3), ("a", 4), ("a", 5), ("a", None), ("b", 8)]),
        (4, 2, [("a", 3), ("b", 5), ("b", 4), ("a", None), ("b", 5)]),
        (3, 4, [("a", None), ("a", 0), ("a", 12), ("a", 13), ("a", 6), ("a", None), ("a", None), ("b", 9)]),
    ]
    for _ in range(40):
        num_blocks, size = rng.randint(3, 20), rng.choice((1, 2, 3, 4, 5, 16))
        held: dict[str, int] = {}
        script: list[tuple[str, int | None]] = []
        for _ in range(rng.randint(10, 40)):
            name = rng.choice("abcde")
            if rng.random() < 0.25:
                held.pop(name, None)
                script.append((name, None))
            else:
                held[name] = held.get(name, 0) + rng.randint(0, 2 * size + 1)
                script.append((name, held[name]))
                if rng.random() < 0.2:
                    script.append((name, rng.randint(0, held[name])))
        cases.append((num_blocks, size, script))
    return cases


def _play_pool(answer: Any, log: Log, num_blocks: int, block_size: int, script: list[tuple]) -> None:
    log.at("BlockPool(…)")
    pool = answer(num_blocks, block_size)
    log.see("free blocks", _free_blocks(pool), "A new pool has nothing but free blocks.")
    before = _tables(pool, log, "of a new pool")
    log.see(
        "blocks in each table",
        {who: len(t) for who, t in before.items()},
        "A new pool knows no request. Make its lists and dicts in __init__: what stands in the class is shared.",
    )
    for step, (name, tokens) in enumerate(script, start=1):
        call = f"free({name!r})" if tokens is None else f"allocate({name!r}, {tokens})"
        had = ", ".join(f"{who} {len(table)}" for who, table in before.items() if table)
        log.at(f"step {step}: {call}{f' (blocks before: {had})' if had else ''}")
        if tokens is None:
            pool.free(name)
            before.pop(name, None)
        else:
            done = truth(pool.allocate(name, tokens))
            log.see(
                "returned",
                done,
                "Count the blocks that are missing beyond those of its table, and compare with the free ones.",
            )
        log.see(
            "free blocks",
            _free_blocks(pool),
            "Each block is in one table or free. A free returns them all; an allocate that fails takes none.",
        )
        tables = _tables(pool, log, f"after step {step}, {call}")
        blocks = [block for table in tables.values() for block in table]
        log.see(
            "blocks in each table",
            {who: len(t) for who, t in tables.items()},
            "A table has as many blocks as its tokens need, rounded up; after free it is [].",
        )
        log.see("ids out of range", [b for b in blocks if not 0 <= b < num_blocks], "Ids are 0 to num_blocks - 1.")
        twice = sorted({block for block in blocks if blocks.count(block) > 1})
        log.see("blocks in two places", twice, "A block that is taken has to leave the free list.")
        moved = [who for who, table in before.items() if tables[who][: len(table)] != table]
        log.see("tables whose old blocks changed", moved, "A table grows at its end: its blocks hold keys and values.")
        before = tables


def _tables(pool: Any, log: Log, when: str) -> dict[str, list[int]]:
    """The tables of all that a script may name; an error is told with the name that was asked for."""
    where, tables = log.where, {}
    for who in "abcde":
        log.at(f"table({who!r}) {when}")
        tables[who] = _numbers(pool.table(who))
    log.at(where)
    return tables


def _free_blocks(pool: Any) -> int:
    value = pool.num_free
    if callable(value):
        raise Unfit("num_free is a method; put @property above it, so that `pool.num_free` is a number")
    return whole_number(value)


def _prefix_cases(rng: random.Random) -> list[tuple]:
    """Size of a block and a script of (tokens, computed): publish so many; None: look up."""
    ab, cd, ef = [1, 2], [3, 4], [5, 6]
    cases: list[tuple] = [
        (2, [(ab + cd + [5], 5), (ab + cd + [9], None), ([*ab, 3, 9, 5], None)]),
        (2, [(ab + cd, 4), (ab + cd, None), (ab + cd + ef, None), (cd + ef, None), ([1], None)]),
        (2, [(ab + cd + ef, 3), (ab + cd + ef, None), (ef + cd, 4), (ab + cd + [7], None), (ef + cd + [7], None)]),
        (2, [(ab + cd + [9], 5), (ef + cd + [9], None), (ef + ab, 4), (ef + cd + [9], None), ([2, 1, 3], None)]),
        (2, [([1, 12, 3], 3), ([11, 2, 3], None)]),
    ]
    for _ in range(40):
        size, kinds = rng.choice((1, 2, 3, 4)), rng.randint(2, 3)
        script: list[tuple[list[int], int | None]] = []
        past: list[list[int]] = [[]]
        for _ in range(rng.randint(8, 16)):
            old = rng.choice(past)
            head = old[: rng.randint(0, len(old))] if rng.random() < 0.8 else []
            tokens = head + [rng.randint(1, kinds) for _ in range(rng.randint(1, 2 * size + 2))]
            past.append(tokens)
            if rng.random() < 0.6:
                script.append((tokens, len(tokens) - rng.choice((0, 0, 1, 1, len(tokens) // 2))))
            script.append((tokens, None))
        script += [(tokens, None) for tokens in rng.sample(past[1:], min(5, len(past) - 1))]
        cases.append((size, script))
    return cases


def _play_prefix(answer: Any, log: Log, block_size: int, script: list[tuple]) -> None:
    log.at("PrefixCache(…)")
    cache = answer(block_size)
    published: list[str] = []
    for step, (tokens, computed) in enumerate(script, start=1):
        if computed is None:
            calls = ", ".join(published) if len(published) <= 3 else f"{len(published)} calls of publish"
            log.at(f"step {step}: lookup({tokens}){f' after {calls}' if calls else ''}")
            think = (
                "Take block by block: it has to be full, end before the last token, and be known after this beginning."
            )
            log.see("tokens found", whole_number(cache.lookup(list(tokens))), think)
        else:
            published.append(f"publish({tokens}, {computed})")
            log.at(f"step {step}: {published[-1]}")
            mine = list(tokens)
            cache.publish(mine, computed)
            mine[:] = [0] * len(mine)  # the caller goes on with its list


def _grow_cases(rng: random.Random) -> list[tuple]:
    cases: list[tuple] = [
        (["a", "b"], {"a": 3, "b": 4}, 3, 4),
        (["a", "b", "c"], {"a": 4, "b": 2, "c": 5}, 4, 4),
        (["a", "b", "c"], {"a": 4, "b": 4, "c": 4}, 3, 4),
        (["a", "b", "c"], {"a": 4, "b": 4, "c": 0}, 2, 4),
        (["a"], {"a": 8}, 2, 4),
    ]
    for _ in range(60):
        size = rng.choice((1, 2, 3, 4, 8))
        names = rng.sample("abcdefghijkl", rng.randint(2, 9))
        tokens = {
            name: rng.choice((0, size * rng.randint(1, 4), rng.randint(1, 5 * size), size * rng.randint(1, 3)))
            for name in names
        }
        held = sum(-(-count // size) for count in tokens.values())
        cases.append((names, tokens, max(1, held) + rng.choice((0, 0, 1, 1, 2, 3)), size))
    return cases


def _play_grow(answer: Any, log: Log, running: list[str], tokens: dict[str, int], num_blocks: int, size: int) -> None:
    mine, counts = list(running), dict(tokens)
    found = pair_of("those that go on", "preempted", read=list_of(text))(answer(mine, counts, num_blocks, size))
    everyone = [*found["those that go on"], *found["preempted"]]
    log.see("lost", sorted(set(running) - set(everyone)), "Whoever does not go on is preempted, and waits.")
    twice = sorted(name for name in set(everyone) if everyone.count(name) > 1)
    log.see("in two places", twice, "Whoever has been preempted grows no more in this step.")
    for name, value in found.items():
        log.see(name, value, "Walk from the oldest to the youngest, and note the free blocks after each.")
    log.see("running afterwards", mine, "The caller's list was changed; copy it with list(running).")
    log.see("tokens afterwards", counts, "The caller's dict was changed; only read it.")


def _replay_cases(rng: random.Random) -> list[tuple]:
    """Out of order, alike in time, too long, and empty; then anything."""
    cases: list[tuple] = [
        ([(1_000, [5, 6], 3), (1_250, [7], 2)], "bard", 2, 64),
        ([(500, [5, 6], 3), (400, [7], 2), (500, [1], 4)], "bard", 10, 64),
        ([(909, [5], 3), (905, [7], 2)], "bard", 10, 64),
        ([(300, [5] * 9, 3), (400, [7] * 6, 4), (707, [8] * 7, 3)], "bard", 3, 10),
        ([], "bard", 2, 10),
    ]
    for _ in range(30):
        start, limit = rng.randint(100, 90_000), rng.randint(8, 16)
        trace = [
            (
                start + 50 * rng.randint(0, 20) + rng.randint(0, 3),
                [rng.randint(1, 99) for _ in range(rng.randint(1, 10))],
                rng.randint(1, 8),
            )
            for _ in range(rng.randint(3, 12))
        ]
        trace += [(rng.choice(trace)[0], [rng.randint(1, 99)], rng.randint(1, 6)) for _ in range(2)]
        cases.append((trace, rng.choice(("bard", "llama")), rng.choice((1, 2, 3, 7, 10)), limit))
    return cases


def _play_replay(answer: Any, log: Log, trace: list[tuple], model: str, speed_up: int, max_model_len: int) -> None:
    with reading(result := answer(trace, model, speed_up, max_model_len)):
        parts = list(result) if isinstance(result, (list, tuple)) else []
        if len(parts) != 2 or isinstance(parts[1], (list, tuple)):
            raise Unfit("expected two values: the list of what to send, and how many requests are left out")
        plan = list_of(_sending)(parts[0])
    log.see("requests left out", whole_number(parts[1]), "A request fits if its prompt and output fit together.")
    log.see("requests to send", len(plan), "Each request that fits is sent once.")
    for i, (time, payload) in enumerate(plan):
        log.at(f"request {i} to be sent")
        log.see("send_at_ms", time, "Count from the earliest arrival of the whole trace, divide, round down.")
        log.see("fields of the payload", sorted(payload), "It has the five fields of the table, by these names.")
        for key in sorted(payload):
            log.see(
                f"payload[{key!r}]",
                payload[key],
                "Send in order of arrival; rows of the same arrival keep their order. Then look at this field.",
            )


def _sending(value: Any) -> tuple[int, dict]:
    with reading(value):
        if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[1], dict):
            raise Unfit(f"expected a pair (send_at_ms, payload), got {value!r}")
        return whole_number(value[0]), {text(key): _field(part) for key, part in value[1].items()}


def _field(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
    return _numbers(value) if hasattr(value, "__iter__") else whole_number(value)


TASKS = {
    "7.4-reserved": Task(
        cases=_reserved_cases,
        play=returns(pair_of("unused in slices", "unused in blocks")),
        names=("requests", "max_model_len", "block_size"),
        success="right, a block wastes at most its own last places",
    ),
    "7.4-block-pool": Task(
        cases=_pool_cases,
        play=_play_pool,
        describe=lambda blocks, size, script: f"with num_blocks={blocks}, block_size={size}",
        success="right, no block is lost, and none has two owners",
    ),
    "7.4-prefix-cache": Task(
        cases=_prefix_cases,
        play=_play_prefix,
        describe=lambda size, script: f"with block_size={size}",
        success="right, a block is found only after the same beginning",
    ),
    "7.4-preemption": Task(
        cases=_grow_cases,
        play=_play_grow,
        names=("running", "tokens", "num_blocks", "block_size"),
        success="right, the oldest goes on, the youngest makes room, and nobody is lost",
    ),
    "7.4-replay": Task(
        cases=_replay_cases,
        play=_play_replay,
        names=("trace", "model", "speed_up", "max_model_len"),
        success="right, the same requests in the same order, only faster",
    ),
}
