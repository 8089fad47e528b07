"""KV bookkeeping: blocks are owned once, conserved, and come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.errors import InvalidParameter
from minibatcher.kv import BlockKV, SlotKV


def test_a_request_grows_block_by_block_and_returns_them_all():
    kv = BlockKV(num_blocks=5, block_size=4)
    assert kv.allocate("a", 4) and len(kv.table("a")) == 1
    assert kv.allocate("a", 5) and len(kv.table("a")) == 2
    assert kv.allocate("b", 12) and kv.num_free_blocks == 0
    before = list(kv.table("a"))
    assert not kv.allocate("a", 9)  # needs a third block
    assert kv.table("a") == before and kv.missing_blocks("a", 9) == 1
    kv.free("b")
    assert kv.num_free_blocks == 3 and kv.allocate("a", 20) and kv.num_used_blocks == 5
    kv.check()


def test_a_slot_is_one_block_as_large_as_the_context():
    kv = SlotKV(num_slots=3, slot_size=100)
    assert kv.allocate("a", 1) and kv.allocate("a", 100) and len(kv.table("a")) == 1
    assert kv.num_used_blocks * kv.block_size == 100


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 40)), max_size=60),
    st.integers(1, 12),
    st.integers(1, 7),
)
def test_blocks_are_conserved_whatever_happens(actions, num_blocks, block_size):
    kv = BlockKV(num_blocks, block_size)
    held: dict[str, int] = {}
    for name, tokens in actions:
        if tokens == 0:
            kv.free(name)
            held.pop(name, None)
        elif kv.allocate(name, tokens):
            held[name] = max(held.get(name, 0), -(-tokens // block_size))
        else:
            used = sum(held.values())
            assert used - held.get(name, 0) + -(-tokens // block_size) > num_blocks
        kv.check()
        assert {n: len(kv.table(n)) for n in held} == held
        assert kv.num_used_blocks == sum(held.values()) == num_blocks - kv.num_free_blocks


def test_check_notices_a_lost_and_a_doubled_block():
    kv = BlockKV(4, 2)
    kv.allocate("a", 5)
    kv.table("a").pop()
    with pytest.raises(RuntimeError, match="not conserved: 1 free \\+ 2 owned of 4"):
        kv.check()
    kv.table("a").append(kv.table("a")[0])
    with pytest.raises(RuntimeError, match="1 of them twice"):
        kv.check()


@pytest.mark.parametrize("size", [(0, 4), (4, 0), (-1, 4)])
def test_an_empty_pool_is_refused(size):
    with pytest.raises(InvalidParameter, match="at least one block"):
        BlockKV(*size)
