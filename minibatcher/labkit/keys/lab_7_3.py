"""Right answers to lab 7.3, and wrong ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ..judging import Key, Mistake


def _plan(
    pending: dict[str, int],
    budget: int,
    *,
    order: Callable[[str, int], Any] = lambda _, behind: behind != 1,
    take: Callable[[int, int], int] = min,
    zeros: bool = False,
    free_decodes: bool = False,
    stop_at: int | None = None,
) -> dict[str, int]:
    """order: who is served first. take(behind, left): how much. The other switches make the mistakes below."""
    plan: dict[str, int] = {}
    prompts = 0
    for name in sorted(pending, key=lambda name: order(name, pending[name])):
        behind = pending[name]
        if behind > 1 and stop_at is not None and prompts >= stop_at:
            continue
        tokens = 1 if free_decodes and behind == 1 else take(behind, budget)
        if tokens > 0 or zeros:
            plan[name] = tokens
            prompts += behind > 1
        budget = max(0, budget - tokens)
    return plan


def _unshrunk(pending: dict[str, int], budget: int) -> dict[str, int]:
    decodes = [name for name, n in pending.items() if n == 1][:budget]
    left = budget - len(decodes)
    return {name: min(n, left) for name, n in pending.items() if n > 1 and left} | {name: 1 for name in decodes}


CHUNK_PLANNER = Key(
    answer=_plan,
    mistakes=(
        Mistake(
            lambda p, b: _plan(p, b, order=lambda _, n: n == 1),
            "You serve prompts first. Then readers stall: the decodes come first.",
        ),
        Mistake(
            lambda p, b: _plan(p, b, order=lambda _, n: 0),
            "You serve everybody in order of age. First come all decodes, then the prompts.",
        ),
        Mistake(
            lambda p, b: _plan(p, b, take=lambda n, left: n if n <= left else 0),
            "You leave a prompt out when it does not fit whole. Cut it to what is left of the budget.",
        ),
        Mistake(lambda p, b: _plan(p, b, zeros=True), "A request that gets no token does not stand in the plan."),
        Mistake(
            lambda p, b: {name: n for name, n in _plan(p, b, zeros=True).items() if n or not p[name]},
            "A request that is 0 behind gets no token, so it does not stand in the plan.",
        ),
        Mistake(
            lambda p, b: _plan(p, b, free_decodes=True),
            "Decodes count against the budget, too: one token each.",
        ),
        Mistake(
            lambda p, b: _plan(p, b, stop_at=1),
            "You serve one prompt a step. If the budget has tokens left, the next prompt may have them.",
        ),
        Mistake(_unshrunk, "Each prompt gets all that is left. What the first one takes, the next one can't have."),
        Mistake(
            lambda p, b: _plan(p, b, order=lambda _, n: n),
            "You serve the shortest prompt first; the oldest comes first, or a long one may starve.",
        ),
        Mistake(
            lambda p, b: _plan(p, b, take=lambda n, left: n),
            "You do not cut the prompts. All tokens of a step together must not exceed the budget.",
        ),
        Mistake(
            lambda p, b: {name: 1 for name, n in list(p.items()) if n == 1 and b > 0} or _plan(p, b),
            "While somebody decodes, no prompt gets on. Give prompts what the decodes leave of the budget.",
        ),
    ),
)


def _time(points: list[tuple[int, int]], tokens: int) -> tuple[int, int]:
    """Of a step, as a fraction."""
    for (t0, u0), (t1, u1) in pairwise(points):
        if tokens <= t1:
            return u0 * (t1 - t0) + (u1 - u0) * (tokens - t0), t1 - t0
    return points[-1][1], 1


def _budget(points: list[tuple[int, int]], limit: int, *, strict: bool = False, gaps: bool = False) -> int:
    best = 0
    for tokens in range(1, points[-1][0] + 1):
        time, parts = _time(points, tokens)
        if time < limit * parts or (time == limit * parts and not strict):
            best = tokens
        elif not gaps:
            break
    return best


def _beyond(points: list[tuple[int, int]], limit: int) -> int:
    best, (t0, u0), (t1, u1) = _budget(points, limit), points[-2], points[-1]
    return t1 + (limit - u1) * (t1 - t0) // (u1 - u0) if best == t1 and u1 > u0 else best


def _rounded_up(points: list[tuple[int, int]], limit: int) -> int:
    best = _budget(points, limit)
    if best in (0, points[-1][0]):
        return best
    here, parts = _time(points, best)
    return best + (here != limit * parts)


def _measured_only(points: list[tuple[int, int]], limit: int) -> int:
    best = 0
    for tokens, time in points:
        if time > limit:
            break
        best = tokens
    return best


CHOOSE_BUDGET = Key(
    answer=_budget,
    mistakes=(
        Mistake(
            _measured_only,
            "You return a measured point. Between two points the time grows along a straight line; go up to the bound.",
        ),
        Mistake(
            lambda m, u: _budget(m, u, gaps=True),
            "The times may dip, and a step may hold fewer tokens than its budget: all smaller steps must hold as well.",
        ),
        Mistake(lambda m, u: _budget(m, u, strict=True), "A step that takes exactly the bound is still within it."),
        Mistake(_beyond, "Nothing was measured beyond the last point, so do not go further."),
        Mistake(lambda m, u: max(1, _budget(m, u)), "If even one token takes too long, the answer is 0."),
        Mistake(
            lambda m, u: min(_budget(m, u), m[-1][0] - 1),
            "You stop before the last measured size. If no step is too long, that size is the answer.",
        ),
        Mistake(_rounded_up, "You round up, and that step takes longer than the bound. Round down."),
        Mistake(
            lambda m, u: max([t for t, time in m if time <= u], default=0),
            "You return the last measured point within the bound. Look between the points, and stop at the first "
            "step that is too long.",
        ),
    ),
)


def _mask(query_len: int, context_len: int, shift: int | None = None) -> Any:
    import torch

    first = context_len - query_len if shift is None else shift
    return torch.tensor([[key <= first + query for key in range(context_len)] for query in range(query_len)])


CHUNK_MASK = Key(
    answer=_mask,
    mistakes=(
        Mistake(
            lambda q, c: _mask(q, c, 0),
            "Your queries are the first tokens of the context. They are the last ones, so shift the triangle.",
        ),
        Mistake(lambda q, c: _mask(q, c, c - q - 1), "A query does not see itself, and it should; you are off by one."),
        Mistake(
            lambda q, c: _mask(q, c, c - q + 1), "A query sees the token after it, which it should not; off by one."
        ),
        Mistake(lambda q, c: ~_mask(q, c), "True and False are swapped: True where a query sees the key."),
        Mistake(lambda q, c: _mask(q, c, c), "Every query sees every key. A token must not see the tokens after it."),
        Mistake(
            lambda q, c: _mask(c, c, 0),
            "You return a row for each token of the context. There are only query_len queries.",
        ),
        Mistake(lambda q, c: _mask(q, c).T, "Rows and columns are swapped: a row is a query, a column a key."),
        Mistake(lambda q, c: _mask(q, c).int(), "The mask should hold True and False, in dtype torch.bool."),
    ),
)


def _ragged(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    tables: list[list[int]],
    starts: list[int],
    contexts: list[int],
    scale: float,
    *,
    kv_of: Callable[[int, int, int], int] = lambda head, heads, kv_heads: head * kv_heads // heads,
    sees: Callable[[int, int, int], int] = lambda query, queries, context: context - queries + query + 1,
    block_of: Callable[[list[int], int], int] = lambda table, block: table[block],
) -> Any:
    """In float64, a query at a time. sees(query, queries, context): how many keys. The others make mistakes."""
    import torch

    heads, kv_heads, size = q.shape[1], k_cache.shape[2], k_cache.shape[1]
    keys, values, out = k_cache.double(), v_cache.double(), torch.zeros_like(q, dtype=torch.float64)
    for r, context in enumerate(contexts):
        queries = starts[r + 1] - starts[r]
        rooms = range(len(tables[r]) * size)
        slots = [(block_of(tables[r], position // size), position % size) for position in rooms]
        for i in range(queries):
            seen = slots[: max(1, min(sees(i, queries, context), len(slots)))]
            for head in range(heads):
                kv = kv_of(head, heads, kv_heads)
                k = torch.stack([keys[block, slot, kv] for block, slot in seen])
                v = torch.stack([values[block, slot, kv] for block, slot in seen])
                weights = torch.softmax(k @ q[starts[r] + i, head].double() * scale, 0)
                out[starts[r] + i, head] = weights @ v
    return out.float()


def _masked_only(
    q: Any, k_cache: Any, v_cache: Any, tables: list[list[int]], starts: list[int], contexts: list[int], scale: float
) -> Any:
    """All slots of a request's blocks are read; what lies past its context gets the weight 0, and 0 × nan is nan."""
    out = _ragged(q, k_cache, v_cache, tables, starts, contexts, scale)
    for r, context in enumerate(contexts):
        if len(tables[r]) * k_cache.shape[1] > context:
            out[starts[r] : starts[r + 1]] = math.nan
    return out


RAGGED = Key(
    answer=_ragged,
    mistakes=(
        Mistake(
            lambda *a: _ragged(*a, kv_of=lambda head, heads, kv_heads: head % kv_heads),
            "The KV heads are dealt out in turn. Neighbouring heads share one: head // (heads // kv_heads).",
        ),
        Mistake(
            lambda *a: _ragged(*a, kv_of=lambda head, heads, kv_heads: 0),
            "All heads read the first KV head; each group of heads has one of its own.",
        ),
        Mistake(
            lambda *a: _ragged(*a, sees=lambda i, queries, context: context),
            "A query sees the keys after it. Where in its context does it stand?",
        ),
        Mistake(
            lambda *a: _ragged(*a, sees=lambda i, queries, context: i + 1),
            "You count a query's place from the start of its chunk. Its chunk is the end of the context.",
        ),
        Mistake(
            lambda *a: _ragged(*a, sees=lambda i, queries, context: context - queries + i),
            "A query does not see itself, and it should; you are off by one.",
        ),
        Mistake(
            lambda *a: _ragged(*a, sees=lambda i, queries, context: 10**6),
            "You read the blocks to their end. Past the context there is rubbish in them.",
        ),
        Mistake(
            _masked_only,
            "A mask alone does not help past the context: a weight of 0 times nan is nan. Cut keys and values there.",
        ),
        Mistake(
            lambda *a: _ragged(*a, block_of=lambda table, block: sorted(table)[block]),
            "You read a request's blocks in the order of the cache; its block table says the right order.",
        ),
        Mistake(
            lambda *a: _ragged(*a, block_of=lambda table, block: block),
            "You read the cache from its start. A request's keys lie in the blocks of its block table.",
        ),
        Mistake(
            lambda *a: _ragged(*a[:-1], 1.0), "The scores are not scaled; multiply them by scale before the softmax."
        ),
        Mistake(lambda *a: _ragged(a[0], a[1], a[1], *a[3:]), "You sum keys where values are asked for."),
    ),
)


def _walk(
    q: Any,
    load: Callable,
    num_keys: int,
    tile: int,
    scale: float,
    *,
    first: float = -math.inf,
    shrink_sum: bool = True,
    shrink_acc: bool = True,
    frozen: bool = False,
    per_tile: bool = False,
    stop: Callable[[int, int], int] = lambda num_keys, tile: num_keys,
    divide: bool = True,
) -> Any:
    """In float32, as an answer has it; the switches make the mistakes below."""
    import torch

    largest, total, acc = torch.tensor(first), torch.tensor(0.0), torch.zeros_like(q)
    for start in range(0, stop(num_keys, tile), tile):
        k, v = load(start, min(start + tile, num_keys))
        scores = k @ q * scale
        new = largest if frozen else torch.maximum(largest, scores.max())
        factor = torch.exp(largest - new)
        weights = torch.softmax(scores, 0) if per_tile else torch.exp(scores - new)
        total = total * (factor if shrink_sum and not per_tile else 1) + weights.sum()
        acc = acc * (factor if shrink_acc and not per_tile else 1) + weights @ v
        largest = new
    return acc / total if divide else acc


ONLINE_SOFTMAX = Key(
    answer=_walk,
    mistakes=(
        Mistake(
            lambda *a: _walk(*a, first=0.0, frozen=True),
            "You take exp of the scores as they are, which overflows. Take the largest score so far away first.",
        ),
        Mistake(
            lambda *a: _walk(*a, first=0.0),
            "Your largest score starts at 0; when all are far below, every weight becomes 0. Start at -inf.",
        ),
        Mistake(
            lambda *a: _walk(*a, shrink_acc=False),
            "You rescale the sum of the weights, but not the weighted sum of the values.",
        ),
        Mistake(
            lambda *a: _walk(*a, shrink_sum=False),
            "You rescale the weighted sum of the values, but not the sum of the weights.",
        ),
        Mistake(
            lambda *a: _walk(*a, shrink_sum=False, shrink_acc=False),
            "You never rescale. What was summed with an old largest score must be multiplied by exp(old - new).",
        ),
        Mistake(
            lambda *a: _walk(*a, per_tile=True),
            "You divide in each tile, as if all tiles weighed alike. Divide once, at the end.",
        ),
        Mistake(
            lambda *a: _walk(*a, divide=False), "At the end, divide by the sum of the weights; they must add up to 1."
        ),
        Mistake(
            lambda *a: _walk(*a[:-1], 1.0), "The scores are not scaled; multiply them by scale before the softmax."
        ),
        Mistake(
            lambda *a: _walk(*a, stop=lambda n, tile: max(tile, n // tile * tile)),
            "The last tile is left out where it is a short one.",
        ),
    ),
)


class _Kernel:
    """Is launched as a Triton kernel is, so that judging needs no Triton. The switches make the mistakes below."""

    def __init__(
        self, *, scaled: bool = True, divide: bool = True, rubbish: bool = False, masked: bool = True, **switches: Any
    ) -> None:
        self.scaled, self.divide, self.rubbish, self.masked = scaled, divide, rubbish, masked
        self.switches = switches

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def run(out, q, k_cache, v_cache, table, scale, before, heads, kv_heads, dim, size, tile) -> None:
            context = before + grid[0]
            scale = scale if self.scaled else 1.0
            given = [[0, grid[0]], [context], scale]
            right = _ragged(q, k_cache, v_cache, [table.tolist()], *given, **self.switches)
            for query in range(grid[0]):
                seen = before + query + 1
                slots = [(int(table[i // size]), i % size) for i in range(seen)]
                for head in range(heads):
                    k = k_cache[[b for b, _ in slots], [s for _, s in slots], head * kv_heads // heads]
                    total = (k @ q[query, head] * scale).exp().sum()
                    if self.rubbish:  # keys that are not there score 0
                        right[query, head] *= total / (total + -seen % tile)
                    absent = [i % size for i in range(seen, seen + -seen % tile)]  # read in block 0: other=0
                    if not self.masked and v_cache[0, absent, head * kv_heads // heads].isnan().any():
                        right[query, head] = math.nan  # as 0 times nan is
                    if not self.divide:
                        right[query, head] *= total
            out.copy_(right)

        return run


TRITON_ATTENTION = Key(
    answer=_Kernel(),
    mistakes=(
        Mistake(
            _Kernel(kv_of=lambda head, heads, kv_heads: head % kv_heads),
            "The KV heads are dealt out in turn. Neighbouring heads share one: head // (HEADS // KV_HEADS).",
        ),
        Mistake(
            _Kernel(sees=lambda i, queries, context: context),
            "A query sees the keys after it. It stands at `before + query` and sees one key more than that.",
        ),
        Mistake(
            _Kernel(sees=lambda i, queries, context: context - queries + i),
            "A query does not see itself, and it should; you are off by one.",
        ),
        Mistake(
            _Kernel(sees=lambda i, queries, context: context - queries + 1),
            "All queries see what the first one sees. Query `query` stands at `before + query`.",
        ),
        Mistake(
            _Kernel(sees=lambda i, queries, context: i + 1),
            "You count a query's place from the first query. There are `before` tokens before that one.",
        ),
        Mistake(
            _Kernel(block_of=lambda table, block: block),
            "You read the cache from its start. Load each key's block number from the table.",
        ),
        Mistake(_Kernel(scaled=False), "The scores are not scaled; multiply them by scale before the softmax."),
        Mistake(_Kernel(divide=False), "At the end, divide by the sum of the weights; they must add up to 1."),
        Mistake(
            _Kernel(rubbish=True),
            "The last tile reaches past the last key. A key that is not there needs the score -inf, not 0.",
        ),
        Mistake(
            _Kernel(masked=False),
            "You load keys or values that are not there. Give their tl.load a mask and other=0.0; 0 times nan is nan.",
        ),
    ),
)

KEYS = {
    "7.3-chunk-planner": CHUNK_PLANNER,
    "7.3-choose-budget": CHOOSE_BUDGET,
    "7.3-chunk-mask": CHUNK_MASK,
    "7.3-ragged-attention": RAGGED,
    "7.3-online-softmax": ONLINE_SOFTMAX,
    "7.3-triton-attention": TRITON_ATTENTION,
}
