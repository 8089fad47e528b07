"""Kernels broken on purpose: the cases that the kernels pass must fail each of them."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which exists for Linux only")

import interpreter

from minibatcher.attention import triton_decode, triton_ladder, triton_ragged, triton_store
from minibatcher.kernels.cases import CASES, WrongValues, check_case

interpreter.install()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of numpy, about the NaN that are meant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE = "tl.load(block_table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)"
RAGGED, DECODE, LADDER = (triton_ragged, "ragged_attention"), (triton_decode, "decode_attention"), triton_ladder
MUTANTS = {
    "ragged: mask off by one": (*RAGGED, "key[None, :] <= position[:, None]", "key[None, :] < position[:, None]"),
    "ragged: one key too many": (*RAGGED, "key[None, :] <= position[:, None]", "key[None, :] <= position[:, None] + 1"),
    "ragged: unmasked keys off by one": (*RAGGED, "(earlier + first_query + 1)", "(earlier + first_query + 2)"),
    "ragged: wrong scale": (*RAGGED, "scale * LOG2_E", "scale"),
    "ragged: block table ignored": (
        *RAGGED,
        "tl.load(block_table_ptr + key // BLOCK_SIZE).to(tl.int64)",
        "(key // BLOCK_SIZE).to(tl.int64)",
    ),
    "ragged: softmax without rescale": (*RAGGED, "acc = acc * rescale[:, None]", "acc = acc"),
    "ragged: all queries take the group's first head": (*RAGGED, "kv_head * GROUP + row % GROUP", "kv_head * GROUP"),
    "ragged: tiles of queries left out": (
        *RAGGED,
        "tile - (first_token // BLOCK_Q + request)",
        "tile - first_token // BLOCK_Q",
    ),
    "decode: mask off by one": (*DECODE, "tl.where(key[None, :] < end, ", "tl.where(key[None, :] < end - 1, "),
    "decode: padding of the last tile counts": (
        *DECODE,
        "tl.where(key[None, :] < end, ",
        "tl.where(row[:, None] >= 0, ",
    ),
    "decode: wrong scale": (*DECODE, "scale * LOG2_E", "scale * LOG2_E * 1.1"),
    "decode: block table ignored": (*DECODE, TABLE, "(key // BLOCK_SIZE)"),
    "decode: split merge without rescale": (
        *DECODE,
        'tl.exp2(log_sum - tl.where(largest > float("-inf"), largest, 0.0))',
        "tl.where(split < num_splits, 1.0, 0.0)",
    ),
    "decode: splits overlap": (*DECODE, "tl.minimum(start + share, context_len)", "context_len"),
    "decode: softmax without rescale": (*DECODE, "total = total * rescale", "total = total"),
    "store: padding is written": (
        triton_store,
        "store_kv",
        "if slot >= 0:",
        "slot = tl.maximum(slot, 0)\n    if slot >= 0:",
    ),
    "store: values where keys belong": (
        triton_store,
        "store_kv",
        "tl.store(k_cache_ptr + to_k, k,",
        "tl.store(k_cache_ptr + to_k, v,",
    ),
    "naive: mask off by one": (LADDER, "naive_attention", "range(0, query + 1)", "range(0, tl.maximum(query, 1))"),
    "tiled: mask off by one": (
        LADDER,
        "tiled_attention",
        "key[None, :] <= query[:, None]",
        "key[None, :] < query[:, None] + 2",
    ),
    "paged: block table ignored": (LADDER, "paged_attention", TABLE, "(key // BLOCK_SIZE)"),
    "paged: earlier context ignored": (
        LADDER,
        "paged_attention",
        "position = context_len - num_queries + query",
        "position = query",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def poisoned_memory():
    with interpreter.poisoned_memory():
        yield


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, tmp_path):
    module, kernel, old, new = MUTANTS[name]
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} is in {module.__name__} {source.count(old)} times"
    file = tmp_path / "mutant.py"
    file.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("minibatcher.attention.mutant", file)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    seed = random.SystemRandom().randrange(2**31)
    assert all(
        check_case(kernel, getattr(module, kernel), shape, torch.float32, DEVICE, seed) < 1 for shape in CASES[kernel]
    )
    with pytest.raises(WrongValues, match="gives wrong values: largest error"):
        for shape in CASES[kernel]:
            check_case(kernel, getattr(mutant, kernel), shape, torch.float32, DEVICE, seed)
