"""The claims of the chapters, as numbers."""

import random
import subprocess
import sys

import pytest

from minibatcher import claims
from minibatcher.claims import ended_rows, padding_factors
from minibatcher.errors import InvalidParameter
from minibatcher.hardware import model_spec

BOOK = claims.machine()  # Llama-3.1-70B on four H100


# 0.2, 0.3, 3.5: arithmetic intensity


def test_a_decode_step_of_a_batch_costs_hardly_more_than_one_of_one():
    """0.2: nearly the same traffic for B tokens; tokens/s bends where arithmetic takes over."""
    steps = {step.num_decodes: step for step in claims.decode_intensity(BOOK)}
    assert steps[32].bytes_read < 1.08 * steps[1].bytes_read
    assert steps[32].tokens_per_s > 25 * steps[1].tokens_per_s
    assert steps[1024].tokens_per_s < 2.2 * steps[256].tokens_per_s  # four times the batch
    assert steps[1].intensity == pytest.approx(1.0, abs=0.02)  # two FLOPs for each weight of two bytes
    assert [b for b, step in steps.items() if step.compute_bound] == [1024]


def test_a_prefill_is_compute_bound_from_about_the_ridge_on():
    """0.3: one prompt alone; each of its tokens is two FLOPs a weight, so intensity is about its length."""
    steps = claims.prefill_intensity(BOOK)
    for step in steps:
        assert step.intensity == pytest.approx(step.prefill_tokens, rel=0.03)
        assert step.compute_bound == (step.prefill_tokens > 300)


def test_which_phase_is_bound_by_what_depends_on_the_configuration():
    """0.3: short prompts are bandwidth-bound; decodes can be compute-bound, where contexts are short and many fit."""
    rows = {(r.model, r.device, r.num_gpus, r.context_tokens): r for r in claims.phase_bounds()}
    for row in rows.values():
        assert row.ridge < row.prefill_ridge_tokens < 1.4 * row.ridge
    here = rows["llama-3.1-70b", "h100", 4, 128]
    assert here.decode_ridge_batch <= here.max_batch and here.decode_compute_bound_reachable
    here = rows["llama-3.1-70b", "h100", 4, 1_000]
    assert here.decode_ridge_batch > here.max_batch and not here.decode_compute_bound_reachable
    assert rows["llama-3.1-70b", "h100", 8, 1_000].decode_compute_bound_reachable  # more memory, more sequences
    assert rows["llama-3.1-8b", "h100", 1, 1_000].decode_ridge_batch is None  # fewer FLOPs a byte of KV cache
    assert all(r.decode_ridge_batch is None for (*_, context), r in rows.items() if context == 8_000)
    batch = rows["llama-3.1-70b", "h100", 8, 1_000].decode_ridge_batch
    cost = claims.machine(num_gpus=8, dtype="float16")
    bound = [claims.step_intensity(cost, num_decodes=b).compute_bound for b in (batch - 1, batch)]
    assert bound == [False, True]


def test_a_chunk_of_prefill_lifts_the_intensity_of_a_decode_step():
    """3.5: the chunk's FLOPs come for hardly a byte more; a 512-token chunk crosses the ridge, decodes alone do not."""
    steps = {step.prefill_tokens: step for step in claims.mixed_intensity(BOOK)}
    assert steps[512].bytes_read < 1.01 * steps[0].bytes_read
    assert steps[512].intensity > 15 * steps[0].intensity
    assert steps[512].compute_bound and not steps[0].compute_bound
    saved = {s.chunk_tokens: s.saved_share for s in claims.shared_stream(BOOK)}
    assert saved[64] > 0.35 > saved[512] > 0.1 > saved[4096] > 0
    assert list(saved.values()) == sorted(saved.values(), reverse=True)


# 0.5, 0.6: memory


def test_opt_13b_takes_800_kib_a_token():
    size = claims.kv_size(model_spec("opt-13b"), "float16")
    assert size.bytes_per_token == 2 * 5_120 * 40 * 2 == 819_200 == 800 * 1024
    assert size.gqa_factor == 1


def test_grouped_query_attention_divides_it():
    """0.5: it does not hold for every 13B model, far less for every model."""
    sizes = {size.model: size for size in claims.kv_sizes()}
    assert sizes["llama-2-13b"].bytes_per_token == 819_200  # no GQA either
    assert sizes["qwen3-14b"].bytes_per_token == 163_840 and sizes["qwen3-14b"].gqa_factor == 5
    assert sizes["llama-3.1-70b"].bytes_per_token == 327_680 and sizes["llama-3.1-70b"].gqa_factor == 8
    assert sizes["llama-3.1-70b"].bytes_without_gqa == 2 * 8_192 * 80 * 2


def test_memory_bounds_how_many_run_at_once():
    rows = {(r.model, r.device, r.num_gpus): r for r in claims.concurrency(context_tokens=2_000)}
    row = rows["llama-3.1-70b", "h100", 4]
    assert row.kv_bytes == row.usable_bytes - row.weight_bytes - row.workspace_bytes
    assert row.max_sequences == row.kv_bytes // (2_000 * 327_680) == 243
    assert rows["opt-13b", "h100", 1].max_sequences == 30
    assert rows["qwen3-14b", "h100", 1].max_sequences == 139  # as large, but GQA
    assert rows["llama-3.1-70b", "h100", 1].max_sequences == rows["opt-13b", "l4", 1].max_sequences == 0
    half = {(r.model, r.device, r.num_gpus): r for r in claims.concurrency(context_tokens=4_000)}
    assert all(half[key].max_sequences == pytest.approx(row.max_sequences / 2, abs=1) for key, row in rows.items())


@pytest.mark.parametrize("tokens", [0, -5, "2000", 1.5])
def test_a_context_is_a_number_of_tokens(tokens):
    with pytest.raises(InvalidParameter, match="context_tokens must be a whole number of at least 1"):
        claims.concurrency(context_tokens=tokens)


# 1.2, 1.3, 1.7: the two wastes of a fixed batch


def test_a_short_prompt_beside_a_long_one_pays_80_times_its_prefill():
    assert padding_factors([50, 4_000]) == [80, 1]


def test_80_times_the_tokens_are_a_little_more_than_80_times_the_flops():
    short, long = claims.padded_prefill(BOOK)
    assert (short.token_factor, long.token_factor, long.flops_factor) == (80, 1, 1)
    assert 80 < short.flops_factor < 90


def test_31_of_32_rows_are_thrown_away_in_99_percent_of_the_steps():
    ended = ended_rows([20] * 31 + [2_000])
    assert len(ended) == 2_000
    assert ended.count(31) / len(ended) == 0.99
    assert set(ended) == {0, 31}
    found = claims.fastest_finisher()
    assert (found.num_steps, found.max_ended_rows, found.share_of_steps) == (2_000, 31, 0.99)
    assert found.share_of_decode_steps == pytest.approx(0.9905, abs=1e-4)
    assert found.wasted_share == pytest.approx(31 * 1_980 / (32 * 2_000))


def test_the_other_reading_wastes_one_row_not_31():
    other = claims.fastest_finisher(num_short=1, short_tokens=20, num_long=31, long_tokens=2_000)
    assert (other.max_ended_rows, other.share_of_steps) == (1, 0.99)
    assert other.wasted_share == pytest.approx(0.031, abs=1e-3)


def test_bucketing_lowers_padding_and_not_the_wait_for_the_slowest():
    runs = claims.bucketing(BOOK)
    arrival, bucketed = runs["arrival"], runs["bucketed"]
    assert arrival.num_batches == bucketed.num_batches == 16
    assert arrival.prompt_padding > 0.7 and bucketed.prompt_padding < 0.45
    assert bucketed.prefill_s < arrival.prefill_s / 2
    assert bucketed.ended_share == pytest.approx(arrival.ended_share, abs=0.05) and arrival.ended_share > 0.6
    assert bucketed.decode_s == pytest.approx(arrival.decode_s, rel=0.05)


def test_ended_rows_are_those_of_the_static_scheduler():
    """The formula against the scheduler itself, driven by hand with one token a step."""
    from minibatcher.kv import SlotKV
    from minibatcher.request import Request, SamplingParams
    from minibatcher.scheduling import SchedulerConfig, StaticScheduler

    rng = random.Random(3)
    for _ in range(20):
        lengths = [rng.randint(1, 30) for _ in range(rng.randint(1, 7))]
        scheduler = StaticScheduler(SlotKV(8, 64), SchedulerConfig(max_num_seqs=len(lengths)))
        for i, length in enumerate(lengths):
            scheduler.add(Request(f"r{i}", range(rng.randint(1, 9)), SamplingParams(max_tokens=length)))
        seen = []
        while scheduler.has_work() and len(seen) <= max(lengths):
            plan = scheduler.schedule(now=0.0)
            seen.append(list(plan.num_tokens.values()).count(0))
            for request, num_tokens in plan.num_tokens.items():
                request.num_computed_tokens += num_tokens
                if num_tokens:
                    request.append(7, 0.0)
            scheduler.update([])
        assert seen == ended_rows(lengths)


def test_equal_lengths_waste_nothing():
    assert set(ended_rows([17] * 5)) == {0}
    assert padding_factors([9] * 3) == pytest.approx([1, 1, 1])


def test_with_equal_lengths_static_and_continuous_take_the_same_steps():
    from fakes import fake_engine

    from minibatcher.request import Request, SamplingParams

    steps = {}
    for name in ("static", "continuous"):
        engine = fake_engine(name, max_num_seqs=4, max_num_batched_tokens=24)
        requests = [Request(f"r{i}", list(range(6)), SamplingParams(max_tokens=11)) for i in range(8)]
        steps[name] = len(engine.run(requests).steps)
    assert steps == {"static": 22, "continuous": 22}


# 1.4, 1.5, 1.6, 2.7: static and dynamic batching in time


@pytest.fixture(scope="module")
def tails():
    return claims.tail_latency(BOOK)


def test_throughput_looks_acceptable_while_latency_does_not(tails):
    """1.4: at a rate that both can serve."""
    static, continuous = tails["static"], tails["continuous"]
    assert static.output_tokens_per_s > 0.95 * continuous.output_tokens_per_s
    assert static.p99_s > 1.8 * continuous.p99_s
    assert static.p50_s > 3 * continuous.p50_s
    assert static.whole_batch_p50_s > 1.2 * static.p50_s
    assert continuous.whole_batch_p99_s == continuous.p99_s


def test_p99_tightens_and_p50_even_more(tails):
    """2.7: p99 falls, and so does its distance from p50; their quotient does not, for p50 falls further."""
    static, continuous = tails["static"], tails["continuous"]
    assert continuous.p99_s < 0.6 * static.p99_s
    assert continuous.p99_s - continuous.p50_s < 0.8 * (static.p99_s - static.p50_s)
    assert continuous.spread > static.spread
    assert continuous.per_token_p99_s < 0.1 * static.per_token_p99_s
    assert continuous.per_token_p99_s / continuous.per_token_p50_s < 2 < static.per_token_p99_s / static.per_token_p50_s


def test_every_static_batch_is_as_long_as_its_longest_request():
    batches = claims.batch_ends(BOOK, num_requests=128)
    assert len(batches) == 4
    for batch in batches:
        assert batch.num_steps == batch.longest_output
        assert batch.num_steps > 1.7 * batch.mean_output


def test_equal_lengths_leave_nothing_to_gain():
    """1.5"""
    runs = claims.equal_lengths(BOOK)
    assert runs["equal"].ratio == pytest.approx(1, abs=0.02)
    assert runs["uniform"].ratio > 1.4
    assert runs["azure-conv"].ratio > 2


@pytest.fixture(scope="module")
def delays():
    points = claims.delay_sweep(claims.machine("llama-3.1-8b", num_gpus=1), num_requests=200)
    return {(p.request_rate, p.delay_s): p for p in points}


def test_a_delay_buys_larger_batches_for_waiting(delays):
    """1.6: batches grow and steps are put to better use; whoever comes first waits for it."""
    for rate in (2, 8, 24):
        at_once, late = delays[rate, 0.0], delays[rate, 0.8]
        assert late.mean_batch > 2 * at_once.mean_batch
        assert late.tokens_per_busy_s > 2 * at_once.tokens_per_busy_s
        assert late.busy_share < 0.5 * at_once.busy_share
        assert late.latency_mean_s > at_once.latency_mean_s + 0.3
        assert late.queue_p99_s <= 0.8 + 1e-9
        sizes = [delays[rate, d].mean_batch for d in (0.0, 0.05, 0.2, 0.8)]
        assert sizes == sorted(sizes)


def test_a_delay_buys_no_throughput_where_requests_come_at_a_rate(delays):
    """1.6: below saturation throughput is the arrival rate, and near it zero delay finds full batches by itself."""
    for rate in (2, 8, 24):
        for delay in (0.05, 0.2, 0.8):
            assert delays[rate, delay].output_tokens_per_s < 1.03 * delays[rate, 0.0].output_tokens_per_s
    assert delays[80, 0.0].mean_batch > 9 * delays[8, 0.0].mean_batch


def test_a_delay_buys_throughput_where_clients_wait_for_their_answers():
    """1.6: 32 clients that ask again at once; without delay two groups take turns."""
    at_once, late = claims.closed_loop_delay(claims.machine("llama-3.1-8b", num_gpus=1))
    assert (at_once.mean_batch, late.mean_batch) == (16.5, 32)  # 1 and 31 in turn, and a last one
    assert late.output_tokens_per_s > 1.6 * at_once.output_tokens_per_s
    assert late.latency_mean_s < at_once.latency_mean_s


# 2.4, 2.6, 2.12: continuous batching


@pytest.fixture(scope="module")
def shares():
    return {(s.strategy, s.neighbour_tokens, s.newcomers_per_s): s for s in claims.fair_share(BOOK)}


@pytest.mark.parametrize("neighbour_tokens", [20, 200, 2_000])
def test_20_tokens_take_20_iterations_whoever_is_beside(shares, neighbour_tokens):
    for name in ("continuous", "chunked"):
        share = shares[name, neighbour_tokens, 0.0]
        assert (share.running, share.holding, share.stalled) == (20, 20, 0)
        assert share.waiting <= 1


def test_newcomers_cost_an_iteration_each_unless_prompts_are_chunked(shares):
    for neighbour_tokens in (20, 200, 2_000):
        share = shares["continuous", neighbour_tokens, 4.0]
        assert share.running == 20 + share.stalled and 1 <= share.stalled <= 4
        assert shares["chunked", neighbour_tokens, 4.0].running == 20


def test_a_fixed_batch_makes_it_wait_for_the_neighbours(shares):
    for neighbour_tokens in (200, 2_000):
        assert shares["static", neighbour_tokens, 0.0].waiting > 0.85 * neighbour_tokens
    (share,) = claims.fair_share(
        BOOK, neighbour_tokens=[300], newcomers_per_s=[0.0], strategies=["static"], arrival_s=0.0
    )
    assert (share.running, share.holding) == (20, 300)  # answered after 20, but its slot is not free


@pytest.fixture(scope="module")
def sweep():
    return claims.utilisation_sweep(BOOK, workloads=["equal", "azure-conv", "longtail"], batch_limits=[32])


def test_70b_from_10_to_20_percent_to_60_to_80(sweep):
    """2.6: it holds for useful slots by time, 32 of them, on heavy-tailed traffic, as long as there is a backlog."""
    verdicts = {v.definition: v for v in claims.utilisation_verdicts(sweep)}
    assert verdicts["useful_slot_share"].holds_in == ("longtail, 32 slots",)
    assert all(not v.holds_in for name, v in verdicts.items() if name != "useful_slot_share")
    assert "holds in 1 of 3 configurations (longtail, 32 slots)" in verdicts["useful_slot_share"].sentence
    to_the_end = claims.utilisation_verdicts(sweep, window="run")
    assert all(not v.holds_in for v in to_the_end)  # in the end slots fall idle


def test_it_does_not_hold_by_other_definitions(sweep):
    """2.6: a busy share cannot tell them apart, bandwidth hardly, and MFU is far below 60 % for both."""
    rows = {(r.workload, r.strategy): r.shares for r in sweep if r.window == "backlog"}
    for strategy in ("static", "continuous", "chunked"):
        shares = rows["longtail", strategy]
        assert shares["busy_share"] == pytest.approx(1)
        assert 0.45 < shares["bandwidth_utilisation"] < 0.6
        assert shares["mfu"] < 0.2
    assert rows["longtail", "continuous"]["mfu"] > 6 * rows["longtail", "static"]["mfu"]
    assert rows["longtail", "chunked"]["useful_slot_share"] > 0.95


def test_nor_for_other_workloads(sweep):
    rows = {(r.workload, r.strategy): r.shares for r in sweep if r.window == "backlog"}
    assert rows["equal", "static"]["useful_slot_share"] == 1
    assert rows["azure-conv", "static"]["useful_slot_share"] > 0.5
    assert rows["azure-conv", "static"]["slot_occupancy"] > 0.35
    speed = {(r.workload, r.strategy): r.output_tokens_per_s for r in sweep if r.window == "run"}
    assert 0.95 < speed["equal", "continuous"] / speed["equal", "static"] < 1.05
    assert 2 < speed["azure-conv", "continuous"] / speed["azure-conv", "static"] < 4
    assert 3 < speed["longtail", "continuous"] / speed["longtail", "static"] < 6


def test_with_an_empty_queue_there_is_nothing_to_gain():
    """2.12: throughput is equal long before latency is."""
    points = {p.request_rate: p for p in claims.low_traffic(BOOK, request_rates=[0.005, 0.5, 8.0])}
    idle, some, much = points.values()
    assert idle.requests_in_step["continuous"] < 1.1 and much.requests_in_step["continuous"] > 10
    for strategy in ("static", "dynamic"):
        assert idle.throughput_ratio(strategy) == pytest.approx(1, abs=0.01)
        assert some.throughput_ratio(strategy) == pytest.approx(1, abs=0.05)
        assert much.throughput_ratio(strategy) > 2
        assert some.latency_ratio(strategy) > 1.5
    assert idle.latency_ratio("dynamic") == pytest.approx(1, abs=0.06)
    wait = idle.latency_mean_s["static"] - idle.latency_mean_s["dynamic"]
    assert wait == pytest.approx(0.5, abs=0.05)  # for company that does not come


# 3.1, 3.2, 3.3, 3.6: prompts against decodes


@pytest.fixture(scope="module")
def stalls():
    return claims.prefill_stall(BOOK)


def test_a_4000_token_prompt_stalls_30_decodes(stalls):
    """3.1: all of them, for as long as it takes; or else the newcomer waits."""
    whole, late = stalls["whole"], stalls["late"]
    assert (whole.num_decodes, whole.stalled, whole.prefill_steps) == (30, 30, 1)
    assert whole.spike > 10 and whole.worst_itl_s > 0.2
    assert late.spike < 1.05 and late.ttft_s > 8 * whole.ttft_s


def test_chunks_of_512_end_the_stall(stalls):
    """3.2: nobody is left out of a step; the steps that carry a chunk are about twice as long."""
    chunked = stalls["chunk 512"]
    assert chunked.stalled == 0
    assert chunked.prefill_steps == 9  # 30 of each 512 tokens are the decodes'
    assert chunked.spike < 2.5
    assert stalls["whole"].ttft_s < chunked.ttft_s < 1.6 * stalls["whole"].ttft_s
    chunks = [stalls[f"chunk {size}"] for size in (128, 512, 2_048)]
    assert [c.spike for c in chunks] == sorted(c.spike for c in chunks)
    assert [c.ttft_s for c in chunks] == sorted((c.ttft_s for c in chunks), reverse=True)
    assert chunks[0].spike < 1.25


def test_the_budget_trades_time_to_first_token_against_inter_token_latency():
    """3.3"""
    points = claims.budget_sweep(BOOK, budgets=[128, 512, 2_048, 8_192])
    first = [p.ttft_p99_s for p in points]
    assert first == sorted(first, reverse=True) and first[0] > 3 * first[-1]
    longest = [p.longest_step_s for p in points]
    assert longest == sorted(longest) and longest[-1] > 10 * longest[0]
    gaps = [p.itl_p99_s for p in points[:3]]  # beyond, long steps are so few that they leave the 99th percentile
    assert gaps == sorted(gaps) and gaps[-1] > 4 * gaps[0]
    rates = [p.output_tokens_per_s for p in points]
    assert max(rates) < 1.01 * min(rates)  # set by the arrivals


@pytest.fixture(scope="module")
def served():
    rows = claims.disaggregation(claims.machine(num_gpus=8), request_rates=[4.0, 12.0, 16.0], num_requests=150)
    return {(row.system, row.request_rate): row for row in rows}


def test_both_phases_fight_again_with_enough_traffic(served):
    """3.6: in one engine gaps between tokens grow with the rate, in split engines they do not."""
    for budget in (512, 2_048):
        system = f"mixed, budget {budget}"
        assert served[system, 16.0].tpot_p99_s > 1.5 * served[system, 4.0].tpot_p99_s
    assert served["split", 16.0].tpot_p99_s < 1.3 * served["split", 4.0].tpot_p99_s
    assert served["split", 12.0].itl_p99_s < 0.4 * served["mixed, budget 2048", 12.0].itl_p99_s
    assert served["split", 12.0].good_share > served["mixed, budget 2048", 12.0].good_share + 0.05


def test_split_engines_pay_in_time_to_first_token(served):
    """3.6: half the devices compute the prompts, and cannot help with them when the other half has little to do."""
    for rate in (4.0, 12.0, 16.0):
        assert served["split", rate].ttft_p99_s > 1.4 * served["mixed, budget 2048", rate].ttft_p99_s
    assert served["split", 16.0].ttft_p50_s > 2.5 * served["split", 12.0].ttft_p50_s  # the prompts' half is full
    low = [row for (_, rate), row in served.items() if rate == 4.0]
    assert all(row.good_share > 0.97 for row in low)  # at low traffic any system will do


def test_a_split_serves_every_token_once():
    from minibatcher.claims.disaggregated import split_engines
    from minibatcher.workload import uniform

    workload = uniform(40, prompt_min=5, prompt_max=900, output_min=1, output_max=60, request_rate=20.0, seed=4)
    records = {r.request_id: r for r in split_engines(workload, BOOK, 1e9, max_num_seqs=8)}
    for row in workload:
        record = records[row.request_id]
        assert record.num_output_tokens == len(record.token_times) == row.output_tokens
        assert record.token_times == sorted(record.token_times)
        assert record.finish_time == record.token_times[-1]
        if row.output_tokens > 1:  # the hand-over lies between the first two
            transfer = row.prompt_tokens * 327_680 / 1e9
            assert record.token_times[1] - record.token_times[0] > transfer


def test_a_split_needs_two_halves():
    with pytest.raises(InvalidParameter, match="not 1"):
        claims.disaggregation(claims.machine(model="llama-3.1-8b", num_gpus=1))


def test_claims_are_the_same_every_time():
    assert claims.bucketing(BOOK, num_requests=64, seed=1) == claims.bucketing(BOOK, num_requests=64, seed=1)
    assert claims.bucketing(BOOK, num_requests=64, seed=1) != claims.bucketing(BOOK, num_requests=64, seed=2)


def test_claims_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; from minibatcher import claims; print(claims.machine().num_gpus)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "4\n"
