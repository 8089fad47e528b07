"""Random inputs for the attention kernels, their float64 reference, and the comparison of the two.

The tests, `minibatcher kernels --check` and the benchmark draw from here, so all of them mean the same by "right".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class WrongValues(AssertionError):
    """A kernel's output differs from the reference by more than rounding explains."""


@dataclass(frozen=True)
class Shape:
    """A step's requests, the last query_lens tokens of context_lens being this step's, and a model's heads."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_splits: int | None = None  # of a decode

    def __str__(self) -> str:
        requests = ",".join(f"{q}/{c}" for q, c in zip(self.query_lens[:6], self.context_lens))
        more = "" if len(self.query_lens) <= 6 else f",+{len(self.query_lens) - 6}"
        splits = "" if self.num_splits is None else f"-split{self.num_splits}"
        return f"{requests}{more}-h{self.num_heads}:{self.num_kv_heads}x{self.head_dim}-block{self.block_size}{splits}"


@dataclass(frozen=True)
class Case:
    """The tensors of a step, as the engine would have them; names as in attention.cache.RaggedBatch."""

    shape: Shape
    q: Tensor  # [T, num_heads, head_dim]; q, k, v are slices of one fused projection, so their rows lie apart
    k: Tensor  # [T, num_kv_heads, head_dim], what the cache holds for this step's tokens
    v: Tensor
    k_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: Tensor
    block_tables: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    slot_mapping: Tensor
    scale: float


def random_case(shape: Shape, dtype: torch.dtype, device: torch.device | str, seed: int, poison: bool = True) -> Case:
    """Normal random numbers, the requests' blocks scattered over the pool. poison: what no query may see is NaN."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    width = shape.num_heads + 2 * shape.num_kv_heads
    fused = torch.randn(sum(shape.query_lens), width, shape.head_dim, generator=generator, device=device).to(dtype)
    q, k, v = fused.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)

    # Block 0 belongs to nobody, as it pads the rows of the table: reading through the padding shows.
    size = shape.block_size
    counts = [math.ceil(length / size) for length in shape.context_lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed))[: sum(counts)] + 1
    block_tables = torch.zeros(len(counts), max(counts, default=0) + 1, dtype=torch.int32)
    for table, blocks in zip(block_tables, order.split(counts)):
        table[: len(blocks)] = blocks
    pool = (num_blocks, size, shape.num_kv_heads, shape.head_dim)
    if poison:
        k_cache, v_cache = torch.full((2, *pool), torch.nan, dtype=dtype, device=device)
    else:
        k_cache, v_cache = torch.zeros((2, *pool), dtype=dtype, device=device)

    slots: list[Tensor] = []
    first = 0
    for table, query_len, context_len in zip(block_tables.long(), shape.query_lens, shape.context_lens):
        token = torch.arange(context_len)
        slot = (table[token // size] * size + token % size).to(device)
        for cache, now in ((k_cache, k), (v_cache, v)):
            tokens = torch.randn(context_len, *pool[2:], generator=generator, device=device).to(dtype)
            tokens[context_len - query_len :] = now[first : first + query_len]
            cache.view(-1, *pool[2:])[slot] = tokens
        slots.append(slot[context_len - query_len :])
        first += query_len
    return Case(
        shape,
        q,
        k,
        v,
        k_cache,
        v_cache,
        block_tables.to(device),
        torch.tensor([0, *accumulate(shape.query_lens)], dtype=torch.int32, device=device),
        torch.tensor(shape.context_lens, dtype=torch.int32, device=device),
        torch.cat(slots),
        shape.head_dim**-0.5 * 1.25,  # not the default of any library
    )


def reference(case: Case) -> Tensor:
    """What attention should give, in float64, [T, num_heads, head_dim]; zeros for a query without keys."""
    shape = case.shape
    group = shape.num_heads // shape.num_kv_heads
    out = torch.zeros(case.q.shape, dtype=torch.float64, device=case.q.device)
    first = 0
    for table, query_len, context_len in zip(case.block_tables.long(), shape.query_lens, shape.context_lens):
        if context_len > 0:
            blocks = table[: math.ceil(context_len / shape.block_size)]
            keys, values = (
                cache[blocks].flatten(0, 1)[:context_len].double().repeat_interleave(group, 1)
                for cache in (case.k_cache, case.v_cache)
            )
            scores = torch.einsum("qhd,khd->hqk", case.q[first : first + query_len].double(), keys) * case.scale
            visible = torch.ones(query_len, context_len, dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(~visible.tril(context_len - query_len), -torch.inf)
            out[first : first + query_len] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        first += query_len
    return out


def largest_error(out: Tensor, expected: Tensor) -> float:
    """The largest of |out - expected| / (1 + |expected|); infinite where out has a NaN or the wrong shape."""
    if out.shape != expected.shape or not bool(out.isfinite().all()):
        return math.inf
    error = (out.double() - expected.double()).abs() / (1 + expected.double().abs())
    return float(error.max()) if error.numel() else 0.0


# How each kernel's launcher is called for a case of its kind.
CALLS: dict[str, Callable[[Callable[..., Tensor], Case], Tensor]] = {
    "naive_attention": lambda launch, c: launch(c.q, c.k, c.v, c.scale),
    "tiled_attention": lambda launch, c: launch(c.q, c.k, c.v, c.scale),
    "paged_attention": lambda launch, c: launch(
        c.q, c.k_cache, c.v_cache, c.block_tables[0], c.scale, c.shape.context_lens[0]
    ),
    "ragged_attention": lambda launch, c: launch(
        c.q, c.k_cache, c.v_cache, c.block_tables, c.cu_seqlens_q, c.context_lens, c.scale
    ),
    "decode_attention": lambda launch, c: launch(
        c.q, c.k_cache, c.v_cache, c.block_tables, c.context_lens, c.scale, c.shape.num_splits
    ),
}


def run_case(kernel: str, launch: Callable[..., Any], case: Case) -> float:
    """The largest error of one call of a kernel's launcher; store_kv, which copies, has 0 or infinity."""
    if kernel == "store_kv":
        return _run_store(launch, case)
    return largest_error(CALLS[kernel](launch, case), reference(case))


def _run_store(launch: Callable[..., None], case: Case) -> float:
    """Stores into caches full of a mark; every other token is padding, which must be skipped."""
    got_k, got_v = torch.full_like(case.k_cache, -7.0), torch.full_like(case.v_cache, -7.0)
    slots = case.slot_mapping.clone()
    slots[1::2] = -1
    launch(case.k, case.v, got_k, got_v, slots)
    for got, tokens in ((got_k, case.k), (got_v, case.v)):
        expected = torch.full_like(got, -7.0)
        expected.view(-1, *tokens.shape[1:])[slots[::2]] = tokens[::2]
        if not torch.equal(got, expected):
            return math.inf
    return 0.0


def check_case(
    kernel: str, launch: Callable[..., Tensor | None], shape: Shape, dtype: torch.dtype, device: str, seed: int
) -> float:
    """The largest error, if it is within the tolerance of the dtype. Raises WrongValues otherwise."""
    error = run_case(kernel, launch, random_case(shape, dtype, device, seed))
    if not error <= TOLERANCES[dtype]:
        raise WrongValues(
            f"{kernel} gives wrong values: largest error {error:.3g}, tolerance {TOLERANCES[dtype]:.3g} "
            f"({shape}, {str(dtype).removeprefix('torch.')}, {device}, seed {seed})"
        )
    return error


def launchers() -> dict[str, Callable[..., Tensor | None]]:
    """Every kernel's launcher by its name. Imports Triton."""
    from ..attention import triton_decode, triton_ladder, triton_ragged, triton_store

    return {
        "store_kv": triton_store.store_kv,
        "naive_attention": triton_ladder.naive_attention,
        "tiled_attention": triton_ladder.tiled_attention,
        "paged_attention": triton_ladder.paged_attention,
        "ragged_attention": triton_ragged.ragged_attention,
        "decode_attention": triton_decode.decode_attention,
    }


_RAGGED = (
    # Chunks and decodes side by side; contexts end inside, at and just behind the end of a block and of a tile.
    Shape((3, 1, 9, 1, 16), (20, 33, 9, 16, 49), 4, 2, 32, 8),
    Shape((7, 1), (39, 17), 3, 1, 80, 16),
    Shape((1, 18), (1, 18), 7, 1, 16, 20),
    Shape((5,), (37,), 2, 2, 256, 256),
    Shape((0, 4, 0, 2), (16, 11, 0, 48), 16, 1, 64, 1),  # an idle row owns no token
    Shape((21, 2), (70, 32), 6, 2, 40, 128),
)
_DECODE = (
    Shape((1,) * 5, (1, 16, 33, 0, 70), 4, 2, 32, 8),
    Shape((1,) * 5, (1, 16, 33, 0, 70), 4, 2, 32, 8, num_splits=4),
    Shape((1,) * 3, (17, 40, 5), 3, 1, 80, 16, num_splits=2),
    Shape((1,) * 2, (19, 61), 7, 1, 16, 20, num_splits=3),
    Shape((1,) * 2, (30, 7), 2, 2, 256, 256),
    Shape((1,) * 2, (12, 35), 16, 1, 64, 1),
    Shape((1,) * 3, (50, 64, 3), 8, 1, 128, 2048),
)
_SOLO = (Shape((19,), (19,), 4, 2, 32, 16), Shape((6,), (6,), 3, 1, 80, 8), Shape((5,), (5,), 2, 2, 16, 8))
_CONTINUED = (
    Shape((19,), (40,), 4, 2, 32, 16),
    Shape((1,), (33,), 3, 1, 80, 8),
    Shape((17,), (17,), 2, 2, 16, 20),
    Shape((3,), (18,), 7, 1, 256, 1),
)
# The cases of each kernel: small enough for the interpreter, and spread over head sizes, groups and block sizes.
CASES: dict[str, tuple[Shape, ...]] = {
    "store_kv": (*_RAGGED[:4], Shape((3, 2), (17, 2), 5, 5, 256, 16)),
    "naive_attention": _SOLO[1:],
    "tiled_attention": _SOLO,
    "paged_attention": _CONTINUED,
    "ragged_attention": _RAGGED,
    "decode_attention": _DECODE,
}
