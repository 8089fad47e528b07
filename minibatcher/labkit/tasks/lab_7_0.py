"""What the answers of lab 7.0 are put through."""

from __future__ import annotations

import random
from typing import Any

from ..judging import Log, Task, list_of, number, pair_of, returns, whole_number


def _request_cases(rng: random.Random) -> list[tuple[int, int]]:
    """Tokens of a prompt and of an answer: the worked case, an answer of one token, a prompt of one, then anything."""
    cases = [(5, 3), (4, 1), (1, 6), (1, 1)]
    return cases + [(round(rng.lognormvariate(3, 1)) + 1, rng.randint(1, 60)) for _ in range(40)]


def _kv_cases(rng: random.Random) -> list[tuple[int, ...]]:
    """Layers, heads of queries, heads of keys and values, head size, bytes: with GQA and without."""
    cases: list[tuple[int, ...]] = [(2, 4, 2, 3, 2), (1, 1, 1, 5, 1), (3, 6, 6, 4, 2), (40, 40, 40, 128, 2)]
    for _ in range(40):
        kv_heads = rng.choice([1, 2, 3, 4, 5, 8])
        heads = kv_heads * rng.choice([1, 2, 3, 4, 7, 8])
        cases.append((rng.randint(1, 80), heads, kv_heads, rng.choice([16, 48, 64, 80, 128]), rng.choice([1, 2, 4])))
    return cases


def _fit_cases(rng: random.Random) -> list[tuple[int, ...]]:
    """Memory, weights, workspace, KV a token, tokens: a full device, one without room, weights too large, anything."""
    cases: list[tuple[int, ...]] = [
        (40, 20, 5, 2, 3),
        (37, 20, 5, 2, 3),
        (30, 20, 5, 2, 3),
        (10, 20, 5, 1, 1),
        (22, 20, 5, 1, 2),
    ]
    for _ in range(50):
        weights, workspace = rng.randint(1, 150) * 10**9, rng.randint(1, 40) * 10**8
        kv, tokens = 1024 * rng.randint(4, 900), rng.randint(100, 30_000)
        room = kv * tokens * rng.randint(0, 60) + rng.choice([0, kv * tokens - 1, rng.randrange(kv * tokens)])
        short = rng.random() < 0.25
        memory = rng.randint(1, weights + workspace - 1) if short else weights + workspace + room
        cases.append((memory, weights, workspace, kv, tokens))
    return cases


def _step_cases(rng: random.Random) -> list[tuple[int, ...]]:
    """Batch, weights, cache, FLOPs, bandwidth, rate: the worked case, ties, long caches, no caches, then anything."""
    cases: list[tuple[int, ...]] = [
        (4, 12, 1, 6, 2, 6),
        (1, 12, 0, 6, 2, 3),
        (14, 12, 1, 6, 2, 6),
        (3, 8, 2, 4, 2, 4),
        (2, 8, 6, 4, 2, 4),
    ]
    while len(cases) < 50:
        bandwidth, rate = rng.randint(20, 4000) * 10**9, rng.randint(1, 900) * 10**12
        weights = rng.randint(1, 140) * 10**9 + rng.randrange(10**9)
        flops = weights + rng.randrange(10**9)
        share = rng.choice([0, rng.uniform(0.05, 0.8), rng.uniform(1.2, 4)])  # time for a cache, of that for its FLOPs
        cache = int(share * flops * bandwidth / rate)
        gained, needed = flops * bandwidth - cache * rate, weights * rate
        if gained > 0 and (needed > 5000 * gained or not 1e-4 < needed % gained / gained < 1 - 1e-4):
            continue  # a loop would take long, or an answer with floats might miss a tie
        near = needed // gained if gained > 0 else 50
        cases.append((rng.randint(1, 2 * near + 2), weights, cache, flops, bandwidth, rate))
    return cases


def _play_step(answer: Any, log: Log, *arguments: int) -> None:
    parts = pair_of("seconds", "smallest batch", read=lambda part: part)(answer(*arguments))
    log.at("seconds")
    log.see("", number(parts["seconds"]), "Weights once, a cache for each request; the longer time counts.")
    log.at("smallest batch")
    think = "For how many requests do the FLOPs take at least as long as the weights and the caches? 0 means never."
    log.see("", whole_number(parts["smallest batch"]), think)


TASKS = {
    "7.0-two-phases": Task(
        cases=_request_cases,
        play=returns(list_of(whole_number)),
        names=("prompt_tokens", "output_tokens"),
        success="right, one wide pass and then narrow ones",
    ),
    "7.0-what-the-cache-saves": Task(
        cases=_request_cases,
        play=returns(pair_of("with a cache", "without")),
        names=("prompt_tokens", "output_tokens"),
        success="right, with a cache each token is computed once",
    ),
    "7.0-kv-bytes": Task(
        cases=_kv_cases,
        play=returns(whole_number),
        names=("num_layers", "num_heads", "num_kv_heads", "head_size", "bytes_per_value"),
        success="right, keys and values of every layer, and no queries",
    ),
    "7.0-how-many-fit": Task(
        cases=_fit_cases,
        play=returns(whole_number),
        names=("memory_bytes", "weight_bytes", "workspace_bytes", "kv_bytes_per_token", "tokens_per_request"),
        success="right, what the weights and the workspace leave is shared out",
    ),
    "7.0-step-time": Task(
        cases=_step_cases,
        play=_play_step,
        names=("batch", "weight_bytes", "cache_bytes", "flops", "bandwidth", "flop_rate"),
        success="right, the slower of memory and arithmetic decides",
    ),
}
