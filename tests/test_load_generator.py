"""The script that holds a published load generator's numbers against ours: what of it needs neither."""

import json
import sys
from pathlib import Path

import pytest
from load_generator import (
    COUNTERS,
    HISTOGRAMS,
    differences,
    medians,
    metrics_figures,
    own_figures,
    run,
    table,
    workload_of,
)
from load_generators import GENERATORS, guidellm_figures, trace_rows, vllm_figures

from minibatcher.timeline import RequestRecord, Timeline

TIMES = {"a": (1.0, [1.5, 1.6, 1.8]), "b": (1.25, [2.25, 2.5]), "c": (2.0, [2.5])}  # arrival, tokens


@pytest.fixture
def timeline():
    """Three requests after one that warms up. Every figure of theirs can be had by hand."""
    timeline = Timeline(header={"max_num_seqs": 4})
    for name, (arrival, times) in ({"warm": (0.0, [0.9])} | TIMES).items():
        timeline.requests[name] = RequestRecord(
            name, arrival, 10, len(times), arrival, times, times[-1], "length", output_token_ids=[5] * len(times)
        )
    return timeline


def test_our_figures_are_those_of_the_requests_after_the_warm_up(timeline):
    figures = own_figures(timeline, 3)
    assert (figures["num_requests"], figures["num_prompt_tokens"], figures["num_output_tokens"]) == (3, 30, 6)
    assert figures["output_tokens_per_s"] == pytest.approx(6 / 1.5)
    assert figures["ttft_ms mean"] == pytest.approx((500 + 1000 + 500) / 3)
    assert figures["tpot_ms mean"] == pytest.approx((150 + 250) / 2)
    assert figures["itl_ms mean"] == pytest.approx((100 + 200 + 250) / 3)
    assert figures["e2el_ms p50"] == pytest.approx(800)


def test_vllms_figures_are_found_under_our_names(timeline):
    ours = own_figures(timeline, 3)
    report = {"completed": 3, "total_input_tokens": 30, "total_output_tokens": 6, "output_throughput": 4.0}
    report |= {f"{p}_{name[:-3]}_ms": value for key, value in ours.items() if " " in key for name, p in [key.split()]}
    assert vllm_figures(report) == pytest.approx(ours)


def test_of_guidellms_figures_those_that_mean_what_ours_mean_are_taken(timeline):
    """Its report of these requests; its summary holds other numbers, so that it shows where they are used."""
    ours = own_figures(timeline, 3)
    requests = [
        {
            "time_to_first_token_ms": (times[0] - arrival) * 1e3,
            "inter_token_latency_ms": (times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else None,
            "request_latency": times[-1] - arrival,
        }
        for arrival, times in TIMES.values()
    ]
    means = {"time_to_first_token_ms": 1, "inter_token_latency_ms": 2, "request_latency": 3}
    metrics = {name: {"successful": {"mean": mean, "percentiles": {"p99": -1}}} for name, mean in means.items()}
    totals = {"prompt_token_count": 30, "output_token_count": 6}
    metrics |= {name: {"successful": {"total_sum": total}} for name, total in totals.items()}
    metrics |= {"request_totals": {"successful": 3}, "output_tokens_per_second": {"successful": {"mean": 4.0}}}
    theirs = guidellm_figures({"benchmarks": [{"metrics": metrics, "requests": {"successful": requests}}]})
    own = {"ttft_ms mean": 1, "itl_ms mean": 2, "e2el_ms mean": 3000}  # it tells seconds
    assert {name: theirs.pop(name) for name in own} == own
    assert theirs == pytest.approx({name: ours[name] for name in theirs})
    assert {"ttft_ms p99", "tpot_ms mean", "e2el_ms p50"} <= theirs.keys() and "itl_ms p99" not in theirs


def test_a_difference_of_more_than_five_per_cent_is_marked():
    ours = {"ttft_ms mean": 100.0, "itl_ms mean": 10.0, "itl_ms p99": 1.0}
    theirs = {"ttft_ms mean": 104.0, "itl_ms mean": 9.0}
    assert differences(theirs, ours) == pytest.approx({"ttft_ms mean": 0.04, "itl_ms mean": -0.1})
    lines = table("other", {"generator": theirs, "server": ours, "metrics": {}, "replay": ours}).splitlines()
    assert len(lines) == 3 and lines[1].count("+4.0%") == 2 and lines[2].count("-10.0% !") == 2
    assert "!" not in lines[1] and "–" in lines[1]


def test_metrics_tell_counts_and_means():
    samples = dict.fromkeys(COUNTERS.values(), 7.0)
    samples |= {f"{name}_sum": 3.0 for name in HISTOGRAMS.values()} | {f"{n}_count": 4.0 for n in HISTOGRAMS.values()}
    figures = metrics_figures(samples.__getitem__)
    assert figures["num_output_tokens"] == 7 and figures["itl_ms mean"] == 750


def test_the_middle_of_the_rounds_is_told():
    assert medians([{"x": 1.0}, {"x": 30.0}, {"x": 2.0}]) == {"x": 2.0}


def test_both_generators_are_given_the_workload_as_it_is():
    workload = workload_of(20, 2.0, 512)
    assert min(r.prompt_tokens for r in workload) >= 8
    assert max(r.prompt_tokens + r.output_tokens for r in workload) < 500
    rows = trace_rows(workload)
    assert [(r["timestamp"], r["input_length"], r["output_length"]) for r in rows] == [
        (r.arrival_time, r.prompt_tokens, r.output_tokens) for r in workload
    ]
    assert len({tuple(row["hash_ids"]) for row in rows}) == len(workload) > 15
    for generator in GENERATORS.values():
        words = generator.command("python", "http://127.0.0.1:1", Path("m"), Path("trace.jsonl"), Path("r.json"))
        text = " ".join(words)
        assert all(part in text for part in ("http://127.0.0.1:1", "trace.jsonl", "r.json"))
        assert "ignore_eos" in text or "--ignore-eos" in text


def test_a_command_that_fails_says_how_it_ended():
    run([sys.executable, "-c", "print(1)"])
    with pytest.raises(RuntimeError, match="ended with 3: no such thing"):
        run([sys.executable, "-c", "import sys; print('no such thing'); sys.exit(3)"])


def test_the_figures_can_be_kept(timeline):
    assert json.loads(json.dumps(own_figures(timeline, 3))) == own_figures(timeline, 3)
