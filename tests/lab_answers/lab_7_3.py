"""More answers to lab 7.3: right ones that are built in another way, and wrong ones with what they must be told."""

import math
from collections import deque
from itertools import pairwise

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def plan_with_a_queue(pending, budget):
    queue = deque(name for name in pending if pending[name] == 1)
    queue.extend(name for name in pending if pending[name] > 1)
    plan = {}
    while queue and budget:
        name = queue.popleft()
        plan[name] = min(budget, pending[name])
        budget -= plan[name]
    return plan


def plan_from_both_ends(pending, budget):
    """In the order of pending: what decodes need is put aside first."""
    aside = min(budget, sum(behind == 1 for behind in pending.values()))
    for_prompts, plan = budget - aside, {}
    for name, behind in pending.items():
        left = aside if behind == 1 else for_prompts
        if min(behind, left) > 0:
            plan[name] = min(behind, left)
        aside -= plan.get(name, 0) if behind == 1 else 0
        for_prompts -= plan.get(name, 0) if behind > 1 else 0
    return plan


def plan_and_empty(pending, budget):
    plan = plan_with_a_queue(pending, budget)
    for name, tokens in plan.items():
        pending[name] -= tokens
    return plan


def budget_one_by_one(measured, limit_us):
    for (t0, u0), (t1, u1) in pairwise(measured):
        for tokens in range(t0, t1 + 1):
            if u0 * (t1 - t0) + (u1 - u0) * (tokens - t0) > limit_us * (t1 - t0):
                return tokens - 1
    return measured[-1][0]


def budget_recursive(measured, limit_us):
    (t0, u0), *rest = measured
    if u0 > limit_us:
        return t0 - 1
    if not rest or rest[0][1] <= limit_us:
        return budget_recursive(rest, limit_us) if rest else t0
    return t0 + math.floor((limit_us - u0) * (rest[0][0] - t0) / (rest[0][1] - u0))


def mask_by_tril(query_len, context_len):
    return torch.ones(query_len, context_len, dtype=torch.bool).tril(context_len - query_len)


def mask_from_the_square(query_len, context_len):
    return torch.ones(context_len, context_len).triu(1).eq(0)[context_len - query_len :]


def ragged_by_query(q, k_cache, v_cache, block_tables, query_starts, context_lens, scale):
    size, group, rows = k_cache.shape[1], q.shape[1] // k_cache.shape[2], []
    for r, (first, end) in enumerate(pairwise(query_starts)):
        for i in range(first, end):
            seen = torch.arange(context_lens[r] - (end - first) + i - first + 1)
            blocks = torch.tensor(block_tables[r])[seen // size]
            k, v = k_cache[blocks, seen % size], v_cache[blocks, seen % size]
            heads = [torch.softmax(k[:, h // group] @ q[i, h] * scale, 0) @ v[:, h // group] for h in range(q.shape[1])]
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def ragged_by_sdpa(q, k_cache, v_cache, block_tables, query_starts, context_lens, scale):
    parts = []
    for r, (first, end) in enumerate(pairwise(query_starts)):
        n, m, group = end - first, context_lens[r], q.shape[1] // k_cache.shape[2]
        k, v = (torch.cat([c[b] for b in block_tables[r]])[:m].transpose(0, 1) for c in (k_cache, v_cache))
        mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        part = torch.nn.functional.scaled_dot_product_attention(
            q[first:end].transpose(0, 1),
            k.repeat_interleave(group, 0),
            v.repeat_interleave(group, 0),
            attn_mask=mask,
            scale=scale,
        )
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)


def ragged_in_one_piece(q, *rest):
    """Requests see each other: all keys of the step behind one another."""
    k_cache, v_cache, tables, _, contexts, scale = rest
    group = q.shape[1] // k_cache.shape[2]
    k, v = (
        torch.cat([c[t].flatten(0, 1)[:m] for t, m in zip(tables, contexts)]).repeat_interleave(group, 1)
        for c in (k_cache, v_cache)
    )
    return torch.einsum("hqk,khd->qhd", (torch.einsum("qhd,khd->hqk", q, k) * scale).softmax(-1), v)


def online_key_by_key(q, load, num_keys, tile, scale):
    largest, total, acc = -math.inf, 0.0, torch.zeros_like(q)
    for key in range(num_keys):
        k, v = load(key, key + 1)
        score = float(k[0] @ q) * scale
        new = max(largest, score)
        total = total * math.exp(largest - new) + math.exp(score - new)
        acc = acc * math.exp(largest - new) + math.exp(score - new) * v[0]
        largest = new
    return acc / total


def online_from_the_end(q, load, num_keys, tile, scale):
    """Carries the average in place of the sum, and the logarithm of the sum."""
    log_total, out = torch.tensor(-math.inf), torch.zeros_like(q)
    for stop in range(num_keys, 0, -tile):
        k, v = load(max(0, stop - tile), stop)
        scores = k @ q * scale
        here = torch.logsumexp(scores, 0)
        new = torch.logaddexp(log_total, here)
        out = out * torch.exp(log_total - new) + torch.softmax(scores, 0) @ v * torch.exp(here - new)
        log_total = new
    return out


def online_all_at_once(q, load, num_keys, tile, scale):
    k, v = load(0, num_keys)
    return torch.softmax(k @ q * scale, 0) @ v


def online_from_a_pile(q, load, num_keys, tile, scale):
    pile = [load(i, min(i + tile, num_keys)) for i in range(0, num_keys, tile)]
    k, v = (torch.cat(half) for half in zip(*pile))
    return torch.softmax(k @ q * scale, 0) @ v


def online_with_the_next_at_hand(q, load, num_keys, tile, scale):
    """Loads a tile in advance."""
    stops = [*range(tile, num_keys, tile), num_keys]
    following = load(0, stops[0])
    largest, total, acc = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros_like(q)
    for here, after in pairwise([*stops, num_keys]):
        k, v = following
        following = load(here, after) if here < after else None
        scores = k @ q * scale
        new = torch.maximum(largest, scores.max())
        total = total * torch.exp(largest - new) + torch.exp(scores - new).sum()
        acc = acc * torch.exp(largest - new) + torch.exp(scores - new) @ v
        largest = new
    return acc / total


def ragged_masked_only(q, k_cache, v_cache, tables, starts, contexts, scale):
    """Reads all blocks of a table, and weighs with 0 what lies past the context."""
    out, group = torch.empty_like(q), q.shape[1] // k_cache.shape[2]
    for r, (first, end) in enumerate(pairwise(starts)):
        k, v = (c[tables[r]].flatten(0, 1).repeat_interleave(group, dim=1) for c in (k_cache, v_cache))
        hidden = ~torch.ones(end - first, len(k), dtype=torch.bool).tril(contexts[r] - (end - first))
        scores = torch.einsum("qhd,khd->hqk", q[first:end], k) * scale
        out[first:end] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
    return out


def online_in_two_walks(q, load, num_keys, tile, scale):
    starts = range(0, num_keys, tile)
    scores = torch.cat([load(i, min(i + tile, num_keys))[0] @ q for i in starts]) * scale
    values = torch.cat([load(i, min(i + tile, num_keys))[1] for i in starts])
    return torch.softmax(scores, 0) @ values


RIGHT = {
    "7.3-chunk-planner": [plan_with_a_queue, plan_from_both_ends],
    "7.3-choose-budget": [budget_one_by_one, budget_recursive],
    "7.3-chunk-mask": [mask_by_tril, mask_from_the_square],
    "7.3-ragged-attention": [ragged_by_query, ragged_by_sdpa],
    "7.3-online-softmax": [online_key_by_key, online_from_the_end, online_with_the_next_at_hand],
}

WRONG = {
    "7.3-chunk-planner": [
        (lambda p, b: {"a": 1, "b": 3}, "expected"),
        (lambda p, b: [("a", 1)], "expected a dict"),
        (lambda p, b: {}, "Decodes first"),
        (plan_and_empty, "Work on a copy"),
        (lambda p, b: {name: b // len(p) for name in p}, "cut to what is left"),
        (lambda p, b: {name: 0.5 for name in p}, "expected a whole number"),
    ],
    "7.3-choose-budget": [
        (lambda m, u: 6, "expected 128, got 6"),
        (lambda m, u: 0, "expected 6, got 0"),
        (lambda m, u: str(budget_one_by_one(m, u)), "expected a whole number"),
        (lambda m, u: (u - m[0][1]) // m[0][1], "expected 6, got 0"),
        (lambda m, u: m.clear(), "expected a whole number, got None"),
    ],
    "7.3-chunk-mask": [
        (lambda q, c: torch.ones(2, 5, dtype=torch.bool), "query 0"),
        (lambda q, c: mask_by_tril(q, c).tolist(), "expected a tensor"),
        (lambda q, c: torch.zeros(q, c, dtype=torch.bool), "A token sees itself"),
        (lambda q, c: mask_by_tril(q, c).flip(0), "A token sees itself"),
        (lambda q, c: mask_by_tril(q, c)[None], "expected the shape"),
    ],
    "7.3-ragged-attention": [
        (lambda q, *rest: q, "request 0, query 0, head 0"),
        (lambda q, *rest: torch.zeros_like(q), "which keys this query sees"),
        (lambda *a: ragged_by_query(*a).double(), "float64"),
        (lambda *a: ragged_by_query(*a).tolist(), "expected a tensor"),
        (lambda *a: ragged_by_query(*a)[:-1], "expected the shape"),
        (ragged_in_one_piece, "which keys this query sees"),
        (ragged_masked_only, "0 times nan is nan"),
    ],
    "7.3-online-softmax": [
        (lambda q, load, n, tile, scale: torch.zeros_like(q), "keys never read"),
        (online_all_at_once, "there is room for a tile of 2"),
        (online_in_two_walks, "is read a second time"),
        (online_from_a_pile, "you still hold 3 tiles"),
        (lambda q, load, n, tile, scale: load(0, tile)[1][0], "never read"),
        (lambda *a: online_key_by_key(*a).tolist(), "expected a tensor"),
        (lambda *a: online_from_the_end(*a)[None], "expected the shape"),
    ],
}

if triton:

    @triton.jit
    def kernel_key_by_key(
        out_ptr, q_ptr, k_ptr, v_ptr, table_ptr, scale, before,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
        BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        d = tl.arange(0, HEAD_DIM)
        row = (tl.program_id(0) * HEADS + tl.program_id(1)) * HEAD_DIM + d
        q = tl.load(q_ptr + row)
        largest = float("-inf")
        total = 0.0
        acc = tl.zeros([HEAD_DIM], tl.float32)
        for key in range(0, before + tl.program_id(0) + 1):
            token = tl.load(table_ptr + key // BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE
            at = (token * KV_HEADS + tl.program_id(1) * KV_HEADS // HEADS) * HEAD_DIM + d
            score = tl.sum(q * tl.load(k_ptr + at), 0) * scale
            new = tl.maximum(largest, score)
            total = total * tl.exp(largest - new) + tl.exp(score - new)
            acc = acc * tl.exp(largest - new) + tl.exp(score - new) * tl.load(v_ptr + at)
            largest = new
        tl.store(out_ptr + row, acc / total)

    @triton.jit
    def kernel_in_base_two(
        out_ptr, q_ptr, k_ptr, v_ptr, table_ptr, scale, before,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
        BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        """Keeps the average in place of the sum."""
        query, head = tl.program_id(0), tl.program_id(1)
        d = tl.arange(0, HEAD_DIM)[None, :]
        row = (query * HEADS + head) * HEAD_DIM + d
        q = tl.load(q_ptr + row) * scale * 1.4426950408889634
        largest = float("-inf")
        total = 0.0
        out = tl.zeros([1, HEAD_DIM], tl.float32)
        for tile in range(0, tl.cdiv(before + query + 1, TILE)):
            key = (tile * TILE + tl.arange(0, TILE))[:, None]
            there = key <= before + query
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=there, other=0)
            at = ((block * BLOCK_SIZE + key % BLOCK_SIZE) * KV_HEADS + head // (HEADS // KV_HEADS)) * HEAD_DIM + d
            score = tl.sum(q * tl.load(k_ptr + at, mask=there, other=0.0), 1)[:, None]
            score = tl.where(there, score, float("-inf"))
            new = tl.maximum(largest, tl.max(tl.max(score, 1), 0))
            weight = tl.exp2(score - new)
            old = total * tl.exp2(largest - new)
            total = old + tl.sum(tl.sum(weight, 1), 0)
            values = tl.load(v_ptr + at, mask=there, other=0.0)
            out = (out * old + tl.sum(weight * values, 0)[None, :]) / total
            largest = new
        tl.store(out_ptr + row, out)

    @triton.jit
    def kernel_that_copies(out_ptr, q_ptr, k, v, table, scale, before, HEADS, KV, HEAD_DIM: tl.constexpr, SIZE, TILE):
        row = (tl.program_id(0) * HEADS + tl.program_id(1)) * HEAD_DIM + tl.arange(0, HEAD_DIM)
        tl.store(out_ptr + row, tl.load(q_ptr + row))

    @triton.jit
    def kernel_that_stores_nothing(out, q, k, v, table, scale, before, HEADS, KV, HEAD_DIM, SIZE, TILE):
        tl.program_id(0)

    @triton.jit
    def kernel_of_the_first_head(
        out_ptr, q_ptr, k, v, table, scale, before, HEADS, KV, HEAD_DIM: tl.constexpr, SIZE, TILE
    ):
        row = tl.program_id(0) * HEAD_DIM + tl.arange(0, HEAD_DIM)
        tl.store(out_ptr + row, tl.load(v + row) * 0.0)

    RIGHT["7.3-triton-attention"] = [kernel_key_by_key, kernel_in_base_two]
    WRONG["7.3-triton-attention"] = [
        (kernel_that_copies, "query 0, head 0"),
        (kernel_that_stores_nothing, "got [70000"),
        (kernel_of_the_first_head, "what is carried from tile to tile"),
        (ragged_by_query, "expected a Triton kernel"),
        (None, "expected a Triton kernel"),
        ([1, 2], "raised TypeError"),
    ]
