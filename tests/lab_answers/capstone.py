"""More right answers to the capstone, and wrong ones with a part of the message that each gets."""

from collections import deque

from minibatcher.labkit.keys.capstone import decode_first


def serve_by_objects(requests, parts, forward, num_blocks, block_size, max_num_seqs, budget):
    class Row:
        def __init__(self, name):
            self.name, (self.tokens, self.limit, self.eos) = name, requests[name]
            self.prompt, self.tokens, self.seen = len(self.tokens), list(self.tokens), 0

        @property
        def answer(self):
            return self.tokens[self.prompt :]

    rows = {name: Row(name) for name in requests}
    pool = parts.BlockPool(num_blocks, block_size)
    queue = deque(n for n in rows if (rows[n].prompt + rows[n].limit + block_size - 1) // block_size <= num_blocks)
    running = []
    while queue or running:
        while queue and len(running) < max_num_seqs:
            if not pool.allocate(queue[0], rows[queue[0]].prompt + rows[queue[0]].limit):
                break
            running.append(queue.popleft())
        plan = parts.plan_step({name: len(rows[name].tokens) - rows[name].seen for name in running}, budget)
        chosen = [rows[name] for name in sorted(plan)]
        pieces = [(r.name, r.tokens[r.seen :][: plan[r.name]], r.seen, pool.table(r.name)) for r in chosen]
        for row, token in zip(chosen, forward(pieces)):
            row.seen += plan[row.name]
            if row.seen < len(row.tokens):
                continue
            row.tokens.append(token)
            if parts.finish_reason(row.answer, "", row.limit, row.eos, [], False):
                running.remove(row.name)
                pool.free(row.name)
    return {name: row.answer for name, row in rows.items()}


def serve_in_tuples(requests, parts, forward, num_blocks, block_size, max_num_seqs, budget):
    """Numpy integers, tuples for lists, the result in another order."""
    import numpy as np

    answers = serve_by_objects(
        requests,
        parts,
        lambda pieces: forward(tuple((n, tuple(map(np.int64, t)), np.int32(s), tuple(b)) for n, t, s, b in pieces)),
        num_blocks,
        block_size,
        max_num_seqs,
        budget,
    )
    return {name: tuple(answers[name]) for name in reversed(answers)}


def first_chunks(running, waiting, free_blocks, budget, now_ms):
    """In order of arrival, with a fixed limit on a step while somebody decodes."""
    plan = {r["name"]: 1 for r in running if r["made"]}
    left = (250 if plan else budget) - len(plan)
    for r in [r for r in running if not r["made"]] + waiting:
        if left <= 0 or (r in waiting and r["blocks"] > free_blocks):
            break
        free_blocks -= r["blocks"] if r in waiting else 0
        plan[r["name"]] = min(left, r["behind"])
        left -= plan[r["name"]]
    return plan


def shortest_first(running, waiting, free_blocks, budget, now_ms):
    plan = {r["name"]: 1 for r in running if r["made"]}
    left = (200 if plan else 300) - len(plan)
    for r in sorted((r for r in running + waiting if not r["made"]), key=lambda r: r["behind"]):
        new = any(r is other for other in waiting)
        if left > 0 and (not new or r["blocks"] <= free_blocks):
            plan[r["name"]] = min(left, r["behind"])
            left -= plan[r["name"]]
            free_blocks -= r["blocks"] * new
    return plan


def without_a_pool(requests, parts, forward, *sizes):
    for name, (prompt, _, _) in requests.items():
        forward([(name, prompt, 0, [0])])


def shared_blocks(requests, parts, forward, num_blocks, block_size, *sizes):
    parts.BlockPool(num_blocks, block_size)
    table = list(range(num_blocks))
    forward([(name, prompt[:1], 0, table) for name, (prompt, _, _) in requests.items()])
    return {}


def skips_its_prompt(requests, parts, forward, num_blocks, block_size, *sizes):
    parts.BlockPool(num_blocks, block_size).allocate("a", 1)
    forward([("a", [7], 2, list(range(num_blocks)))])


def empty_steps(requests, parts, forward, *sizes):
    parts.BlockPool(*sizes[:2])
    forward([])


RIGHT = {
    "capstone-loop": [serve_by_objects, serve_in_tuples],
    "capstone-policy": [first_chunks, shortest_first],
}

WRONG = {
    "capstone-loop": [
        (lambda *arguments: {}, "expected"),
        (lambda *arguments: None, "expected a dict of name to token ids, got None"),
        (without_a_pool, "0 block pools; make one"),
        (skips_its_prompt, "expected {'a': [0, 3]}, got {'a': [2, 1]}"),
        (empty_steps, "a forward pass over nothing"),
        (shared_blocks, "expected {'a': [0, 3]}, got {'a': [0, 1]}"),
        (lambda requests, parts, forward, *sizes: forward([("a", [5, 6, 7], 0, [])]), "has 0 blocks of 4, too few"),
        (lambda requests, parts, forward, *sizes: forward([("a", [5])]), "a piece has four parts"),
    ],
    "capstone-policy": [
        (decode_first, "expected at least"),
        (lambda *arguments: {}, "expected somebody in the plan, got nobody"),
        (lambda *arguments: None, "expected a dict of name to tokens, got None"),
        (lambda *arguments: {"chat9": 1}, "expected names of running or waiting requests, got 'chat9'"),
        (lambda running, waiting, *rest: {(running + waiting)[0]["name"]: 0}, "tokens for 'chat0', got 0"),
        (lambda running, waiting, *rest: {(running + waiting)[0]["name"]: 1.5}, "expected a whole number, got 1.5"),
    ],
}
