"""Calibration: reading measured runs, replaying them, and recovering what a fit should find."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from fakes import fake_requests, fake_run

from minibatcher.calibrate import (
    MeasuredStep,
    calibrate,
    compare,
    cost_model,
    device_of,
    load_run,
    load_runs,
    load_saved,
    model_of,
    predict,
    replay,
    shipped_cost,
    shipped_report,
    shipped_source,
)
from minibatcher.calibrate.fit import fit_steps, huber
from minibatcher.errors import InvalidParameter, UnknownName, WorkloadError
from minibatcher.hardware import device, model_spec
from minibatcher.runners.roofline import CostModel, Efficiency, StepWork

MEASURED = Path(__file__).resolve().parents[1].parent / "shared/traces/vllm-measured-runs/RTX4090_Llama-3.1-8B"

META = {
    "model": "meta-llama/Llama-3.1-8B",
    "vllm_version": "0.19.0",
    "engine_kwargs": {"max_num_seqs": 48, "max_num_batched_tokens": 1024, "dtype": "bfloat16"},
    "kv_cache": {"num_gpu_blocks": 1801, "block_size": 16, "enable_prefix_caching": True},
    "hardware": {"device_name": "NVIDIA L4"},
    "resolved_config": {"scheduler_config": {"async_scheduling": True, "scheduler_reserve_full_isl": True}},
}


class Noisy:
    """A cost model whose steps vary by 3 %, and whose first ones are slow."""

    def __init__(self, cost: CostModel, seed: int) -> None:
        self.cost, self.rng, self.count = cost, np.random.default_rng(seed), 0

    def seconds(self, work: StepWork) -> float:
        self.count += 1
        slow = 0.3 if self.count < 3 else 0.0
        return slow + self.cost.seconds(work) * float(np.exp(0.03 * self.rng.standard_normal()))


def write_run(folder: Path, rows: list[dict]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "meta.json").write_text(json.dumps(META))
    (folder / "requests.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


def make_run(folder: Path, truth: Efficiency, *, rate: float, count: int = 110, seed: int = 3) -> Path:
    """A folder as a vLLM run leaves it, two clocks and all, with times from a cost model of known factors."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    rows = [
        {
            "request_id": f"bench-{i}",
            "input_toks": int(rng.lognormal(6, 0.9)) + 4,
            "output_toks": int(np.clip(rng.lognormal(4.8, 0.6), 2, 700)),
            "arrival_time": 1.7e9 + float(arrivals[i]),
            "queued_ts": 500.0 + float(arrivals[i]) + 0.001,
            "first_token_ts": 1e6,
            "last_token_ts": 1e6,
        }
        for i in range(count)
    ]
    write_run(folder, rows)
    run = load_run(folder)
    steps = []
    outcomes = replay(
        run,
        Noisy(CostModel(device("l4"), model_spec("llama-3.1-8b"), efficiency=truth), seed),
        watch=lambda start, end, plan, scheduler: steps.append(
            (
                end,
                sum(n for n in plan.num_tokens.values() if n > 1),
                sum(n == 1 for n in plan.num_tokens.values()),
                len(scheduler.running),
                100 * scheduler.kv.num_used_blocks / scheduler.kv.num_blocks,
            )
        ),
    )
    zero = 500.001 + arrivals[0]
    for row in rows:
        row["first_token_ts"] = zero + outcomes[row["request_id"]].first_token_time
        row["last_token_ts"] = zero + outcomes[row["request_id"]].last_token_time
    write_run(folder, rows)
    table = np.array(steps)
    lines = ["t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct"]
    for second in range(1, int(table[-1, 0]) + 1):
        inside = (table[:, 0] > second - 1) & (table[:, 0] <= second)
        last = table[max(0, np.searchsorted(table[:, 0], second) - 1)]
        lines.append(f"{second},{table[inside, 1].sum()},{table[inside, 2].sum()},{last[3]},0,{last[4]}")
    (folder / "timeseries.csv").write_text("\n".join(lines))
    return folder


def errors(rows, part: str | None = None) -> dict[str, float]:
    return {row.metric: row.error for row in rows if part in (None, row.part)}


def test_predictions_are_recovered_from_a_run_with_other_factors(tmp_path):
    truth = Efficiency(bandwidth=0.78, compute=0.5, attention_bandwidth=0.55, step_s=0.006, request_s=4e-5)
    run = load_run(make_run(tmp_path / "run", truth, rate=3.0))
    before = errors(predict(run, cost_model(run)))
    calibration = calibrate(run)
    whole, held_out = errors(calibration.rows, "whole run"), errors(calibration.rows, "hold-out")
    assert abs(whole["makespan_s"]) < 0.05 and abs(whole["output_tokens_per_s"]) < 0.05
    for metric in ("ttft_ms p50", "ttft_ms p90", "tpot_ms p50", "tpot_ms p90"):
        assert abs(held_out[metric]) < 0.15, metric
    assert abs(before["tpot_ms p50"]) > 3 * abs(held_out["tpot_ms p50"])
    assert 0.9 < calibration.efficiency.compute / truth.compute < 1.15  # what prompts tell is told apart from the rest
    assert "Held out" in calibration.text()

    other = load_run(make_run(tmp_path / "other", truth, rate=8.0, seed=9))  # another load, never seen
    assert abs(errors(predict(other, calibration.cost))["makespan_s"]) < 0.08

    path = tmp_path / "efficiency.json"
    calibration.save(path)
    assert load_saved(path).efficiency == calibration.efficiency
    saved = json.loads(path.read_text())
    assert saved["model"] == "llama-3.1-8b" and "rows" not in saved


@pytest.mark.skipif(not MEASURED.exists(), reason="no measured runs beside the repository")
def test_the_measured_run_is_predicted_within_the_goals():
    run = load_run(MEASURED)
    calibration = calibrate(run)
    whole, held_out = errors(calibration.rows, "whole run"), errors(calibration.rows, "hold-out")
    assert abs(whole["makespan_s"]) < 0.05 and abs(whole["output_tokens_per_s"]) < 0.05
    for metric in ("ttft_ms", "tpot_ms"):
        limits = {"p50": 0.15, "p90": 0.15, "p99": 0.25}
        assert all(abs(held_out[f"{metric} {p}"]) < limit for p, limit in limits.items())
    assert asdict(calibration.efficiency) == pytest.approx(asdict(shipped_cost().efficiency), rel=0.02)
    before = compare(run, replay(run, cost_model(run)), horizon=run.makespan / 2)
    for name, rows in {"not fitted": before, "fitted": calibration.rows}.items():
        shipped = errors(shipped_report()[name], "hold-out")
        assert len(shipped) >= 7
        assert errors(rows, "hold-out") == pytest.approx(shipped, abs=0.005)


def test_what_was_fitted_is_nearer_than_what_was_not():
    report = {name: errors(rows, "hold-out") for name, rows in shipped_report().items()}
    assert report["fitted"].keys() == report["not fitted"].keys()
    assert max(map(abs, report["fitted"].values())) < 0.15 < max(map(abs, report["not fitted"].values()))
    assert "vLLM 0.19.0" in shipped_source() and "MIT" in shipped_source()


def test_steps_tell_the_factors():
    rng = np.random.default_rng(1)
    truth = Efficiency(0.6, 0.5, 1, 0.4, 0.2, 0.004, 1e-4, 0.0)
    cost = CostModel(device("l4"), model_spec("qwen2.5-0.5b"), efficiency=Efficiency(tile_tokens=1))
    steps = []
    for _ in range(300):
        rows, chunk = int(rng.integers(1, 64)), int(rng.choice([0, 0, 0, 100, 900, 4000]))
        kv = rows * int(rng.integers(50, 4000))
        work = StepWork(rows + chunk, rows, rows, kv + chunk, kv, chunk * chunk / 2, rows)
        steps.append(MeasuredStep(0.0, replace(cost, efficiency=truth).seconds(work), work))
    fitted = fit_steps(steps[:150], cost)
    ratios = [replace(cost, efficiency=fitted).seconds(s.work) / s.seconds for s in steps[150:]]
    assert np.percentile(np.abs(np.log(ratios)), 90) < 0.05
    assert 0.8 < fitted.compute / truth.compute < 1.25


def test_huber_is_a_square_and_then_a_line():
    assert huber(np.array([0.5, -0.5, 3.0, 4.0])).tolist() == [0.125, 0.125, 2.5, 3.5]


def test_a_timeline_gives_its_steps(tmp_path):
    timeline = fake_run("chunked", fake_requests(20, seed=4))
    timeline.clock = "measured"
    timeline.header |= {"model": "bard", "dtype": "float32", "hardware": {"device": "some CPU", "threads": 2}}
    for name in ("a", "b"):
        timeline.save(tmp_path / f"{name}.json")
    run = load_run(tmp_path / "a.json")
    assert run.on_cpu and len(run.steps) == len(timeline.steps) and len(load_runs(tmp_path)) == 2
    assert sum(s.work.num_tokens for s in run.steps) == sum(s.num_computed_tokens for s in timeline.steps)
    calibration = calibrate([run, run], device=replace(device("l4"), flops={"float32": 1e11}))
    whole = [row for row in calibration.rows if row.metric == "makespan_s"]
    assert len(whole) == 2 and all(abs(row.error) < 0.1 for row in whole)
    with pytest.raises(WorkloadError, match="2 timelines"):
        load_run(tmp_path)


def test_names_of_devices_and_models(tmp_path):
    run = load_run(make_run(tmp_path / "run", Efficiency(), rate=5.0, count=12))
    assert run.num_blocks == 1800 and run.async_scheduling and run.log
    for name, expected in {
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA L4": "l4",
    }.items():
        assert device_of(replace(run, device=name)).name == expected
    assert model_of(replace(run, model="meta-llama/Llama-3.1-8B-Instruct")).name == "llama-3.1-8b"
    with pytest.raises(UnknownName, match="known: t4"):
        device_of(replace(run, device="NVIDIA L40S"))


def test_mistakes_are_told_in_a_sentence(tmp_path):
    folder = make_run(tmp_path / "run", Efficiency(), rate=5.0, count=12)
    run = load_run(folder)
    with pytest.raises(InvalidParameter, match="fit_share"):
        calibrate(run, fit_share=1.0)
    with pytest.raises(WorkloadError, match="raise fit_share"):
        calibrate(run, fit_share=0.01)
    with pytest.raises(WorkloadError, match="no measured run"):
        load_run(tmp_path / "nowhere")
    lines = (folder / "requests.jsonl").read_text().splitlines()
    (folder / "requests.jsonl").write_text("\n".join([*lines, '{"input_toks": 3}']))
    with pytest.raises(WorkloadError, match="line 13"):
        load_run(folder)
    (folder / "meta.json").write_text(json.dumps({key: META[key] for key in META if key != "kv_cache"}))
    (folder / "requests.jsonl").write_text("\n".join(lines))
    with pytest.raises(WorkloadError, match="'kv_cache' is missing"):
        load_run(folder)
    (tmp_path / "x.json").write_text('{"efficiency": {}}')
    with pytest.raises(InvalidParameter, match="no efficiency file"):
        load_saved(tmp_path / "x.json")
