"""What the answers of lab 7.2 are put through."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from ..judging import Log, Task, Unfit, list_of, pair_of, returns, text, truth, whole_number

NAMES = ["ROMEO", "BRUTUS", "HAMLET", "OPHELIA", "FALSTAFF", "MACBETH", "PUCK", "LEAR"]
NAMES += ["IAGO", "PORTIA", "MIRANDA", "OTHELLO"]

# 7.2-next-batch: (requests as (name, step in which it arrives, tokens), max_num_seqs)


def _batch_cases(rng: random.Random) -> list[tuple]:
    giants = [("BRUTUS", 1, 45), ("HAMLET", 1, 50), ("PUCK", 3, 20), ("LEAR", 1, 48)]
    cases = [
        ([("ROMEO", 1, 2), ("BRUTUS", 1, 4), ("HAMLET", 1, 3), ("PUCK", 1, 1), ("LEAR", 1, 2)], 3),
        ([("ROMEO", 1, 1), ("BRUTUS", 2, 2)], 1),
        (giants, 4),
    ]
    for size in sorted(rng.randint(3, len(NAMES)) for _ in range(40)):
        names = rng.sample(NAMES, size)
        requests = [(name, rng.choice([1, 1, rng.randint(1, 9)]), rng.randint(1, 9)) for name in names]
        cases.append((requests, rng.randint(2, 5)))
    return cases


def _play_batch(next_batch: Callable, log: Log, requests: list, max_num_seqs: int) -> None:
    """Run all requests to their ends; a request that is in the batch makes one token a step."""
    wanted = {name: tokens for name, _, tokens in requests}
    made, started = dict.fromkeys(wanted, 0), {}
    running: list[str] = []
    waiting: list[str] = []
    finished: set[str] = set()
    last_arrival = max(step for _, step, _ in requests)
    for step in range(1, last_arrival + sum(wanted.values()) + 2):
        waiting = waiting + [name for name, arrival, _ in requests if arrival == step]
        if not running and not waiting and step > last_arrival:
            break
        mine = {"running": running, "finished": sorted(finished), "waiting": waiting}
        log.at(f"step {step}, {', '.join(f'{what}={names}' for what, names in mine.items())}")
        given = list(running), set(finished), list(waiting)
        after = pair_of("running", "waiting", read=list_of(text))(next_batch(*given, max_num_seqs))
        log.see("the new running list", after["running"], "Who has ended leaves, then the oldest waiting ones come in.")
        log.see("who still waits", after["waiting"], "Whoever did not come in still waits, in the same order.")
        for what, lent in zip(mine, given):
            left = list_of(text)(lent) if what != "finished" else sorted(list_of(text)(lent))
            log.see(f"the caller's own `{what}` after the call", left, "Build new lists; the caller needs the old.")
        running, waiting = after["running"], after["waiting"]
        for name in running:
            if name not in wanted:
                raise Unfit(f"the running list has {name!r}, which never arrived")
            started.setdefault(name, step)
            made[name] += 1
        finished = {name for name in running if made[name] >= wanted[name]}
        for name in sorted(finished):
            log.see(f"steps that {name} took, first to last", step - started[name] + 1, "A request runs in each step.")


def _batch_words(requests: list, max_num_seqs: int) -> str:
    return f"with {len(requests)} requests and max_num_seqs={max_num_seqs}"


# 7.2-four-ends


def _end_cases(rng: random.Random) -> list[tuple]:
    cases = [
        ([5, 9], "Sweet lady", 10, 0, ["pound"], False),
        ([5, 9, 0], "Sweet lady", 10, 0, [], False),
        ([5, 9, 7], "a thousand pounds", 10, 0, ["ducat", "pound"], False),
        ([5, 9, 7], "a thousand", 3, 0, ["pound"], False),
        ([], "", 4, 0, ["pound"], True),
        ([], "", 4, 0, [], False),
        ([4, 0], "so", 2, 0, [], True),
        ([4, 0], "so", 2, 0, ["o s"], False),
    ]
    for _ in range(60):
        max_tokens, eos = rng.randint(2, 12), rng.randint(0, 9)
        size = rng.choice([max_tokens, max_tokens, max_tokens - 1, rng.randint(0, max_tokens)])
        others = [token for token in range(10) if token != eos]
        tokens = [rng.choice(others) for _ in range(size)]
        if size and rng.random() < 0.35:
            tokens[-1] = eos
        if size > 2 and rng.random() < 0.25:
            tokens[rng.randrange(size - 1)] = eos
        words = "".join(f" {rng.choice(['lord', 'lady', 'pound', 'ducat', 'crown'])}" for _ in range(size))
        stop = rng.sample(["pound", "d c", "\n\n", "lord", "crow", "REGAN:"], rng.randint(0, 2))
        cases.append((tokens, words, max_tokens, eos, stop, rng.random() < 0.2))
    return cases


def _reason(value: Any) -> str | None:
    return None if value is None else text(value)


# 7.2-ragged


def _ragged_cases(rng: random.Random) -> list[tuple]:
    cases = [
        ([([11, 12, 13, 14], 0, 4), ([21, 22, 23], 2, 1), ([31, 32, 33, 34, 35], 1, 3)],),
        ([([7, 8], 1, 1)],),
        ([([4, 5, 6], 0, 2), ([9, 8], 1, 0), ([3, 2, 1], 2, 1)],),
        ([],),
    ]
    for size in sorted(rng.randint(1, 8) for _ in range(40)):
        rows = []
        for _ in range(size):
            tokens = [rng.randint(1, 99) for _ in range(rng.randint(1, 14))]
            computed = rng.choice([0, len(tokens) - 1, rng.randrange(len(tokens))])
            left = len(tokens) - computed
            rows.append((tokens, computed, rng.choice([left, rng.randint(0, left)])))
        cases.append((rows,))
    return cases


# 7.2-admission


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _admission_cases(rng: random.Random) -> list[tuple]:
    """Most have nearly as many free blocks as needed: there the rules differ."""
    cases = [
        (6, 5, [(5, 10), (8, 9)], 5, 4, 0),
        (6, 5, [(5, 10), (8, 9)], 5, 4, 1),
        (6, 5, [(5, 10), (8, 9)], 4, 4, 0),
        (3, 1, [], 1, 4, 0),
        (3, 2, [], 1, 4, 0),
    ]
    for _ in range(60):
        block_size = rng.choice([2, 3, 4, 8, 16])
        request_tokens, max_tokens = rng.randint(1, 60), rng.randint(1, 60)
        running = []
        for _ in range(rng.randint(0, 5)):
            now = rng.randint(1, 60)
            running.append((now, now + rng.randint(0, 40)))
        watermark = rng.choice([0, 1, rng.randint(2, 6)])
        most = _blocks(request_tokens + max_tokens, block_size) + watermark
        most += sum(_blocks(b, block_size) - _blocks(a, block_size) for a, b in running)
        free = max(0, most + rng.choice([-4, -2, -1, -1, 0, 0, 0, 1, 3, 6]))
        cases.append((request_tokens, max_tokens, running, free, block_size, watermark))
    return cases


# 7.2-priorities: (requests as (name, priority, arrival), seconds between two calls, ageing_s)


def _priority_cases(rng: random.Random) -> list[tuple]:
    stream = [(f"paid-{i}", 0, i) for i in range(30)]
    cases = [
        ([("batch", 2, 0), ("chat", 1, 3), ("paid", 0, 6)], 12, 5),
        ([("chat", 1, 2), ("paid", 0, 6)], 7, 5),
        ([*stream, ("background", 3, 1)], 2, 4),
    ]
    for size in sorted(rng.randint(3, 16) for _ in range(40)):
        arrivals = rng.sample(range(size * 3), size)
        requests = [(f"{rng.choice(NAMES)}-{i}", rng.randint(0, 3), arrival) for i, arrival in enumerate(arrivals)]
        cases.append((requests, rng.randint(2, 9), rng.randint(2, 12)))
    return cases


def _play_priorities(next_request: Callable, log: Log, requests: list, every_s: int, ageing_s: int) -> None:
    """A slot becomes free every so many seconds, and one request goes."""
    left, now = list(requests), 0
    while left:
        now += every_s
        waiting = [request for request in left if request[2] <= now]
        if not waiting:
            continue
        turn = now % len(waiting)  # the list is in no order
        waiting = waiting[turn:] + waiting[:turn]
        more = f", … ({len(waiting)} in all)" if len(waiting) > 6 else ""
        log.at(f"now={now}, waiting {', '.join(map(str, waiting[:6]))}{more}")
        name = text(next_request(list(waiting), now, ageing_s))
        log.see("who goes next", name, "Compute the class that each waiting request has by now, and its arrival.")
        if name not in [request[0] for request in waiting]:
            raise Unfit(f"{name!r} does not wait")
        left = [request for request in left if request[0] != name]


def _priority_words(requests: list, every_s: int, ageing_s: int) -> str:
    return f"with {len(requests)} requests, a free slot every {every_s} s and ageing_s={ageing_s}"


# 7.2-fair-share: (requests as (turn before which it arrives, tenant, tokens))


def _share_cases(rng: random.Random) -> list[tuple]:
    cases = [
        ([(1, "A", 10), (1, "A", 10), (1, "A", 10), (1, "B", 30), (1, "B", 5)],),
        ([(1, "A", 20), (2, "A", 20), (3, "A", 20), (3, "B", 5), (3, "B", 5), (3, "B", 5), (3, "B", 5), (4, "A", 9)],),
        ([(1, "B", 90), (1, "A", 20), (2, "A", 30), (3, "A", 10), (4, "B", 5), (4, "A", 10), (4, "A", 8)],),
    ]
    for size in sorted(rng.randint(4, 24) for _ in range(40)):
        tenants, usual = "ABCDE"[: rng.randint(2, 5)], rng.randint(5, 60)
        requests = [(rng.randint(1, size), rng.choice(tenants), rng.randint(1, usual)) for _ in range(size)]
        cases.append((sorted(requests, key=lambda request: request[0]),))
    return cases


def _play_share(fair_share: Callable, log: Log, requests: list) -> None:
    """In each turn a slot is free, and the oldest request of one tenant goes."""
    log.at("FairShare()")
    shares = fair_share()
    queues: dict[str, list[int]] = {}  # of tenants that wait, in the order in which they began
    calls: list[str] = []  # that change counters

    def at(turn: int, call: str) -> None:
        log.at(f"turn {turn}{', after ' if calls else ''}{', '.join(calls)}: {call}")

    for turn in range(1, requests[-1][0] + len(requests) + 1):
        for arrival, tenant, tokens in requests:
            if arrival == turn:
                if tenant not in queues:
                    call = f"comes({tenant!r}, {list(queues)})"
                    at(turn, call)
                    shares.comes(tenant, list(queues))
                    calls.append(call)
                queues.setdefault(tenant, []).append(tokens)
        if not queues:
            continue
        at(turn, f"next_tenant({list(queues)})")
        tenant = text(shares.next_tenant(list(queues)))
        log.see("", tenant, "Write down each tenant's counter after these calls.")
        if tenant not in queues:
            raise Unfit(f"{tenant!r} does not wait")
        tokens = queues[tenant].pop(0)
        if not queues[tenant]:
            del queues[tenant]
        call = f"served({tenant!r}, {tokens})"
        at(turn, call)
        shares.served(tenant, tokens)
        calls.append(call)


def _share_words(requests: list) -> str:
    return f"with {len(requests)} requests of {len({tenant for _, tenant, _ in requests})} tenants"


TASKS = {
    "7.2-next-batch": Task(
        cases=_batch_cases,
        play=_play_batch,
        describe=_batch_words,
        success="right, a slot is free in the step after its request has ended, and the oldest one takes it",
    ),
    "7.2-four-ends": Task(
        cases=_end_cases,
        play=returns(_reason),
        names=("token_ids", "text", "max_tokens", "eos", "stop", "aborted"),
        success="right, all four ends are seen, and the first of them counts",
    ),
    "7.2-ragged": Task(
        cases=_ragged_cases,
        play=returns(pair_of("tokens", "positions", "starts", read=list_of(whole_number))),
        names=("rows",),
        success="right, not one padding token",
    ),
    "7.2-admission": Task(
        cases=_admission_cases,
        play=returns(truth),
        names=("request_tokens", "max_tokens", "running", "num_free_blocks", "block_size", "watermark_blocks"),
        success="right, whoever is let in can never run out of memory",
    ),
    "7.2-priorities": Task(
        cases=_priority_cases,
        play=_play_priorities,
        describe=_priority_words,
        success="right, the urgent go first and nobody starves",
    ),
    "7.2-fair-share": Task(
        cases=_share_cases,
        play=_play_share,
        describe=_share_words,
        success="right, every tenant that waits gets the same service",
    ),
}
