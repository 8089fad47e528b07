"""Shared prefixes: what may be shared, when, for how long, and what is told of it."""

from __future__ import annotations

import random

import pytest
from fakes import fake_engine, solo_answer
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.kv import BlockKV, PrefixKV
from minibatcher.request import Request, SamplingParams


def slicer(tokens):
    return lambda start, stop: tokens[start:stop]


def hold(kv: PrefixKV, name: str, tokens: list[int], computed: bool = True) -> int:
    """Start a request that holds these tokens; returns how many of them were found."""
    found = kv.start(name, slicer(tokens), len(tokens))
    if computed:
        kv.publish(name, slicer(tokens), len(tokens))
    kv.check()
    return found


def chunked(**options):
    return fake_engine("chunked", **{"enable_prefix_caching": True, "num_blocks": 40, "block_size": 4} | options)


def drain(engine) -> None:
    while engine.scheduler.has_work():
        engine.step()
    engine.scheduler.kv.check()


@pytest.mark.parametrize("length, found", [(8, 4), (9, 8), (7, 4), (4, 0), (12, 8), (1, 0)])
def test_the_last_token_is_always_computed(length, found):
    engine = chunked()
    for i in range(2):
        request = engine.add(list(range(length)), SamplingParams(max_tokens=1), request_id=f"r{i}")
        drain(engine)
        assert request.output_token_ids == solo_answer(range(length), 1)
        assert request.num_cached_tokens == i * found
    assert engine.timeline.steps[1].num_computed_tokens == length - found


def test_a_block_is_published_once_it_is_computed():
    engine = chunked(max_num_batched_tokens=6)
    first = engine.add(list(range(20)), SamplingParams(max_tokens=1))
    kv = engine.scheduler.kv
    for computed in (6, 12, 18):
        engine.step()
        assert first.num_computed_tokens == computed
        assert len(kv.lookup(slicer(range(20)), 20)) == computed // 4  # full blocks of computed tokens, no more


def test_two_that_compute_the_same_at_the_same_time_end_up_sharing():
    engine = chunked(max_num_batched_tokens=16)
    pair = [engine.add(list(range(13)), SamplingParams(max_tokens=9)) for _ in range(2)]
    kv = engine.scheduler.kv
    engine.step()  # 13 of the first, 3 of the second, which found nothing
    assert kv.num_used_blocks == 4 + 4 and [r.num_cached_tokens for r in pair] == [0, 0]
    engine.step()
    tables = [kv.table(r.request_id) for r in pair]
    assert tables[0][:3] == tables[1][:3] and tables[0][3] != tables[1][3]
    assert kv.num_used_blocks == 3 + 2 and kv.num_shared_blocks == 3
    kv.check()
    drain(engine)
    assert [r.output_token_ids for r in pair] == [solo_answer(range(13), 9)] * 2
    assert kv.num_used_blocks == 0


def test_the_longest_unused_is_evicted_first():
    kv = PrefixKV(6, 2)
    for name, start in (("a", 0), ("b", 10), ("c", 20)):
        hold(kv, name, [start, start + 1, start + 2, start + 3])
    for name in "bac":
        kv.free(name)
    assert (kv.num_free_blocks, kv.num_cached_blocks) == (0, 6)
    assert hold(kv, "d", [0, 1, 2, 3, 4]) == 4  # a's are used again, and need one more block: b's last
    kv.free("d")
    found = {
        name: len(kv.lookup(slicer([start, start + 1, start + 2, start + 3, 9]), 5))
        for name, start in (("a", 0), ("b", 10), ("c", 20))
    }
    assert found == {"a": 2, "b": 1, "c": 2}
    assert (
        hold(kv, "e", list(range(50, 56))) == 0
    )  # d's own block was never full, so it is free; then b's, then c's last
    found = [len(kv.lookup(slicer([start, start + 1, start + 2, start + 3, 9]), 5)) for start in (0, 10, 20)]
    assert found == [2, 0, 1]


def test_the_end_of_a_chain_is_evicted_before_its_beginning():
    kv = PrefixKV(4, 1)
    hold(kv, "a", [1, 2, 3, 4])
    kv.free("a")
    for n in (1, 2, 3):
        hold(kv, f"x{n}", [90 + n], computed=False)
        assert len(kv.lookup(slicer([1, 2, 3, 4, 5]), 5)) == 4 - n


def test_free_blocks_are_taken_before_cached_ones():
    kv = PrefixKV(5, 2)
    hold(kv, "a", [1, 2, 3, 4])
    kv.free("a")
    hold(kv, "b", [5, 6, 7, 8, 9, 10])
    assert len(kv.lookup(slicer([1, 2, 3, 4, 5]), 5)) == 2


def test_tokens_with_equal_hashes_are_not_equal():
    huge = 2**61 - 1
    assert hash(huge) == hash(0) and hash((huge, 1)) == hash((0, 1)) and hash(-1) == hash(-2)
    kv = PrefixKV(12, 2)
    hold(kv, "a", [0, 1, 2, 3])
    assert hold(kv, "b", [huge, 1, 2, 3]) == 0
    assert hold(kv, "c", [0, 1, 2 + huge, 3]) == 2  # hash(2 + huge) == hash(2)
    assert kv.table("a")[0] == kv.table("c")[0] != kv.table("b")[0]
    engine = chunked()
    answers = []
    for first in (0, huge):
        request = engine.add([first, 1, 2, 3, 4], SamplingParams(max_tokens=3))
        drain(engine)
        answers.append(request.output_token_ids)
        assert request.num_cached_tokens == 0 and request.output_token_ids == solo_answer([first, 1, 2, 3, 4], 3)
    assert answers[0] != answers[1]


def test_the_same_block_after_another_beginning_is_another_block():
    kv = PrefixKV(12, 2)
    hold(kv, "a", [1, 2, 7, 8])
    assert hold(kv, "b", [3, 4, 7, 8]) == 0
    assert hold(kv, "c", [7, 8, 9]) == 0


def test_an_abort_in_the_middle_of_a_prompt_leaves_what_was_computed():
    engine = chunked(max_num_batched_tokens=10)
    prompt = list(range(30))
    first = engine.add(prompt, SamplingParams(max_tokens=2))
    engine.step()
    engine.step()
    engine.abort(first.request_id)
    kv = engine.scheduler.kv
    kv.check()
    assert (kv.num_cached_blocks, kv.num_used_blocks) == (20 // 4, 0)
    second = engine.add(prompt, SamplingParams(max_tokens=2))
    drain(engine)
    assert second.num_cached_tokens == 20 and second.output_token_ids == solo_answer(prompt, 2)


def test_a_failed_step_publishes_nothing():
    engine = chunked(max_num_batched_tokens=10)
    prompt = list(range(30))
    first = engine.add(prompt, SamplingParams(max_tokens=2))
    engine.step()
    run = engine.runner.run

    def broken(plan):
        run(plan)
        raise RuntimeError("the device failed")

    engine.runner.run = broken
    with pytest.raises(RuntimeError):
        engine.step()
    engine.runner.run = run
    assert first.finished
    again = engine.add(prompt, SamplingParams(max_tokens=2))
    drain(engine)
    assert again.num_cached_tokens == 8 and again.output_token_ids == solo_answer(prompt, 2)


def test_a_preempted_request_finds_its_own_blocks_again():
    engine = chunked(ordering="priority", max_num_seqs=1)
    low = engine.add(list(range(10)), SamplingParams(max_tokens=12), priority=3)
    for _ in range(4):
        engine.step()
    assert low.num_computed_tokens == 13
    high = engine.add([99, 98], SamplingParams(max_tokens=2), priority=0)
    engine.step()
    assert low.num_preemptions == 1 and low.num_computed_tokens == 0 and low.num_lost_tokens == 13
    drain(engine)
    assert low.num_lost_tokens == 1  # 12 of its 13 tokens filled blocks, and were found again
    assert low.num_cached_tokens == 0  # nobody else has saved it any work
    assert low.output_token_ids == solo_answer(range(10), 12) and high.output_token_ids == solo_answer([99, 98], 2)
    record = engine.timeline.requests[low.request_id]
    assert (record.num_lost_tokens, record.num_cached_tokens) == (1, 0)


def test_answers_are_shared_too():
    """A second turn of a conversation finds prompt and answer of the first."""
    engine = chunked()
    first = engine.add(list(range(10)), SamplingParams(max_tokens=11))
    drain(engine)
    second = engine.add([*range(10), *first.output_token_ids, 5, 6, 7], SamplingParams(max_tokens=3))
    drain(engine)
    assert second.num_cached_tokens == (10 + 11 - 1) // 4 * 4  # all but the last token, whose KV nobody needed


@pytest.mark.parametrize("name", ["continuous", "chunked"])
@given(
    heads=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=10),
    block_size=st.integers(1, 9),
    num_seqs=st.integers(1, 4),
)
def test_tokens_computed_and_found_add_up(name, heads, block_size, num_seqs):
    """Prompt + output - 1 tokens are computed or found; what was lost is computed once more."""
    todo = [
        Request(f"r{i}", [story, *range(n), tail], SamplingParams(max_tokens=6))
        for i, (story, n, tail) in enumerate(heads)
    ]
    options = {"num_blocks": -(-60 // block_size), "block_size": block_size, "max_num_seqs": num_seqs}
    engine = fake_engine(name, enable_prefix_caching=True, max_num_batched_tokens=24, **options)
    engine.run(todo)
    assert [r.output_token_ids for r in todo] == [solo_answer(r.prompt_token_ids, 6) for r in todo]
    computed = sum(step.num_computed_tokens for step in engine.timeline.steps)
    assert computed == sum(r.num_tokens - 1 - r.num_cached_tokens + r.num_lost_tokens for r in todo)
    assert all(r.num_cached_tokens % block_size == 0 and r.num_cached_tokens < r.num_prompt_tokens for r in todo)


def test_a_found_beginning_takes_no_blocks_and_no_budget():
    engine = chunked(num_blocks=9, max_num_batched_tokens=32)
    engine.add(list(range(25)), SamplingParams(max_tokens=4))
    engine.step()
    second = engine.add([*range(24), 77], SamplingParams(max_tokens=3))  # 7 blocks, of which 6 are there
    engine.step()
    assert second.slot is not None and second.num_cached_tokens == 24
    assert engine.timeline.steps[1].num_computed_tokens == 1 + 1
    drain(engine)
    assert second.output_token_ids == solo_answer([*range(24), 77], 3)


@given(st.data())
def test_blocks_are_conserved_whatever_happens(data):
    """The pool alone: start, grow, publish and free in any order; what is found holds the right tokens."""
    kv = PrefixKV(data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4)))
    rng = random.Random(data.draw(st.integers(0, 99)))
    held: dict[str, list[int]] = {}
    content: dict[int, tuple[int, ...]] = {}  # block → all tokens from the beginning to its end, once published
    for i in range(60):
        name = rng.choice([*held, f"r{i}"])
        if name not in held:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
            if kv.demand(name, len(tokens), slicer(tokens)) > kv.num_free_blocks + kv.num_cached_blocks:
                continue
            found = kv.start(name, slicer(tokens), len(tokens)) // kv.block_size
            for j, block in enumerate(kv.table(name)[:found]):
                assert content[block] == tuple(tokens[: (j + 1) * kv.block_size])
            held[name] = tokens
        elif rng.random() < 0.5:
            kv.publish(name, slicer(held[name]), rng.randrange(len(held[name]) + 1))
            for j, block in enumerate(kv.table(name)[: kv._num_published[name]]):
                content[block] = tuple(held[name][: (j + 1) * kv.block_size])
        else:
            kv.free(name)
            del held[name]
        kv.check()
    for name in held:
        kv.free(name)
    assert kv.num_used_blocks == 0 and kv.num_shared_blocks == 0


@given(st.data())
def test_who_waits_finds_what_is_there_now(data):
    """Looked up at every step that it waits, a request does not find what has gone since, or come back otherwise."""
    kv = PrefixKV(data.draw(st.integers(2, 6)), data.draw(st.integers(1, 2)))
    rng = random.Random(data.draw(st.integers(0, 999)))
    wanted = [rng.randrange(2) for _ in range(8)]
    waiting, held, num_found = slicer(wanted), {}, set()
    for i in range(80):
        name = rng.choice([*held, f"r{i}"])
        if name in held:
            kv.free(name)
            del held[name]
        else:
            kept = rng.randrange(9)
            tokens = [*wanted[:kept], *(rng.randrange(2) for _ in range(rng.randrange(1, 9 - kept) if kept < 8 else 0))]
            if kv.allocate(name, len(tokens)):
                kv.publish(name, slicer(tokens), len(tokens))
                held[name] = tokens
        blocks, parent, size = [], -1, kv.block_size
        for start in range(0, 7 // size * size, size):
            parent = kv._block_of.get((parent, tuple(wanted[start : start + size])))
            if parent is None:
                break
            blocks.append(parent)
        assert kv.lookup(waiting, 8) == blocks
        num_found.add(len(blocks))
        kv.check()
    assert kv.num_blocks < 4 or len(num_found) > 1


def test_a_pool_without_sharing_finds_nothing():
    kv = BlockKV(4, 2)
    assert kv.start("a", slicer([1, 2, 3]), 3) == 0 and kv.num_cached_blocks == kv.num_shared_blocks == 0


def test_damage_is_noticed():
    kv = PrefixKV(4, 2)
    hold(kv, "a", [1, 2, 3])
    kv._owners[kv.table("a")[0]] += 1
    with pytest.raises(RuntimeError, match="owners"):
        kv.check()
    kv = PrefixKV(4, 2)
    kv._free.pop()
    with pytest.raises(RuntimeError, match="not conserved: 3 free"):
        kv.check()
