"""What the answers of lab 7.3 are put through."""

from __future__ import annotations

import importlib.util
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

from ..judging import Log, Task, Unfit, returns, text, whole_number

STEPS = 60  # that a scheduler plays at most


def _traffic(rng: random.Random) -> list[tuple[list[tuple[str, int, int, int]], int, bool]]:
    """Requests (name, step of arrival, prompt, output), a budget, and whether a new token comes back a step late."""
    cases = [
        ([("a", 0, 1, 3), ("b", 0, 7, 2)], 4, False),
        ([("a", 0, 5, 3), ("b", 0, 4, 2), ("c", 1, 1, 2)], 6, False),
        ([("a", 0, 3, 4), ("b", 0, 6, 3), ("c", 1, 4, 2)], 5, True),
        ([("a", 0, 1, 4), ("b", 0, 1, 4), ("c", 0, 1, 4)], 2, False),
    ]
    for size in sorted(rng.randint(2, 9) for _ in range(40)):
        requests = [
            ("abcdefghi"[i], rng.choice([0, rng.randint(0, 9)]), rng.randint(1, 30), rng.randint(1, 8))
            for i in range(size)
        ]
        rng.shuffle(requests)
        cases.append((requests, rng.choice([2, 3, rng.randint(4, 9), rng.randint(10, 40)]), rng.random() < 0.4))
    return cases


def _read_plan(value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        raise Unfit(f"expected a dict, got {value!r} ({type(value).__name__})")
    return {text(name): whole_number(tokens) for name, tokens in value.items()}


def _play_planner(answer: Callable, log: Log, requests: list, budget: int, late: bool) -> None:
    """Let it schedule; what it plans is done, as far as it can be."""
    pending: dict[str, int] = {}
    left = {name: output for name, _, _, output in requests}
    for step in range(STEPS):
        for name, arrival, prompt, _ in requests:
            if arrival == step:
                pending[name] = prompt
        given = dict(pending)
        log.at(f"step {step}, plan_step({given}, {budget})")
        plan = _read_plan(answer(given, budget))
        log.see("", plan, "Decodes first, then prompts; both in order, and cut to what is left of the budget.")
        log.see("pending is as it was", given == pending, "Work on a copy; the engine still needs its own numbers.")
        for name, behind in list(pending.items()):
            pending[name] = behind - max(0, min(plan.get(name, 0), behind))
            if behind and not pending[name]:
                left[name] -= 1
            if not pending[name] and not (late and behind):
                pending[name] = 1
            if not left[name]:
                del pending[name]
        if not pending and all(arrival <= step for _, arrival, _, _ in requests):
            break
    log.at("")
    log.see("tokens still to be generated", sum(left.values()), "Somebody starves, or stops short.")


def _describe_traffic(requests: list, budget: int, late: bool) -> str:
    words = ", ".join(f"{name} (prompt {prompt}, at step {arrival})" for name, arrival, prompt, _ in requests)
    return f"with the requests {words}"


def _measurements(rng: random.Random) -> list[tuple[list[tuple[int, int]], int]]:
    """(tokens, time) pairs: a flat start, a slope, a dip; a bound below, between, on a point, and above all."""
    cases = [
        ([(1, 100), (11, 200)], 150),
        ([(1, 100), (64, 100), (128, 740)], 741),
        ([(1, 50), (5, 90), (9, 60), (13, 100)], 75),
        ([(1, 50), (5, 80)], 40),
    ]
    for size in sorted(rng.randint(2, 7) for _ in range(50)):
        tokens, time = 1, rng.randint(20, 400)
        points = [(tokens, time)]
        for _ in range(size - 1):
            tokens += rng.choice([1, rng.randint(2, 9), 64])
            time = max(10, time + rng.choice([0, rng.randint(1, 50), rng.randint(50, 900), -rng.randint(1, 100)]))
            points.append((tokens, time))
        times = [point[1] for point in points]
        bound = rng.choice([rng.choice(times), rng.randint(min(times), max(times)), min(times) - 1, max(times) + 50])
        cases.append((points, bound))
    return cases


def _tensor(value: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A tensor as it should be, on the CPU. Raises Unfit."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise Unfit(f"expected a tensor, got {value!r} ({type(value).__name__})")
    if value.dtype != dtype:
        raise Unfit(f"expected a tensor of {dtype}, got one of {value.dtype}")
    if tuple(value.shape) != shape:
        raise Unfit(f"expected the shape {list(shape)}, got {list(value.shape)}")
    return value.detach().cpu()


def _comparable(vector: Any) -> list[float | str]:
    """Its numbers; what is none becomes a text, for nan does not even equal itself."""
    return [number if math.isfinite(number) else str(number) for number in vector.tolist()]


def _masks(rng: random.Random) -> list[tuple[int, int]]:
    cases = [(2, 5), (3, 3), (1, 4)]
    for context in sorted(rng.randint(1, 14) for _ in range(40)):
        cases.append((rng.randint(1, context), context))
    return cases


def _play_mask(answer: Callable, log: Log, query_len: int, context_len: int) -> None:
    import torch

    mask = _tensor(answer(query_len, context_len), (query_len, context_len), torch.bool)
    for query, row in enumerate(mask.tolist()):
        keys = [key for key, seen in enumerate(row) if seen]
        log.see(f"keys that query {query} sees", keys, "A token sees itself and all tokens before it.")


def _steps(rng: random.Random) -> list[tuple[list[int], list[int], int, int, int, int, int]]:
    """Query lengths, context lengths, heads, KV heads, head_dim, block_size, and what the numbers are drawn from."""
    cases = [([1], [3], 1, 1, 2, 4, 1), ([2], [5], 4, 2, 4, 2, 2), ([1, 3], [6, 3], 2, 1, 4, 4, 3)]
    for size in sorted(rng.randint(1, 5) for _ in range(30)):
        contexts = [rng.randint(1, 20) for _ in range(size)]
        queries = [rng.choice([1, context, rng.randint(1, context)]) for context in contexts]
        kv_heads = rng.choice([1, 2, 3])
        heads = kv_heads * rng.choice([1, 2, 3])
        cases.append(
            (queries, contexts, heads, kv_heads, rng.choice([2, 4, 6]), rng.choice([1, 2, 4, 8]), rng.randrange(10**6))
        )
    return cases


def _drawn(rng: random.Random, *shape: int, most: int = 3) -> Any:
    """Small whole numbers as float32: their products are exact, so a right answer is right to the last digits."""
    import torch

    size = 1
    for n in shape:
        size *= n
    return torch.tensor([float(rng.randint(-most, most)) for _ in range(size)]).reshape(shape)


def _step_of(
    queries: list[int], contexts: list[int], heads: int, kv_heads: int, dim: int, size: int, seed: int
) -> tuple:
    """The arguments of ragged_attention. What no request has written holds nan."""
    import torch

    rng = random.Random(seed)
    used = [-(-context // size) for context in contexts]
    blocks = list(range(sum(used) + 3))
    rng.shuffle(blocks)
    caches = [torch.full((len(blocks), size, kv_heads, dim), math.nan) for _ in range(2)]
    tables = []
    for context, count in zip(contexts, used):
        table = [blocks.pop() for _ in range(count)]
        for position in range(context):
            for cache in caches:
                cache[table[position // size], position % size] = _drawn(rng, kv_heads, dim)
        tables.append(table + blocks[:1] * rng.randint(0, 1))  # a block in advance, still empty
    starts = [0]
    for n in queries:
        starts.append(starts[-1] + n)
    return _drawn(rng, starts[-1], heads, dim), *caches, tables, starts, contexts, 0.5


def _play_ragged(answer: Callable, log: Log, queries: list[int], contexts: list[int], *rest: int) -> None:
    import torch

    arguments = _step_of(queries, contexts, *rest)
    q, starts = arguments[0], arguments[4]
    out = _tensor(answer(*arguments), tuple(q.shape), torch.float32)
    think = "Look at which keys this query sees, in which blocks, and of which KV head."
    for request, (start, n) in enumerate(zip(starts, queries)):
        for query in range(n):
            for head in range(q.shape[1]):
                values = _comparable(out[start + query, head])
                log.see(f"request {request}, query {query}, head {head}", values, think)


def _describe_step(
    queries: list[int], contexts: list[int], heads: int, kv_heads: int, dim: int, size: int, seed: int
) -> str:
    about = f"{heads} heads, {kv_heads} KV heads, head_dim {dim}, block_size {size}"
    return f"with query lengths {queries}, context_lens={contexts}, {about}"


def _walks(rng: random.Random) -> list[tuple[int, int, int, int, int]]:
    """Keys, tile, head_dim, how large the numbers are, and what they are drawn from (odd: all scores negative).

    The fourth has a score whose exp overflows, in the fifth every exp is 0, the sixth has many tiles.
    """
    cases = [(4, 2, 2, 1, 2), (5, 2, 2, 2, 4), (3, 8, 2, 2, 7), (6, 2, 8, 12, 38), (5, 3, 4, 9, 9), (9, 2, 2, 2, 6)]
    for keys in sorted(rng.randint(1, 30) for _ in range(40)):
        cases.append((keys, rng.randint(1, 9), rng.choice([2, 4, 8]), rng.choice([1, 2, 12]), rng.randrange(10**6)))
    return cases


def _play_walk(answer: Callable, log: Log, num_keys: int, tile: int, dim: int, most: int, seed: int) -> None:
    import torch

    rng = random.Random(seed)
    q, k, v = _drawn(rng, dim, most=most), _drawn(rng, num_keys, dim, most=most), _drawn(rng, num_keys, dim)
    if seed % 2:  # every score far below zero
        q, k = q.abs() + most, -k.abs() - most
    read: set[int] = set()
    tiles: list[weakref.ref] = []

    def load(start: int, stop: int) -> tuple:
        start, stop = whole_number(start), whole_number(stop)
        log.at(f"load({start}, {stop})")
        if not 0 <= start < stop <= num_keys:
            raise Unfit(f"there are {num_keys} keys; the last tile may be a short one")
        if stop - start > tile:
            raise Unfit(f"these are {stop - start} keys; there is room for a tile of {tile}")
        if again := read.intersection(range(start, stop)):
            raise Unfit(f"key {min(again)} is read a second time; each key may be read once")
        if (held := sum(tile() is not None for tile in tiles)) > 2:  # one to work on, and one loaded in advance
            raise Unfit(f"you still hold {held} tiles from before; add each one up, then let it go")
        read.update(range(start, stop))
        keys, values = k[start:stop].clone(), v[start:stop].clone()
        tiles.append(weakref.ref(values))
        return keys, values

    out = _tensor(answer(q, load, num_keys, tile, 0.5), (dim,), torch.float32)
    log.at("")
    log.see("keys never read", [key for key in range(num_keys) if key not in read], "Walk over all tiles.")
    think = "Whenever a larger score turns up, all that was summed before must shrink to match."
    for d, value in enumerate(_comparable(out)):
        log.see(f"output[{d}]", value, think)


def _describe_walk(num_keys: int, tile: int, dim: int, most: int, seed: int) -> str:
    scores = ", all scores far below zero" if seed % 2 else ""
    return f"with num_keys={num_keys}, tile={tile}, head_dim {dim}{scores}"


def _launches(rng: random.Random) -> list[tuple[int, int, int, int, int, int, int, int]]:
    """Queries, context, heads, KV heads, head_dim, block_size, tile, and what the numbers are drawn from."""
    cases = [(1, 3, 1, 1, 2, 4, 4, 1), (2, 5, 2, 1, 4, 2, 2, 2), (3, 3, 4, 2, 2, 4, 8, 3)]
    for context in sorted(rng.randint(1, 18) for _ in range(16)):
        kv_heads = rng.choice([1, 2])
        dim, size, tile = rng.choice([2, 4, 8]), rng.choice([1, 2, 4, 8]), rng.choice([2, 4, 8])
        queries = rng.randint(1, min(context, 3))
        cases.append((queries, context, kv_heads * rng.choice([1, 2]), kv_heads, dim, size, tile, rng.randrange(10**6)))
    return cases


def _play_kernel(answer: Any, log: Log, queries: int, context: int, heads: int, kv_heads: int, *rest: int) -> None:
    """Launch it on a grid. The table goes on behind the context, with a block of rubbish."""
    import torch

    dim, size, tile, seed = rest
    q, k_cache, v_cache, (table,), *_ = _step_of([queries], [context], heads, kv_heads, dim, size, seed)
    empty = next(block for block in range(len(k_cache)) if block not in table)
    blocks = torch.tensor(table + [empty] * 40, dtype=torch.int32)
    out = torch.full_like(q, 7e4)
    if not hasattr(type(answer), "__getitem__"):
        if importlib.util.find_spec("triton") is None:
            raise Unfit(
                "Triton is not installed (it exists for Linux: pip install triton); only this exercise needs it"
            )
        raise Unfit(f"expected a Triton kernel, got {answer!r} ({type(answer).__name__}); is @triton.jit still there?")
    device = "cpu"
    if type(answer).__name__ == "JITFunction":  # compiled, not interpreted
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            raise Unfit("the kernel is not interpreted; restart Python and run the lab's first cells before this one")
    out, *given = (tensor.to(device) for tensor in (out, q, k_cache, v_cache, blocks))
    try:
        answer[(queries, heads)](out, *given, 0.5, context - queries, heads, kv_heads, dim, size, tile)
    except Exception as error:  # Triton wraps what a kernel raises
        if "NotImplementedError" in f"{type(error).__name__} {error}":
            raise NotImplementedError from None
        raise
    for query in range(queries):
        for head in range(heads):
            think = "Look at which keys this query sees, where they lie, and what is carried from tile to tile."
            log.see(f"query {query}, head {head}", _comparable(out[query, head]), think)


def _describe_launch(queries: int, context: int, heads: int, kv_heads: int, *rest: int) -> str:
    about = f"{heads} heads, {kv_heads} KV heads, head_dim {rest[0]}, block_size {rest[1]}, tile {rest[2]}"
    return f"with {queries} queries, the last of a context of {context}, {about}"


WARM = ("torch", "triton", "triton.language")

TASKS = {
    "7.3-chunk-planner": Task(
        cases=_traffic,
        play=_play_planner,
        describe=_describe_traffic,
        success="right, nobody who reads has to wait for a prompt, and the budget holds",
    ),
    "7.3-choose-budget": Task(
        cases=_measurements,
        play=returns(whole_number),
        names=("measured", "limit_us"),
        success="right, one token more and a step could break the bound",
    ),
    "7.3-chunk-mask": Task(
        cases=_masks,
        play=_play_mask,
        names=("query_len", "context_len"),
        success="right, a chunk sees its whole past and nothing of its future",
    ),
    "7.3-ragged-attention": Task(
        cases=_steps,
        play=_play_ragged,
        describe=_describe_step,
        success="right, prompts and decodes share a batch and never see each other",
        tolerance=2e-3,
    ),
    "7.3-online-softmax": Task(
        cases=_walks,
        play=_play_walk,
        describe=_describe_walk,
        success="right, one walk over the keys and no score too large",
        tolerance=2e-3,
    ),
    "7.3-triton-attention": Task(
        cases=_launches,
        play=_play_kernel,
        describe=_describe_launch,
        success="right, this kernel reads a cache in blocks and never holds all scores",
        tolerance=2e-3,
    ),
}
