"""Every kernel against float64, through Triton's interpreter or, where there is a GPU, on it."""

import random
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels need Triton, which exists for Linux only")

import interpreter

from minibatcher.attention import triton_decode, triton_ladder, triton_ragged, triton_store, triton_tiles
from minibatcher.errors import DeviceError, InvalidParameter
from minibatcher.kernels.cases import CASES, Shape, check_case, launchers, random_case, run_case

interpreter.install()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of numpy, about the NaN that are meant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_BFLOAT16 = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 0)
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_BFLOAT16 else [])]
LAUNCHERS = launchers()
PAGED = ["paged_attention", "ragged_attention", "decode_attention"]


@pytest.fixture(scope="module", autouse=True)
def poisoned_memory():
    with interpreter.poisoned_memory():
        yield


def check(kernel: str, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
    """On fresh random inputs; the seed is in the message of a failure."""
    check_case(kernel, LAUNCHERS[kernel], shape, dtype, DEVICE, random.SystemRandom().randrange(2**31))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kernel", "shape"), [pytest.param(k, s, id=f"{k}-{s}") for k, shapes in CASES.items() for s in shapes]
)
def test_case(kernel, shape, dtype):
    check(kernel, shape, dtype)


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size"),
    [
        (4, 3, 8),
        (8, 2, 16),
        (16, 5, 16),
        (24, 1, 256),
        (64, 8, 2),
        (80, 4, 11),
        (96, 2, 64),
        (112, 6, 32),
        (128, 16, 16),
        (160, 1, 8),
        (192, 3, 1),
        (256, 7, 16),
        (64, 40, 16),
    ],
)
@pytest.mark.parametrize("kernel", ["store_kv", *PAGED])
def test_head_sizes_groups_and_block_sizes(kernel, head_dim, group, block_size):
    heads = (2 * group, 2, head_dim, block_size)
    if kernel == "paged_attention":
        check(kernel, Shape((3,), (21,), *heads))
    elif kernel == "decode_attention":
        check(kernel, Shape((1, 1), (23, 18), *heads, num_splits=2))
        check(kernel, Shape((1, 1), (33, 5), *heads), torch.float16)
    else:
        check(kernel, Shape((2, 1), (19, 22), *heads), torch.float16)


lengths = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=5)


@settings(max_examples=25)
@given(lengths, st.sampled_from([1, 2, 3]), st.sampled_from([1, 4, 7, 16, 64]))
def test_any_mix_of_chunks_and_decodes(requests, group, block_size):
    query_lens = tuple(query for query, _ in requests)
    context_lens = tuple(query + earlier for query, earlier in requests)
    check("ragged_attention", Shape(query_lens, context_lens, 2 * group, 2, 16, block_size))


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 7]),
    st.sampled_from([1, 4, 7, 16, 64]),
    st.integers(1, 9),
)
def test_any_contexts_and_splits_of_decodes(contexts, group, block_size, num_splits):
    # A padding row's query belongs to a context of 0 tokens, whose cache holds nothing.
    contexts = tuple(contexts)
    check("decode_attention", Shape((1,) * len(contexts), contexts, 2 * group, 2, 16, block_size, num_splits))


def test_a_long_context_through_many_tiles():
    check("ragged_attention", Shape((2, 35), (700, 300), 2, 1, 16, 16))
    check("decode_attention", Shape((1, 1), (700, 300), 4, 1, 16, 16))


def call(kernel, case):
    if kernel == "ragged_attention":
        return triton_ragged.ragged_attention(
            case.q, case.k_cache, case.v_cache, case.block_tables, case.cu_seqlens_q, case.context_lens, case.scale
        )
    return triton_decode.decode_attention(
        case.q, case.k_cache, case.v_cache, case.block_tables, case.context_lens, case.scale, case.shape.num_splits
    )


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        ("ragged_attention", Shape((3, 18, 1), (20, 18, 33), 6, 2, 16, 8)),
        ("decode_attention", Shape((1, 1, 1), (20, 57, 33), 6, 2, 16, 8, num_splits=2)),
    ],
)
def test_a_request_does_not_depend_on_its_neighbours(kernel, shape):
    """To the last bit: alone, in another order, or beside requests full of NaN."""
    case = random_case(shape, torch.float32, DEVICE, seed=random.SystemRandom().randrange(2**31))
    together = call(kernel, case).split(shape.query_lens)
    for request, queries in enumerate(case.q.split(shape.query_lens)):
        alone = type(case)(
            **{
                **vars(case),
                "q": queries,
                "block_tables": case.block_tables[request : request + 1],
                "cu_seqlens_q": torch.tensor([0, len(queries)], dtype=torch.int32, device=DEVICE),
                "context_lens": case.context_lens[request : request + 1],
            }
        )
        assert torch.equal(call(kernel, alone), together[request])

    poisoned = type(case)(**{**vars(case), "k_cache": case.k_cache.clone(), "q": case.q.clone()})
    poisoned.k_cache[case.block_tables[1].long()] = torch.nan
    poisoned.q.split(shape.query_lens)[1].fill_(torch.nan)
    out = call(kernel, poisoned).split(shape.query_lens)
    assert torch.equal(out[0], together[0])
    assert torch.equal(out[2], together[2])
    assert out[1].isnan().all()


@pytest.mark.parametrize("kernel", ["store_kv", *PAGED])
def test_any_layout_whose_last_dimension_is_contiguous(kernel):
    """Heads before tokens, in the inputs and in the cache."""
    shape = Shape((5,), (21,), 4, 2, 16, 8) if kernel != "decode_attention" else Shape((1, 1), (9, 30), 4, 2, 16, 8, 2)
    case = random_case(shape, torch.float32, DEVICE, seed=random.SystemRandom().randrange(2**31))
    expected = run_case(kernel, LAUNCHERS[kernel], case)

    def swapped(x, a, b):
        return x.transpose(a, b).contiguous().transpose(a, b)

    turned = {name: swapped(getattr(case, name), 0, 1) for name in "qkv"}
    turned |= {name: swapped(getattr(case, name), 1, 2) for name in ("k_cache", "v_cache")}
    if kernel == "store_kv":
        got_k, got_v = (torch.zeros_like(turned[name]) for name in ("k_cache", "v_cache"))
        assert not got_k.is_contiguous()
        triton_store.store_kv(turned["k"], turned["v"], got_k, got_v, case.slot_mapping)
        block, offset = case.slot_mapping // shape.block_size, case.slot_mapping % shape.block_size
        assert torch.equal(got_k[block, offset], case.k)
        assert torch.equal(got_v[block, offset], case.v)
        assert got_k.count_nonzero() == case.k.count_nonzero()
    else:
        assert run_case(kernel, LAUNCHERS[kernel], type(case)(**{**vars(case), **turned})) == expected


def test_a_negative_slot_writes_nothing():
    k = torch.randn(3, 2, 16, device=DEVICE)
    k_cache, v_cache = torch.zeros(2, 2, 4, 8, 2, 16, device=DEVICE).unbind(0)[0].unbind(0)
    triton_store.store_kv(k, -k, k_cache, v_cache, torch.tensor([-1, 13, -5], device=DEVICE))
    assert torch.equal(k_cache[1, 5], k[1])
    assert torch.equal(v_cache[1, 5], -k[1])
    assert k_cache.count_nonzero() == k[1].count_nonzero()
    assert v_cache.count_nonzero() == k[1].count_nonzero()


def zeros(n: int, dtype: torch.dtype) -> torch.Tensor:
    """On a CPU what is not written takes no room."""
    if DEVICE == "cuda":
        return torch.zeros(n, dtype=dtype, device=DEVICE)
    with tempfile.TemporaryFile() as file:
        return torch.from_numpy(np.memmap(file, str(dtype).removeprefix("torch."), "w+", shape=n))


@pytest.mark.parametrize("kernel", ["store_kv", *PAGED])
def test_a_pool_beyond_two_to_the_31_numbers(kernel):
    """Block 3 begins 3 * 2**30 numbers behind block 0: a 32-bit product would point in front of the pool."""
    far, size, heads = 2**30, 64, (1, 16)
    block = size * heads[0] * heads[1]
    memory = zeros(3 * far + 2 * block, torch.float16)
    k_cache = memory.as_strided((4, size, *heads), (far, heads[0] * heads[1], heads[1], 1))
    v_cache = memory.as_strided(k_cache.shape, k_cache.stride(), block)
    q, k, v = torch.randn(3, 40, 2, 16, device=DEVICE).half().unbind(0)
    k, v = k[:, :1], v[:, :1]
    tables = torch.tensor([[3]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([40], dtype=torch.int32, device=DEVICE)
    if kernel == "store_kv":
        triton_store.store_kv(k, v, k_cache, v_cache, 3 * size + torch.arange(40, device=DEVICE))
        assert torch.equal(k_cache[3, :40], k)
        assert torch.equal(v_cache[3, :40], v)
        return
    k_cache[3, :40], v_cache[3, :40] = k, v
    expected = triton_ladder.tiled_attention(q, k, v, 0.3)[35:]  # five queries, behind 35 earlier tokens
    if kernel == "paged_attention":
        out = triton_ladder.paged_attention(q[35:], k_cache, v_cache, tables[0], 0.3, 40)
    elif kernel == "ragged_attention":
        starts = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
        out = triton_ragged.ragged_attention(q[35:], k_cache, v_cache, tables, starts, lens, 0.3)
    else:
        out = triton_decode.decode_attention(q[39:], k_cache, v_cache, tables, lens, 0.3)
        expected = expected[4:]
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kernel", CASES)
def test_tokens_beyond_two_to_the_31_numbers(kernel):
    """Of q, k and v the last token begins 3 * 2**30 numbers behind the first."""
    far = 2**30
    decodes = kernel == "decode_attention"
    shape = Shape((1,) * 4, (9, 17, 5, 20), 2, 1, 16, 8) if decodes else Shape((4,), (4,), 2, 1, 16, 8)
    case = random_case(shape, torch.float16, DEVICE, seed=random.SystemRandom().randrange(2**31))
    memory = zeros(3 * far + 4 * 16, torch.float16)
    rows = memory.as_strided((4, 4, 16), (far, 16, 1))
    q, k, v = rows.split([2, 1, 1], dim=1)
    q[:], k[:], v[:] = case.q, case.k, case.v
    apart = {"q": q, "k": k, "v": v}
    if kernel == "naive_attention" and triton_tiles.INTERPRETED:
        # Its loop counts in Python there, so that key * stride has 32 bits; compiled, the key has the query's 64.
        apart = {"q": q}
    apart = type(case)(**{**vars(case), **apart})
    assert run_case(kernel, LAUNCHERS[kernel], apart) == run_case(kernel, LAUNCHERS[kernel], case) < 2e-3


@pytest.mark.parametrize("kernel", ["ragged_attention", "decode_attention"])
def test_block_tables_beyond_two_to_the_31_numbers(kernel):
    """The third request's row begins 2**31 numbers behind the first one's."""
    far = 2**30
    case = random_case(Shape((1,) * 3, (9, 17, 20), 2, 1, 16, 8), torch.float16, DEVICE, seed=8)
    tables = zeros(2 * far + 4, torch.int32).as_strided(case.block_tables.shape, (far, 1))
    tables[:] = case.block_tables
    apart = type(case)(**{**vars(case), "block_tables": tables})
    assert run_case(kernel, LAUNCHERS[kernel], apart) == run_case(kernel, LAUNCHERS[kernel], case) < 2e-3


def test_launchers_ask_the_device_for_nothing(monkeypatch):
    """A number read from the device would end a CUDA graph's capture, and hold up the host at each layer."""
    ragged = random_case(Shape((3, 1), (9, 20), 4, 2, 16, 8), torch.float32, DEVICE, 1)
    decode = random_case(Shape((1, 1), (9, 20), 4, 2, 16, 8), torch.float32, DEVICE, 2)

    def forbidden(*_):
        raise AssertionError("the host waited for the device")

    for name in ("item", "tolist", "cpu", "numpy", "__int__", "__index__", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    call("ragged_attention", ragged)
    call("decode_attention", decode)
    triton_store.store_kv(ragged.k, ragged.v, ragged.k_cache, ragged.v_cache, ragged.slot_mapping)


def test_nothing_to_do():
    case = random_case(Shape((2,), (9,), 4, 2, 16, 8), torch.float32, DEVICE, 1)
    none = case.q[:0]
    empty = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    start = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    pool = (case.k_cache, case.v_cache)
    assert triton_ragged.ragged_attention(none, *pool, case.block_tables[:0], start, empty, 1.0).shape == none.shape
    assert triton_decode.decode_attention(none, *pool, case.block_tables[:0], empty, 1.0).shape == none.shape
    assert triton_ladder.naive_attention(none, case.k[:0], case.v[:0], 1.0).shape == none.shape
    assert triton_ladder.tiled_attention(none, case.k[:0], case.v[:0], 1.0).shape == none.shape
    assert triton_ladder.paged_attention(none, *pool, case.block_tables[0], 1.0, 9).shape == none.shape
    triton_store.store_kv(case.k[:0], case.v[:0], *pool, case.slot_mapping[:0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 16)}, "query heads must be a multiple of KV heads"),
        ({"q": torch.zeros(2, 4, 8)}, "do not go together"),
        ({"q": torch.zeros(2, 4, 16, dtype=torch.float16)}, "the same dtype"),
        ({"q": torch.zeros(2, 16, 4).transpose(1, 2)}, "must be contiguous"),
        ({"v_cache": torch.zeros(4, 8, 1, 16)}, "do not go together"),
    ],
)
def test_inputs_that_do_not_go_together_are_refused(change, message):
    case = random_case(Shape((1, 1), (9, 20), 4, 2, 16, 8), torch.float32, "cpu", 1)
    case = type(case)(**{**vars(case), **change})
    for kernel in ("ragged_attention", "decode_attention"):
        with pytest.raises(InvalidParameter, match=message):
            call(kernel, case)
    with pytest.raises(InvalidParameter, match=message):
        triton_ladder.paged_attention(case.q, case.k_cache, case.v_cache, case.block_tables[0], 1.0, 9)


def test_further_refusals(monkeypatch):
    q = k = torch.zeros(3, 2, 16)
    cache = torch.zeros(4, 8, 2, 16)
    table = torch.zeros(2, dtype=torch.int32)
    slots = torch.arange(3)
    with pytest.raises(InvalidParameter, match="num_splits is 0"):
        triton_decode.decode_attention(q, cache, cache, table[None], table[:1], 1.0, num_splits=0)
    with pytest.raises(InvalidParameter, match="3 queries and 2 keys"):
        triton_ladder.naive_attention(q, k[:2], k[:2], 1.0)
    for wrong in (2, 17):
        with pytest.raises(InvalidParameter, match=f"context_len is {wrong}; it must be at least the 3 queries"):
            triton_ladder.paged_attention(q, cache, cache, table, 1.0, wrong)
    with pytest.raises(InvalidParameter, match="do not fit a cache"):
        triton_store.store_kv(k, k, cache[:, :, :1], cache, slots)
    with pytest.raises(InvalidParameter, match="of the same dtype"):
        triton_store.store_kv(k.half(), k.half(), cache, cache, slots)
    with pytest.raises(InvalidParameter, match="must be contiguous"):
        triton_store.store_kv(torch.zeros(3, 16, 2).transpose(1, 2), k, cache, cache, slots)
    half = torch.zeros(3, 2, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(triton_tiles, "interpreter_computes_bfloat16", False)
    monkeypatch.setattr(triton_tiles, "INTERPRETED", True)
    monkeypatch.setattr(triton_tiles, "architecture", lambda: 0)
    with pytest.raises(DeviceError, match="interpreter computes wrong values in bfloat16"):
        triton_ladder.naive_attention(half, half, half, 1.0)
    monkeypatch.setattr(triton_tiles, "architecture", lambda: 75)
    with pytest.raises(DeviceError, match=r"below 8\.0\) has no bfloat16"):
        triton_ladder.naive_attention(half, half, half, 1.0)
