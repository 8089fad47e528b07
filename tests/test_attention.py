import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.attention import PaddedBatch, RaggedBatch, choose_attention, reference, sdpa, store_kv
from minibatcher.errors import UnknownName

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def dense(q, keys, values, scale):
    """float64 attention of the last len(q) tokens of a context: [n, heads, dim] over [m, kv_heads, dim]."""
    q, keys, values = q.double(), keys.double(), values.double()
    n, m, group = len(q), len(keys), q.shape[1] // keys.shape[1]
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ keys[:, head // group].T * scale
        for i in range(n):
            scores[i, m - n + i + 1 :] = -torch.inf
        out[:, head] = torch.softmax(scores, -1) @ values[:, head // group]
    return out


def ragged_case(rows, *, block_size=4, heads=(6, 2), head_dim=8, dtype=torch.float32, seed=0):
    """Random requests in a poisoned cache. rows: (query_len, context_len). Returns q, caches, batch, expected."""
    torch.manual_seed(seed)
    counts = [-(-context // block_size) for _, context in rows]
    num_blocks = sum(counts) + 3
    free = torch.randperm(num_blocks).tolist()
    k_cache = torch.full((num_blocks, block_size, heads[1], head_dim), torch.nan, dtype=dtype)
    v_cache = k_cache.clone()
    tables = torch.zeros(len(rows), max(counts) + 1, dtype=torch.int32)
    queries, expected, new_k, new_v, new_slots = [], [], [], [], []
    scale = 0.3
    for r, (query_len, context_len) in enumerate(rows):
        blocks = torch.tensor([free.pop() for _ in range(counts[r])])
        tables[r, : counts[r]] = blocks
        q = torch.randn(query_len, heads[0], head_dim).to(dtype)
        keys, values = (torch.randn(context_len, heads[1], head_dim).to(dtype) for _ in "kv")
        places = torch.arange(context_len)
        slots = blocks[places // block_size] * block_size + places % block_size
        old = context_len - query_len
        store_kv(keys[:old], values[:old], k_cache, v_cache, slots[:old])
        new_k.append(keys[old:]), new_v.append(values[old:]), new_slots.append(slots[old:])
        queries.append(q)
        expected.append(dense(q, keys, values, scale))
    slot_mapping = torch.cat(new_slots)
    store_kv(torch.cat(new_k), torch.cat(new_v), k_cache, v_cache, slot_mapping)
    lens = [query_len for query_len, _ in rows]
    batch = RaggedBatch(
        slot_mapping,
        torch.tensor([0, *lens]).cumsum(0).int(),
        torch.tensor([context for _, context in rows], dtype=torch.int32),
        tables,
        lens,
        [context for _, context in rows],
    )
    return torch.cat(queries), k_cache, v_cache, batch, torch.cat(expected), scale


row = st.integers(1, 11).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 23)))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@given(
    rows=st.lists(st.one_of(row, st.integers(1, 23).map(lambda n: (1, n))), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 4, 16]),
    heads=st.sampled_from([(6, 2), (4, 4), (3, 1)]),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 1000),
)
def test_ragged_equals_dense(backend, rows, block_size, heads, dtype, seed):
    q, k, v, batch, expected, scale = ragged_case(rows, block_size=block_size, heads=heads, dtype=dtype, seed=seed)
    out = choose_attention(backend, "cpu", dtype).ragged(q, k, v, batch, scale)
    assert out.dtype == dtype and out.shape == q.shape
    torch.testing.assert_close(out.double(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@given(contexts=st.lists(st.integers(1, 40), min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_decodes_in_one_call_equal_dense(contexts, seed):
    """The form that a GPU uses, on a subset of the rows."""
    q, k, v, batch, expected, scale = ragged_case([(1, n) for n in contexts], seed=seed)
    rows = random.Random(seed).sample(range(len(contexts)), len(contexts) - 1)
    out = sdpa._decode_together(q[rows], k, v, batch.context_lens[rows], batch.block_tables[rows], scale)
    torch.testing.assert_close(out.double(), expected[rows], atol=1e-5, rtol=1e-5)


def test_mixed_step_with_decodes_together():
    """The GPU's path through a mixed step, decodes between chunks, run on the CPU."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    q, k, v, batch, expected, scale = ragged_case([(1, 9), (5, 12), (1, 30), (4, 4), (1, 1)])
    out = sdpa.ragged_attention(q.as_subclass(OnGpu), k, v, batch, scale).as_subclass(torch.Tensor)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", [reference, sdpa])
def test_a_row_does_not_depend_on_its_neighbours(backend):
    q, k, v, batch, _, scale = ragged_case([(1, 17), (6, 13), (5, 5)])
    together = backend.ragged_attention(q, k, v, batch, scale)
    start = 0
    for r, n in enumerate(batch.query_lens):
        alone = RaggedBatch(
            batch.slot_mapping[start : start + n],
            torch.tensor([0, n], dtype=torch.int32),
            batch.context_lens[r : r + 1],
            batch.block_tables[r : r + 1],
            [n],
            [batch.context_lens_list[r]],
        )
        out = backend.ragged_attention(q[start : start + n], k, v, alone, scale)
        torch.testing.assert_close(out, together[start : start + n])
        start += n


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@given(
    rows=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    width=st.integers(1, 7),
    heads=st.sampled_from([(6, 2), (4, 4)]),
    dtype=st.sampled_from(list(DTYPES)),
    spare=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_padded_equals_dense(backend, rows, width, heads, dtype, spare, seed):
    """rows: tokens already in each slot; `width` more come. Beyond them the slot is poisoned."""
    torch.manual_seed(seed)
    head_dim, scale, size = 8, 0.3, 20
    slots = torch.randperm(len(rows) + 2)[: len(rows)].tolist()
    k_cache = torch.full((len(rows) + 2, size, heads[1], head_dim), 1e4, dtype=dtype)
    v_cache = k_cache.clone()
    q = torch.randn(len(rows), width, heads[0], head_dim).to(dtype)
    expected = []
    for b, (slot, old) in enumerate(zip(slots, rows)):
        k_cache[slot, : old + width] = torch.randn(old + width, heads[1], head_dim).to(dtype)
        v_cache[slot, : old + width] = torch.randn(old + width, heads[1], head_dim).to(dtype)
        expected.append(dense(q[b], k_cache[slot, : old + width], v_cache[slot, : old + width], scale))
    positions = torch.tensor(rows)[:, None] + torch.arange(width)
    places = (torch.tensor(slots)[:, None] * size + positions).flatten()
    batch = PaddedBatch(torch.tensor(slots), positions, places, slots, max(rows) + width + spare)
    before = k_cache.clone()
    out = choose_attention(backend, "cpu", dtype).padded(q, k_cache, v_cache, batch, scale)
    torch.testing.assert_close(out.double(), torch.stack(expected), atol=DTYPES[dtype], rtol=DTYPES[dtype])
    assert torch.equal(k_cache, before)


def test_store_writes_where_it_is_told_and_nowhere_else():
    k_cache, v_cache = torch.zeros(3, 4, 2, 5), torch.zeros(3, 4, 2, 5)
    k, v = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    store_kv(k, v, k_cache, v_cache, torch.tensor([9, 2, 4]))
    assert torch.equal(k_cache[2, 1], k[0]) and torch.equal(v_cache[0, 2], v[1]) and torch.equal(k_cache[1, 0], k[2])
    assert (k_cache != 0).any(-1).any(-1).sum() == 3 and (v_cache != 0).any(-1).any(-1).sum() == 3


def test_choice():
    auto = choose_attention("auto", "cpu", torch.float32)
    assert auto.name == "sdpa" and "cpu" in auto.why and auto.ragged is sdpa.ragged_attention
    assert choose_attention("reference", "cpu", torch.float16).padded is reference.padded_attention
    with pytest.raises(UnknownName, match=r"flash.*auto, reference, sdpa"):
        choose_attention("flash", "cpu", torch.float32)
