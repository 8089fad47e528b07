"""Prompts that share prefixes, what a prefix cache finds of them, and traffic of unequal tenants and classes."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.errors import InvalidParameter, WorkloadError
from minibatcher.hardware import Device, device, model_spec
from minibatcher.prompts import to_requests
from minibatcher.request import PRIORITY_CLASSES, FinishReason, Request, SamplingParams
from minibatcher.runners.roofline import HOST_LINK_SHARE, CostModel, RooflineRunner, step_work
from minibatcher.scheduling import StepPlan
from minibatcher.scheduling.plan import Swap
from minibatcher.simulate import run_simulation, simulated_engine, to_request
from minibatcher.workload import HashedPrompt, Workload, WorkloadRequest, load_workload, prefix_bound
from minibatcher.workload.mixes import CLASS_LENGTHS
from minibatcher.workload.prefixes import shared_tokens

COST = CostModel(device("h100"), model_spec("llama-3.1-8b"))


def common(a, b) -> int:
    """How many items two sequences begin with alike."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


def rows(*prompts, tokens_per_hash=8, gap_s=0.0, output_tokens=3):
    """A workload from (prompt_tokens, hashes), arriving `gap_s` apart."""
    requests = (
        WorkloadRequest(f"r{i}", i * gap_s, n, output_tokens, prefix_hashes=hashes, tokens_per_hash=tokens_per_hash)
        for i, (n, hashes) in enumerate(prompts)
    )
    return Workload("w", tuple(requests), "Made by a test.")


# Prompts


hash_lists = st.lists(st.sampled_from([-3, 0, 1, 7, 2**40]), max_size=5).map(tuple)


@given(hash_lists, st.integers(1, 40), st.integers(1, 9), st.integers(-45, 45), st.integers(-45, 45))
def test_a_lazy_prompt_is_a_sequence(hashes, num_tokens, size, start, stop):
    prompt = HashedPrompt("name", num_tokens, hashes, size)
    token_ids = list(prompt)
    assert len(prompt) == len(token_ids) == num_tokens and prompt[-1] == token_ids[-1]
    for index in (slice(start, stop), slice(start, None), slice(stop), slice(start, stop, 3), slice(None, None, -1)):
        assert prompt[index] == token_ids[index]
    assert 0 not in token_ids  # what a simulated runner samples
    with pytest.raises(IndexError):
        prompt[num_tokens]


@given(hash_lists, hash_lists, st.integers(1, 30), st.integers(1, 30), st.integers(1, 9))
def test_prompts_begin_alike_exactly_where_their_hashes_do(a, b, len_a, len_b, size):
    first, second = HashedPrompt("a", len_a, a, size), HashedPrompt("b", len_b, b, size)
    assert common(first, second) == min(common(a, b) * size, len_a, len_b)
    if len_a > len(a) * size:  # the tail belongs to the request alone
        assert first[-1] not in list(second)
    assert common(first, HashedPrompt("c", len_a, a, size + 1)) == 0  # the same hash of something else


def test_ids_that_look_alike_share_nothing():
    names = ["r1", "r10", "r01", "1", "", "\0", "é", "\ud800"]
    ends = [HashedPrompt(name, 4, (), 512)[0] for name in names if name not in ("", "\0")]
    assert len(set(ends)) == len(ends)


def test_real_prompts_share_what_their_hashes_say():
    workload = rows((20, (5, 6, 7)), (20, (5, 6, 8)), (11, (5, 6)), (20, ()), (20, (5,)), (6, (-5,)))
    made = [r.prompt_token_ids for r in to_requests(workload, vocab_size=1000, special=range(10), seed=3)]
    assert [len(token_ids) for token_ids in made] == [20, 20, 11, 20, 20, 6]
    assert min(map(min, made)) >= 10 and all(len(set(token_ids)) > 4 for token_ids in made)
    alike = [common(made[0], other) for other in made[1:]]
    assert alike == [16, 11, 0, 8, 0]
    assert made == [r.prompt_token_ids for r in to_requests(workload, vocab_size=1000, special=range(10), seed=3)]
    other_seed = to_requests(workload, vocab_size=1000, special=range(10), seed=4)
    assert common(made[0], other_seed[0].prompt_token_ids) < 3


# The bound


def found_by_hand(prompts, block_size: int) -> int:
    """A cache without limits, block by block, each known by all tokens up to its end."""
    cache, found = set(), 0
    for prompt in prompts:
        ends = range(block_size, len(prompt) + 1, block_size)
        for end in ends:
            if end == len(prompt) or tuple(prompt[:end]) not in cache:
                break
            found += block_size
        cache |= {tuple(prompt[:end]) for end in ends}
    return found


prompt_shapes = st.tuples(hash_lists, st.integers(1, 40))


@given(st.lists(prompt_shapes, min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 9))
def test_the_bound_is_what_a_cache_without_limits_finds_in_the_best_order(pairs, size, block_size):
    prompts = [HashedPrompt(f"r{i}", n, hashes, size) for i, (hashes, n) in enumerate(pairs)]
    most = max(found_by_hand(order, block_size) for order in itertools.permutations(map(list, prompts)))
    expected = {"tokens": most, "of": sum(n for _, n in pairs)}
    assert prefix_bound(prompts, block_size) == expected
    assert prefix_bound([list(prompt) for prompt in prompts], block_size) == expected  # token ids, as of texts


def test_the_bound_of_pieces_of_several_sizes():
    prompts = [HashedPrompt("a", 40, (1, 2), 16), HashedPrompt("b", 40, (1, 2), 8), HashedPrompt("c", 24, (1, 2), 16)]
    assert prefix_bound(prompts, 4) == {"tokens": 24, "of": 104}  # a finds what c left, and b has other hashes


def test_shared_tokens_go_by_the_order_given():
    prompts = [HashedPrompt(f"r{n}", n, (1, 2), 8) for n in (12, 3, 20)]
    assert list(shared_tokens(prompts, 4)) == [0, 3, 12]
    assert list(shared_tokens(map(list, prompts), 4)) == [0, 0, 12]


# Simulated runs


def cached(timeline) -> list[int]:
    return [record.num_cached_tokens for record in timeline.requests.values()]


def test_one_after_the_other_finds_the_bound_in_a_pool_that_holds_all():
    workload = rows((8, (1,)), (40, (1, 2)), (40, (1, 2)), (33, (1, 3)), (9, (1,)), (40, ()), (40, ()), gap_s=10.0)
    for block_size in (4, 8, 16):
        options = {"enable_prefix_caching": True, "block_size": block_size, "kv_cache_tokens": 1600}
        timelines = run_simulation(workload, COST, strategies=["static", "continuous", "chunked"], **options)
        bound = prefix_bound(map(HashedPrompt.of, workload), block_size)
        for name in ("continuous", "chunked"):
            assert timelines[name].header["prefix_bound"] == bound
            assert sum(cached(timelines[name])) == bound["tokens"] > 0
        assert "prefix_bound" not in timelines["static"].header  # slots are never shared
    assert cached(timelines["chunked"])[5:] == [0, 0]  # prompts of one length, and nothing else in common


def test_nothing_is_found_where_nothing_is_shared():
    workload = load_workload("uniform:prompt_min=50,prompt_max=50", num_requests=30, request_rate=5.0)
    timeline = run_simulation(workload, COST, strategies=["chunked"], enable_prefix_caching=True)["chunked"]
    assert cached(timeline) == [0] * 30 and "prefix_bound" not in timeline.header
    shared = load_workload("shared-prefix", num_requests=4)
    without = run_simulation(shared, COST, strategies=["chunked"])["chunked"]
    assert cached(without) == [0] * 4 and "prefix_bound" not in without.header


@pytest.mark.parametrize("first_hash", [0, 1, -1])
def test_an_answer_is_no_prefix_of_a_prompt(first_hash):
    workload = rows((5, (first_hash,)), (60, (first_hash,) * 8), gap_s=10.0, output_tokens=50)
    timeline = run_simulation(workload, COST, strategies=["chunked"], enable_prefix_caching=True, block_size=4)
    assert cached(timeline["chunked"]) == [0, 4]


@pytest.mark.parametrize("kv_cache_tokens", [800, 2_000, 40_000])
@pytest.mark.parametrize("name", ["continuous", "chunked"])
@pytest.mark.parametrize("ordering", ["fcfs", "shortest-prompt"])
def test_no_run_beats_the_bound(name, kv_cache_tokens, ordering):
    workload = load_workload("shared-prefix:turns=3,prefix_tokens=100", num_requests=120, seed=2, request_rate=20.0)
    options = {"max_num_seqs": 8, "enable_prefix_caching": True, "kv_cache_tokens": kv_cache_tokens, "block_size": 8}
    options["ordering"] = ordering
    timeline = run_simulation(workload.fit_to_context(700), COST, strategies=[name], **options)[name]
    assert 0 < sum(cached(timeline)) <= timeline.header["prefix_bound"]["tokens"]
    if kv_cache_tokens == 40_000:
        assert sum(cached(timeline)) > 0.8 * timeline.header["prefix_bound"]["tokens"]


def test_a_real_trace_stays_below_its_bound(shared_dir):
    path = shared_dir / "traces" / "mooncake-fast25" / "conversation_trace.jsonl"
    workload = load_workload(f"mooncake:{path}")
    bound = prefix_bound(map(HashedPrompt.of, workload), 16)
    assert bound == {"tokens": 54_097_440, "of": 144_793_823}
    assert prefix_bound(map(HashedPrompt.of, workload), 512)["tokens"] < bound["tokens"]
    cost = CostModel(device("h100"), model_spec("llama-3.1-70b"), num_gpus=8)
    run = run_simulation(workload.take(150), cost, strategies=["chunked"], enable_prefix_caching=True)["chunked"]
    found, most = sum(cached(run)), run.header["prefix_bound"]["tokens"]
    assert 0 < found <= most


# Files


def test_prefixes_stay_equal_when_a_workload_is_shrunk(tmp_path):
    long = [(9000, tuple(range(18))), (4600, (0, 1, 2, 3, 4, 5, 6, 7, 99)), (60_000, tuple(range(118)))]
    before = rows(*(long[i % 2] for i in range(200)), long[2], tokens_per_hash=512)
    fitted = before.fit_to_context(1024)
    assert {row.tokens_per_hash for row in fitted} == {58} and "prefix hash now stands for 58 tokens" in fitted.notes[0]
    prompts = [HashedPrompt.of(row) for row in fitted]
    assert common(prompts[0], prompts[1]) == 8 * 58
    assert common(prompts[0], prompts[200]) == len(prompts[0])
    assert len(fitted.requests[200].prefix_hashes) == -(-len(prompts[200]) // 58)
    shares = []
    for workload in (before, fitted):
        bound = prefix_bound(map(HashedPrompt.of, workload.take(200)), 1)
        shares.append(bound["tokens"] / bound["of"])
    assert shares[1] == pytest.approx(shares[0], abs=0.01)
    fitted.to_jsonl(tmp_path / "w.jsonl")
    assert load_workload(tmp_path / "w.jsonl") == fitted
    twice = fitted.fit_to_context(512)
    assert {row.tokens_per_hash for row in twice} == {29}


@pytest.mark.parametrize("size", [0, -1, 1.5, None, True])
def test_a_bad_size_of_a_piece_is_refused(size):
    with pytest.raises(WorkloadError, match="tokens_per_hash must be a whole number"):
        WorkloadRequest("a", 0.0, 5, 5, tokens_per_hash=size)


FILES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.97,374,44\n",
    "mooncake": '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [3]}\n',
    "sharegpt": json.dumps([{"id": "a", "conversations": [{"from": "human", "value": "Hello"}]}]),
}


@pytest.mark.parametrize("file_format", FILES)
def test_a_format_can_be_named_before_the_path(tmp_path, file_format):
    path = tmp_path / "some:file"
    path.write_text(FILES[file_format])
    assert load_workload(f"{file_format}:{path}") == load_workload(path)
    assert len(load_workload(f"{file_format}:{path}", num_requests=1, request_rate=3.0)) == 1
    for other in set(FILES) - {file_format}:
        with pytest.raises(WorkloadError, match=str(path)):
            load_workload(f"{other}:{path}")
    with pytest.raises(WorkloadError, match="There is no workload file /no/such"):
        load_workload(f"{file_format}:/no/such")
    with pytest.raises(WorkloadError, match=f"Unknown workload '{file_format}'"):
        load_workload(file_format)


# Swaps


def test_a_swap_takes_what_its_bytes_take_over_all_links():
    toy = Device("toy", 1 << 40, 1e12, {"float16": 1e14}, link_bandwidth=1e11, host_bandwidth=2e9)
    cost = CostModel(toy, model_spec("llama-3.1-8b"), num_gpus=4, dtype="float16")
    victim, other = Request("victim", range(40)), Request("other", range(9))
    plan = StepPlan(num_tokens={Request("r", range(5)): 5})
    plain = RooflineRunner(cost, 8).run(plan).seconds
    plan.swaps = [Swap(victim, True, [4, 5, 6, 7, 9], [0, 1, 2, 3, 4]), Swap(other, False, [1, 2], [5, 6])]
    num_bytes = (5 + 2) * 8 * (2 * 8 * 128 * 32 * 2)  # blocks of 8 tokens; keys and values, 8 heads of 128, 32 layers
    seconds = num_bytes / (4 * 2e9 * HOST_LINK_SHARE)
    assert cost.terms(step_work(plan, 1, 8))["swap"] == pytest.approx(seconds, rel=1e-12)
    assert RooflineRunner(cost, 8).run(plan).seconds == pytest.approx(plain + seconds, rel=1e-12)
    assert RooflineRunner(cost.without("swap"), 8).run(plan).seconds == plain


def test_a_simulated_run_pays_for_its_swaps():
    workload = load_workload("uniform:prompt_min=60,prompt_max=60,output_min=200,output_max=200", num_requests=12)
    options = {"kv_cache_tokens": 1200, "block_size": 32, "preemption": "swap"}

    def run(cost):
        engine = simulated_engine(cost, "chunked", max_model_len=260, **options)
        plans, schedule = [], engine.scheduler.schedule

        def spy(now):
            plans.append(schedule(now))
            return plans[-1]

        engine.scheduler.schedule = spy
        timeline = engine.run([to_request(row) for row in workload])
        return timeline, sum(len(swap.device_blocks) for plan in plans if plan.num_tokens for swap in plan.swaps)

    (paid, num_blocks), (free, same) = run(COST), run(COST.without("swap"))
    assert num_blocks == same > 20 and sum(len(step.preempted) for step in paid.steps) > 3
    seconds = num_blocks * 32 * COST.model.kv_bytes_per_token("bfloat16") / (COST.device.host_bandwidth * 0.8)
    busy = [sum(step.duration for step in timeline.steps) for timeline in (paid, free)]
    assert busy[0] - busy[1] == pytest.approx(seconds, rel=1e-6)


# Declared limits


def test_requests_declare_more_than_they_need():
    workload = rows((30, ()), (50, ()), (20, ()), output_tokens=10)
    made = to_requests(workload, vocab_size=100, max_model_len=64, declared_max_tokens=25)
    simulated = [to_request(row, 25, 64) for row in workload]
    for requests in (made, simulated):
        assert [r.params.max_tokens for r in requests] == [25, 14, 25]  # as far as the context has room
        assert [r.params.stop_after for r in requests] == [10, 10, 10] and all(r.params.ignore_eos for r in requests)
    known = [to_request(row).params for row in workload]
    assert known == [SamplingParams(max_tokens=10, ignore_eos=True)] * 3
    shorter, too_long = to_request(workload.requests[0], 4, 64), to_request(workload.requests[1], 25, 55)
    assert shorter.params.max_tokens == 10  # never below what the row says
    assert too_long.params.max_tokens == 10  # more than there is room for: the engine refuses it
    for bad in (0, -1, 2.5, "9", True):
        with pytest.raises(InvalidParameter, match="declared_max_tokens must be a whole number"):
            run_simulation(workload, COST, declared_max_tokens=bad)
        with pytest.raises(InvalidParameter, match="declared_max_tokens must be a whole number"):
            to_requests(workload, vocab_size=100, declared_max_tokens=bad)


def test_a_scheduler_that_promises_the_worst_case_is_told_the_declared_one():
    workload = rows(*[(30, ())] * 40, output_tokens=10)
    options = {"kv_cache_tokens": 1600, "block_size": 8, "admission": "worst-case", "strategies": ["chunked"]}
    known = run_simulation(workload, COST, **options)["chunked"]
    declared = run_simulation(workload, COST, declared_max_tokens=170, **options)["chunked"]
    assert max(len(step.rows) for step in known.steps) == 40
    assert max(len(step.rows) for step in declared.steps) == 8  # 1,600 / (30 + 170)
    assert known.header["max_model_len"] == 40 and declared.header["max_model_len"] == 200
    assert declared.header["declared_max_tokens"] == 170 and "declared_max_tokens" not in known.header
    cut = run_simulation(workload, COST, declared_max_tokens=170, max_model_len=60, **options)["chunked"]
    assert max(len(step.rows) for step in cut.steps) == 25  # 1,600 / 64, in whole blocks
    for timeline, reason in ((known, FinishReason.LENGTH), (declared, FinishReason.STOP)):
        assert {(r.num_output_tokens, r.finish_reason) for r in timeline.requests.values()} == {(10, reason.value)}


# Classes, tenants, system prompts


def test_classes_have_their_shares_priorities_and_lengths():
    workload = load_workload("classes:paid_share=0.1,batch_share=0.3", num_requests=40_000, seed=1)
    assert set(CLASS_LENGTHS) == set(PRIORITY_CLASSES) and all(
        r.tenant == PRIORITY_CLASSES[r.priority] for r in workload
    )
    of_class = [[r for r in workload if r.priority == k] for k in range(4)]
    assert [len(group) / 40_000 for group in of_class] == pytest.approx([0.1, 0.4, 0.3, 0.2], abs=0.01)
    for name, group in zip(PRIORITY_CLASSES, of_class):
        means = [np.mean([getattr(r, field) for r in group]) for field in ("prompt_tokens", "output_tokens")]
        assert means == pytest.approx(CLASS_LENGTHS[name], rel=0.05)
    only = load_workload("classes:paid_share=0,interactive_share=0,batch_share=0", num_requests=9)
    assert {r.tenant for r in only} == {"background"}


def test_tenants_send_at_their_rates():
    workload = load_workload("tenants:num_tenants=3,skew=1,flood=4", num_requests=40_000, seed=1, request_rate=10.0)
    counts = Counter(r.tenant for r in workload)
    weights = {"tenant-0": 4.0, "tenant-1": 1 / 2, "tenant-2": 1 / 3}
    for name, weight in weights.items():
        assert counts[name] / 40_000 == pytest.approx(weight / sum(weights.values()), abs=0.01)
        gaps = np.diff([r.arrival_time for r in workload if r.tenant == name])
        assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.06)  # a Poisson process of its own
    alike = Counter(r.tenant for r in load_workload("tenants:skew=0,num_tenants=5", num_requests=20_000))
    assert len(alike) == 5 and max(alike.values()) < 1.1 * min(alike.values())
    assert {r.tenant for r in load_workload("tenants:num_tenants=1")} == {"tenant-0"}


def test_a_system_prompt_is_shared_by_all_who_have_it():
    workload = load_workload("shared-prefix:num_prefixes=3,prefix_tokens=64", num_requests=60, seed=1)
    prompts = [HashedPrompt.of(row) for row in workload]
    alike = Counter(min(common(a, b), 65) for a, b in itertools.combinations(prompts, 2))
    assert set(alike) == {0, 64}
    assert len({prompt[0] for prompt in prompts}) == 3
    assert min(map(len, prompts)) > 64


def test_a_turn_begins_with_all_that_was_said_before():
    turns, interleaved = 4, 3
    spec = f"shared-prefix:turns={turns},interleaved={interleaved},prefix_tokens=40"
    workload = load_workload(spec, num_requests=30, seed=2)
    conversations = {}
    for i, row in enumerate(workload):
        conversations.setdefault((i // (turns * interleaved), i % interleaved), []).append(row)
    assert sorted(map(len, conversations.values())) == [2] * 3 + [4] * 6
    for said in conversations.values():
        for before, after in itertools.pairwise(said):
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert common(HashedPrompt.of(before), HashedPrompt.of(after)) == before.prompt_tokens
    one, other = list(conversations.values())[:2]
    assert common(HashedPrompt.of(one[-1]), HashedPrompt.of(other[-1])) in (0, 32)  # whole pieces of 16


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("classes:paid_share=0.9", "their sum, too, not at 0.9, 0.4 and 0.25"),
        ("classes:paid_share=-0.1", "must lie between 0 and 1"),
        ("classes:paid_share=nan", "must lie between 0 and 1"),
        ("classes:cv=0", "cv must be a finite number above 0"),
        ("tenants:num_tenants=0", "num_tenants must be a whole number from 1"),
        ("tenants:num_tenants=9999999999", "num_tenants must be a whole number from 1"),
        ("tenants:flood=0", "flood must be a finite number above 0"),
        ("tenants:skew=-1", "skew must lie between 0 and 10"),
        ("tenants:skew=nan", "skew must lie between 0 and 10"),
        ("tenants:prompt_mean=-4", "prompt_mean must be a finite number above 0"),
        ("shared-prefix:num_prefixes=0", "num_prefixes must be a whole number from 1"),
        ("shared-prefix:turns=0", "turns must be a whole number from 1"),
        ("shared-prefix:interleaved=-2", "interleaved must be a whole number from 1"),
        ("shared-prefix:prefix_tokens=1.5", "prefix_tokens must be a whole number"),
    ],
)
def test_bad_options_get_a_sentence(spec, message, recwarn):
    with pytest.raises(WorkloadError, match=message):
        load_workload(spec)
    assert not recwarn.list


def test_placeholders_take_no_room():
    """A request of a hundred thousand tokens is a few numbers."""
    row = WorkloadRequest("r", 0.0, 100_000, 1, prefix_hashes=tuple(range(196)))
    tracemalloc.start()
    requests = [to_request(replace(row, request_id=f"r{i}")) for i in range(1000)]
    current, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert current / len(requests) < 4_000  # bytes
