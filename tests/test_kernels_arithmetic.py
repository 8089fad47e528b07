"""Bytes, FLOPs and shares of the kernels' benchmark, against counting one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.errors import InvalidParameter
from minibatcher.hardware import model_spec
from minibatcher.kernels.arithmetic import (
    attention_flops,
    decode_step_bytes,
    kv_bytes,
    roofline_seconds,
    store_bytes,
)

requests = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4)


@given(requests, st.integers(1, 5), st.sampled_from([8, 20]))
def test_flops_count_each_visible_pair_of_query_and_key(requests, num_heads, head_dim):
    query_lens = [query for query, _ in requests]
    context_lens = [query + earlier for query, earlier in requests]
    multiply_adds = 0
    for query, context in zip(query_lens, context_lens):
        for i in range(query):
            for position in range(context):
                if position <= context - query + i:
                    multiply_adds += num_heads * 2 * head_dim  # a score, and a weighted value
    assert attention_flops(query_lens, context_lens, num_heads, head_dim) == 2 * multiply_adds


@pytest.mark.parametrize(("query_lens", "context_lens"), [([3], [2]), ([1, 1], [5])])
def test_more_queries_than_context_are_refused(query_lens, context_lens):
    with pytest.raises(InvalidParameter, match="context of at least its queries"):
        attention_flops(query_lens, context_lens, 4, 64)


def test_bytes_of_keys_and_values():
    # 3 + 50 tokens x 2 (K, V) x 5 heads x 80 x 2 bytes
    assert kv_bytes([3, 50], 5, 80, 2) == 53 * 2 * 5 * 80 * 2
    assert store_bytes(7, 5, 80, 2) == 2 * kv_bytes([7], 5, 80, 2)  # read once, written once


def test_a_decode_step_reads_the_weights_once_and_every_context():
    model = model_spec("llama-3.1-8b")
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    weights = 2 * (32 * layer + 4096 * 128256)
    per_token = 2 * 32 * 8 * 128 * 2
    assert decode_step_bytes(model, [100, 7], "bfloat16") == weights + 107 * per_token


def test_the_slower_of_memory_and_arithmetic_sets_the_roofline():
    assert roofline_seconds(300, 100) == 3
    assert roofline_seconds(300, 100, flops=50, rate=10) == 5
    assert roofline_seconds(300, 100, flops=10, rate=10) == 3
