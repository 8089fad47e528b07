"""The simulator: the real engine's plans in virtual time, sums that equal timelines, a roofline that adds up."""

from __future__ import annotations

import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.cli import main
from minibatcher.errors import InvalidParameter, RequestRefused, WorkloadError
from minibatcher.hardware import Device, device, model_spec
from minibatcher.kv import BlockKV
from minibatcher.metrics import summarize
from minibatcher.request import Request, SamplingParams
from minibatcher.runners.roofline import TERMS, CostModel, Efficiency, step_work
from minibatcher.scheduling import SchedulerConfig, StepPlan, make_scheduler
from minibatcher.scheduling.plan import Swap
from minibatcher.simulate import run_simulation
from minibatcher.workload import Workload, WorkloadRequest, load_workload

STRATEGIES = ["solo", "static", "dynamic", "continuous", "chunked"]
KNOBS = {"max_num_seqs": 4, "max_num_batched_tokens": 48}


def plans(timeline):
    return [
        (step.width, [(row.slot, row.request_id, row.state, row.num_tokens) for row in step.rows], step.preempted)
        for step in timeline.steps
    ]


@pytest.mark.parametrize("kv_cache_tokens", [None, 120])
def test_simulated_and_real_plans_are_the_same(kv_cache_tokens):
    pytest.importorskip("torch")
    from minibatcher.compare import run_comparison

    workload = load_workload("longtail:prompt_mean=20,output_max=70", num_requests=12, seed=5).fit_to_context(96)
    options = KNOBS | {"max_model_len": 96, "kv_cache_tokens": kv_cache_tokens or 4 * 96, "block_size": 8}
    real = run_comparison(workload, model="bard", strategies=STRATEGIES, **options)
    cost = CostModel(device("h100"), model_spec("bard"))
    simulated = run_simulation(workload, cost, strategies=STRATEGIES, **options)
    for name in STRATEGIES:
        assert real[name].clock == "measured" and simulated[name].clock == "simulated"
        assert len(real[name].steps) > 12
        assert plans(real[name]) == plans(simulated[name]), name
    preempted = sum(len(step.preempted) for step in simulated["chunked"].steps)
    assert preempted > 0 or kv_cache_tokens is None


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("num_blocks", [16, 200])
def test_running_sums_equal_the_timeline(name, num_blocks):
    cost = CostModel(device("l4"), model_spec("llama-3.1-8b"))
    workload = load_workload("longtail", num_requests=60, seed=3, request_rate=4.0).fit_to_context(250)
    options = KNOBS | {"kv_cache_tokens": num_blocks * 16 if name in ("continuous", "chunked") else 2000}
    kept = run_simulation(workload, cost, strategies=[name], **options)[name]
    tally = run_simulation(workload, cost, strategies=[name], keep_timeline=False, **options)[name]
    exact, sums = summarize(kept), tally.summary()
    assert exact.keys() == sums.keys()
    for key in exact:
        if key == "itl_ms":
            assert sums[key]["n"] == exact[key]["n"]
            assert sums[key]["mean"] == pytest.approx(exact[key]["mean"])
            for p in ("p50", "p90", "p99"):
                assert sums[key][p] == pytest.approx(exact[key][p], rel=0.006)
        elif key == "slot_shares":
            assert sums[key] == pytest.approx(exact[key], abs=0.01)  # rows of one token count as decodes
        elif isinstance(exact[key], dict):
            assert sums[key] == pytest.approx(exact[key], rel=1e-9), key
        else:
            assert sums[key] == (exact[key] if isinstance(exact[key], str) else pytest.approx(exact[key], rel=1e-9)), (
                key
            )


def brute_force(plan: StepPlan) -> tuple[int, int, int, float]:
    """(tokens, rows, keys read, query-key pairs) by counting one by one."""
    tokens = rows = keys = pairs = 0
    for request, n in plan.num_tokens.items():
        rows += 1
        tokens += n
        keys += request.num_computed_tokens + n
        pairs += sum(request.num_computed_tokens + i + 1 for i in range(n))
    return tokens, rows, keys, pairs


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=6))
def test_work_of_a_ragged_step_by_counting(rows):
    plan = StepPlan()
    for i, (computed, n) in enumerate(rows):
        request = Request(f"r{i}", range(100), SamplingParams(max_tokens=1))
        request.num_computed_tokens = computed
        plan.num_tokens[request] = n
    work = step_work(plan, 2)
    assert (work.num_tokens, work.num_requests, work.kv_tokens_read) == brute_force(plan)[:3]
    assert work.decode_pairs + work.prefill_pairs == brute_force(plan)[3]
    assert work.num_sampled == 2


def test_a_padded_step_pays_for_its_rectangle():
    plan = StepPlan(width=7)
    for i, n in enumerate([3, 7, 1]):
        plan.num_tokens[Request(f"r{i}", range(n))] = n
    work = step_work(plan, 3)
    assert (work.num_tokens, work.kv_tokens_read, work.prefill_pairs) == (21, 21, 3 * 28)
    plan = StepPlan(width=1)
    for i, (computed, n) in enumerate([(9, 1), (4, 0), (6, 1)]):
        request = Request(f"r{i}", range(2))
        request.num_computed_tokens = computed
        plan.num_tokens[request] = n
    work = step_work(plan, 2)
    assert (work.num_tokens, work.kv_tokens_read, work.decode_pairs) == (3, 30, 30)


def one_plan(num_decodes: int, context: int, num_swapped_blocks: int = 0) -> StepPlan:
    plan = StepPlan()
    for i in range(num_decodes):
        request = Request(f"r{i}", range(context))
        request.num_computed_tokens = context - 1
        plan.num_tokens[request] = 1
    blocks = list(range(num_swapped_blocks))
    plan.swaps = [Swap(Request("out", range(context)), True, blocks, blocks)] if blocks else []
    return plan


def one_step(cost: CostModel, num_decodes: int, context: int) -> dict[str, float]:
    return cost.terms(step_work(one_plan(num_decodes, context), num_decodes))


def test_decode_streams_the_weights_and_a_large_batch_meets_the_ridge():
    ideal = Efficiency(1, 1, 1, 1, step_s=0, request_s=0)
    cost = CostModel(device("h100"), model_spec("llama-2-13b"), dtype="float16", efficiency=ideal)
    model, gpu = cost.model, cost.device
    streamed = model.linear_bytes("float16") / gpu.bandwidth
    assert one_step(cost, 1, 100)["linear"] == pytest.approx(streamed, rel=0.02)
    assert one_step(cost, 8, 100)["linear"] < 1.05 * streamed  # eight tokens for nearly the same traffic
    assert one_step(cost, 4096, 100)["linear"] == pytest.approx(
        model.linear_flops(4096, 4096) / gpu.rate("float16"), rel=0.05
    )
    assert one_step(cost, 8, 1000)["attention"] == pytest.approx(
        8 * 1000 * model.kv_bytes_per_token("float16") / gpu.bandwidth
    )


def test_terms_can_be_switched_off_and_add_up():
    cost = CostModel(device("a100-80"), model_spec("llama-3.1-70b"), num_gpus=4)
    work = step_work(one_plan(16, 500, num_swapped_blocks=3), 16)
    terms = cost.terms(work)
    assert set(terms) == set(TERMS) and all(value > 0 for value in terms.values())
    assert cost.seconds(work) == pytest.approx(sum(cost.terms(work).values()))
    for term in TERMS:
        without = cost.without(term)
        assert without.terms(work)[term] == 0
        assert without.seconds(work) == pytest.approx(cost.seconds(work) - cost.terms(work)[term])
    with pytest.raises(InvalidParameter, match="unknown cost term 'magic'; known: linear"):
        cost.without("magic")


def test_a_model_that_does_not_fit_says_how_many_devices_it_takes():
    cost = CostModel(device("h100"), model_spec("llama-3.1-70b"))
    message = r"does not fit 1 × h100: need 13\d\.\d GiB .* have .* it takes \d of them"
    with pytest.raises(InvalidParameter, match=message) as error:
        cost.check_fits()
    takes = int(str(error.value).split("takes ")[1].split()[0])
    CostModel(device("h100"), model_spec("llama-3.1-70b"), num_gpus=takes).check_fits()
    with pytest.raises(InvalidParameter, match="does not fit"):
        CostModel(device("h100"), model_spec("llama-3.1-70b"), num_gpus=takes - 1).check_fits()


def test_a_device_without_a_link_or_a_dtype_is_refused():
    lonely = Device("lonely", 1 << 40, 1e12, {"float16": 1e14})
    with pytest.raises(InvalidParameter, match="no link"):
        CostModel(lonely, model_spec("bard"), num_gpus=2, dtype="float16")
    with pytest.raises(InvalidParameter, match="no bfloat16 rate"):
        CostModel(lonely, model_spec("bard"))


def test_waits_are_the_same_in_large_and_small_queues():
    """No work per waiting request: a step costs the scheduler the same however long the queue is."""

    def calls(num_waiting: int) -> int:
        scheduler = make_scheduler(
            "chunked", BlockKV(64, 16), SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8)
        )
        for i in range(num_waiting):
            scheduler.add(Request(f"r{i}", range(5)))
        scheduler.schedule(0.0)
        count = 0

        def trace(*_):
            nonlocal count
            count += 1

        sys.setprofile(trace)
        try:
            scheduler.schedule(0.0)
        finally:
            sys.setprofile(None)
        return count

    assert calls(10) == calls(10_000)


def test_rows_without_lengths_are_refused():
    workload = Workload("text", (WorkloadRequest("a", 0.0, 5, None),), "made here")
    with pytest.raises(WorkloadError, match="'a' of text names no prompt or output length"):
        run_simulation(workload, CostModel(device("h100"), model_spec("bard")))


def test_context_and_pool_are_respected():
    cost = CostModel(device("h100"), model_spec("bard"))
    workload = load_workload("uniform:prompt_min=3000,prompt_max=3000", num_requests=2)
    with pytest.raises(InvalidParameter, match="above the context of bard, 2048"):
        run_simulation(workload, cost)
    small = load_workload("uniform", num_requests=2, seed=1)
    with pytest.raises(RequestRefused, match="has no room for one slot"):
        run_simulation(small, cost, strategies=["static"], kv_cache_tokens=10)


def test_command(tmp_path, capsys):
    out = tmp_path / "out.json"
    args = [
        "simulate",
        "--hardware",
        "h100",
        "--num-gpus",
        "4",
        "--model-spec",
        "llama-3.1-70b",
        "--num-requests",
        "60",
    ]
    assert main([*args, "--json", str(out), "--plot", str(tmp_path / "p.png"), "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "Calibration: none: default efficiency figures, derived from published ones." in printed
    assert "SIMULATED" in printed and "busy (as nvidia-smi shows)" in printed and "identical" not in printed
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["clock"] == "simulated" and data["header"]["hardware"]["device"] == "4 × h100"
    chunked = data["strategies"]["chunked"]
    assert {"busy_share", "mfu", "bandwidth_utilisation", "useful_slot_share"} <= chunked["utilisation"].keys()
    assert chunked["utilisation"]["mfu"] < chunked["utilisation"]["busy_share"]
    assert main([*args, "--json", str(tmp_path / "again.json"), "--quiet"]) == 0
    assert (tmp_path / "again.json").read_bytes() == out.read_bytes()  # virtual time repeats exactly


def test_command_calibrates_on_our_own_runs_and_uses_what_it_found(tmp_path, capsys):
    pytest.importorskip("torch")
    small = ["--num-requests", "12", "--max-num-seqs", "4", "--max-model-len", "160", "--quiet"]
    assert main(["compare", *small, "--strategies", "static,chunked", "--timeline", str(tmp_path / "runs")]) == 0
    figures = tmp_path / "efficiency.json"
    capsys.readouterr()
    machine = ["--hardware", "h100", "--model-spec", "bard", "--dtype", "float32"]
    assert main(["simulate", "--calibrate", str(tmp_path / "runs"), *machine, "--save", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert "Calibrated on" in printed and "makespan_s" in printed and "%" in printed
    fitted = json.loads(figures.read_text(encoding="utf-8"))["efficiency"]
    out = tmp_path / "out.json"
    assert main(["simulate", *small, "--efficiency", str(figures), "--json", str(out)]) == 0
    header = json.loads(out.read_text(encoding="utf-8"))["header"]
    assert header["efficiency"] == fitted
    assert (header["model"], header["dtype"], header["hardware"]["device"]) == ("bard", "float32", "1 × h100")


@pytest.mark.parametrize(
    "args, message",
    [
        (["--calibrate", "/no/such/run"], "/no/such/run"),
        (["--efficiency", "/no/such/file"], "/no/such/file"),
        (["--hardware", "abacus"], "unknown hardware 'abacus'; known: t4, l4"),
        (["--model-spec", "gpt-9"], "unknown model spec 'gpt-9'; known: .*llama-3.1-70b"),
        (["--model-spec", "llama-3.1-70b"], "does not fit 1 × h100: need"),
        (["--without", "luck"], "unknown cost term 'luck'"),
        (["--hardware", "t4", "--model-spec", "bard"], "t4 has no bfloat16 rate"),
        (["--num-requests", "30000", "--plot", "x.png"], "every step, which is kept up to 10,000"),
        (["--num-gpus", "0"], "at least 1"),
        (["--num-gpus", "20000"], "20000 is more than 256"),
        (["--num-gpus", "3"], "can't share the 32 heads of llama-3.1-8b evenly"),
        (["--gpu-memory-utilization", "5"], r"memory_utilization must be in \(0, 1\]"),
        (["--gpu-memory-utilization", "0.02"], "the workspace alone fills it"),
        (["--efficiency", ""], "can't read the efficiency file"),
    ],
)
def test_bad_input_gets_a_sentence(args, message, capsys):
    try:
        code = main(["simulate", *args])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("minibatcher simulate: ") and re.search(message, error), error
