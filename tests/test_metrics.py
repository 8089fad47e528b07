"""Every metric of a small run, computed by hand; and what must hold for any run."""

import json
import math

import numpy as np
import pytest
from fakes import fake_requests as requests
from fakes import fake_run as run
from hypothesis import given
from hypothesis import strategies as st

from minibatcher import metrics
from minibatcher.errors import InvalidParameter
from minibatcher.metrics import DEFINITIONS, cost, goodput, mean_power, summarize
from minibatcher.scheduling import STRATEGIES
from minibatcher.tally import _Histogram
from minibatcher.timeline import DeviceSample, RequestRecord, RowRecord, RowState, StepRecord, Timeline

PREFILL, DECODE, STALLED, FINISHED = RowState


def by_hand() -> Timeline:
    """Three slots; a and b run padded, c joins later and is aborted, d is let in but never computes.

    a found 3 tokens of its prompt in the cache and lost 2, c lost 1. Blocks are cached in the last step only.
    """
    steps = [
        StepRecord(0, 1.1, 0.4, [RowRecord(0, "a", PREFILL, 5, 5), RowRecord(1, "b", PREFILL, 2, 2)],
                   5, 10, 1, None, ["a", "b"], ["b"], [], 3, 7, 7),
        StepRecord(1, 1.5, 0.1, [RowRecord(0, "a", DECODE, 1, 6), RowRecord(1, "b", FINISHED, 0, 2)],
                   1, 2, 1, {"request_id": "c", "reason": "batch already launched"}, [], [], [], 3, 7, 8),
        StepRecord(2, 1.6, 0.3, [RowRecord(0, "a", DECODE, 1, 7), RowRecord(2, "c", PREFILL, 4, 4)],
                   None, 5, 0, None, ["c"], ["a"], [], 4, 6, 11),
        StepRecord(3, 2.0, 0.5, [RowRecord(2, "c", DECODE, 1, 5), RowRecord(1, "d", STALLED, 0, 0)],
                   None, 1, 2, None, ["d"], [], ["e"], 2, 5, 5, 3, 6),
    ]  # fmt: skip
    records = [
        RequestRecord("a", 1.0, 5, 3, 1.1, [1.5, 1.6, 1.9], 1.9, "stop", output_token_ids=[7, 8, 9], tenant="x",
                      num_cached_tokens=3, num_lost_tokens=2),
        RequestRecord("b", 1.05, 2, 1, 1.1, [1.5], 1.5, "length", output_token_ids=[4], priority=1, tenant="x"),
        RequestRecord("c", 1.3, 4, 2, 1.6, [1.9, 2.5], 2.75, "abort", output_token_ids=[1, 2], priority=1,
                      num_lost_tokens=1),
        RequestRecord("d", 1.95, 9, priority=5),
    ]  # fmt: skip
    header = {"strategy": "by hand", "max_num_seqs": 3, "block_size": 4, "num_blocks": 10}
    return Timeline("measured", header, steps, {r.request_id: r for r in records})


EXPECTED = {
    "makespan_s": 1.75,  # 1.0 until the abort at 2.75
    "num_requests": 4,
    "num_output_tokens": 6,
    "num_prompt_tokens": 11,  # d never got a token
    "output_tokens_per_s": 6 / 1.75,
    "total_tokens_per_s": 17 / 1.75,
    "requests_per_s": 2 / 1.75,
    "admissions_per_s": 4 / 1.75,
    "num_steps": 4,
    "num_preemptions": 1,
    "num_swapped_blocks": 6,
    "num_lost_tokens": 3,
    "lost_share": 3 / 18,
    "num_cached_tokens": 3,
    "prefix_hit_rate": 3 / 11,  # d was never let in
    "slot_occupancy": 6 / 12,
    "slot_occupancy_time": (2 * 0.4 + 1 * 0.1 + 2 * 0.3 + 1 * 0.5) / (1.3 * 3),
    "batch_fill": 8 / 12,
    "batch_efficiency": 6 / 8,
    "num_computed_tokens": 18,
    "num_padding_tokens": 4,
    "padding_share": 4 / 18,
    "padding_prompt_share": 3 / 18,
    "padding_finished_share": 1 / 18,
    "tokens_per_step": 4.5,
    "busy_share": 1.3 / 1.75,
}
EXPECTED_GROUPS = {
    "num_finished": {"stop": 1, "length": 1, "abort": 1, "unfinished": 1},
    "queue_ms": {"mean": 150, "p50": 100, "p90": 260, "p99": 296, "n": 3},  # 50, 100, 300
    "ttft_ms": {"mean": 1550 / 3, "p50": 500, "p90": 580, "p99": 598, "n": 3},  # 450, 500, 600
    "itl_ms": {"mean": 1000 / 3, "p50": 300, "p90": 540, "p99": 594, "n": 3},  # 100, 300, 600
    "tpot_ms": {"mean": 400, "p50": 400, "p90": 560, "p99": 596, "n": 2},  # 200, 600
    "e2el_ms": {"mean": 675, "p50": 675, "p90": 855, "p99": 895.5, "n": 2},  # 450, 900; c was aborted
    "slot_shares": {"prefill": 3 / 12, "decode": 3 / 12, "stalled": 1 / 12, "finished": 1 / 12, "idle": 4 / 12},
    "kv_occupancy": {"tokens_of_reserved": 31 / 48, "blocks_of_pool": 0.3, "blocks_peak": 0.4, "cached_of_pool": 0.075},
    "queue_depth": {"mean": 1.0, "max": 2},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_number_by_hand(name):
    assert summarize(by_hand())[name] == pytest.approx(EXPECTED[name])


@pytest.mark.parametrize("name", EXPECTED_GROUPS)
def test_group_by_hand(name):
    assert summarize(by_hand())[name] == pytest.approx(EXPECTED_GROUPS[name])


def test_every_number_is_checked_and_defined():
    summary = summarize(by_hand())
    assert set(summary) == set(EXPECTED) | set(EXPECTED_GROUPS) | {"clock", "refusals", "classes", "tenants"}
    counts = {name for name in summary if name.startswith("num_") and name != "num_preemptions"}
    assert set(summary) - counts - {"clock"} <= set(DEFINITIONS)


def test_classes_and_tenants_by_hand():
    summary = summarize(by_hand())
    classes, tenants = summary["classes"], summary["tenants"]
    assert list(classes) == ["paid", "interactive", "priority 5"] and list(tenants) == ["default", "x"]
    assert classes["interactive"] == {
        "n": 2,
        "num_served": 1,  # c was aborted
        "num_refused": 0,
        "ttft_ms": pytest.approx({"mean": 525, "p50": 525, "p90": 585, "p99": 598.5, "n": 2}),  # 450, 600
        "tpot_ms": pytest.approx({"mean": 600, "p50": 600, "p90": 600, "p99": 600, "n": 1}),
        "output_share": 2 / 5,  # until a's last token at 1.9
    }
    assert classes["paid"]["tpot_ms"]["p50"] == pytest.approx(200) and classes["paid"]["output_share"] == 3 / 5
    assert classes["priority 5"]["n"] == 1 and classes["priority 5"]["ttft_ms"]["n"] == 0
    assert classes["priority 5"]["output_share"] == 0 and classes["priority 5"]["num_served"] == 0
    assert [tenants[name]["n"] for name in tenants] == [2, 2] and tenants["x"]["output_share"] == 4 / 5
    alone = by_hand()
    alone.requests = {"a": alone.requests["a"]}
    assert summarize(alone)["classes"] == {} == summarize(alone)["tenants"]


def test_shares_are_of_the_time_when_all_had_work():
    timeline = by_hand()
    timeline.requests["a"].arrival_time = 1.55  # paid: from then until 1.9, when b has had its token already
    timeline.requests["d"].finish_reason = "refused"
    classes = summarize(timeline)["classes"]
    assert [group["output_share"] for group in classes.values()] == [2 / 3, 1 / 3, 0]
    assert [group["num_refused"] for group in classes.values()] == [0, 0, 1]
    del timeline.requests["c"]  # b is through before a comes
    assert [group["output_share"] for group in summarize(timeline)["classes"].values()] == [None] * 3


def test_running_sums_know_shares_in_time():
    histogram, rng = _Histogram(), np.random.default_rng(0)
    assert histogram.until(3.0) == 0
    times = np.sort(rng.exponential(1.0, 20_000).cumsum()) + 5.0
    early, late = np.array_split(times, 2)
    for piece in [*np.array_split(early, 50), *np.array_split(rng.permutation(late), 20)]:  # roughly as requests end
        histogram.add(piece)
    for moment in (0.0, 5.0, 777.7, 12_345.6, times[-1], 2 * times[-1]):
        exact = np.count_nonzero(times <= moment)
        assert histogram.until(moment) == pytest.approx(exact, abs=20), moment
    assert histogram.until(times[-1] * 2) == 20_000


def test_refusals_are_counted_by_reason():
    timeline = by_hand()
    assert summarize(timeline)["refusals"] == {}
    for name, error in {
        "e": "the queue has no room for request 'e': need 1 requests, have 0; try again later",
        "f": 'the queue has no room for request "f\'s": need 1 requests, have 0; try again in about 2 s',
        "g": "tenant 'x' has asked for as much as it may for now: need 9 tokens, have 3; try again in 1 s",
    }.items():
        timeline.requests[name] = RequestRecord(name, 1.2, 5, finish_time=1.2, finish_reason="refused", error=error)
    summary = summarize(timeline)
    assert summary["refusals"] == {
        "the queue has no room for request": 2,
        "tenant has asked for as much as it may for now": 1,
    }
    assert summary["num_finished"]["refused"] == 3 and summary["ttft_ms"] == summarize(by_hand())["ttft_ms"]
    assert summary["prefix_hit_rate"] == 3 / 11  # who was never let in had no prompt to look up


def test_goodput_of_classes():
    timeline = by_hand()
    found = goodput(timeline, ttft_ms=460, classes={"paid": {"ttft_ms": 501, "tpot_ms": 201}})
    assert found["num_good"] == 2 and found["num_requests"] == 4 and found["objective"] == {"ttft_ms": 460}
    paid, interactive = found["classes"]["paid"], found["classes"]["interactive"]
    assert paid == {
        "objective": {"ttft_ms": 501, "tpot_ms": 201},
        "num_good": 1,
        "num_requests": 1,
        "good_share": 1.0,
        "goodput_per_s": pytest.approx(1 / 1.75),
    }
    assert interactive["objective"] == {"ttft_ms": 460}
    assert (interactive["num_good"], interactive["num_requests"]) == (1, 2)
    assert found["classes"]["priority 5"]["good_share"] == 0
    # b, of a class without an objective, is good by having ended; a is too slow for its own.
    found = goodput(timeline, classes={"paid": {"tpot_ms": 199}, "batch": {"ttft_ms": 1}})
    assert found["num_good"] == 1 and found["classes"]["paid"]["num_good"] == 0
    assert found["classes"]["batch"]["num_requests"] == 0 and found["classes"]["batch"]["good_share"] is None
    with pytest.raises(InvalidParameter, match="at least one objective"):
        goodput(timeline, classes={"paid": {}})
    with pytest.raises(InvalidParameter, match="unknown objective 'ttft'; known: ttft_ms"):
        goodput(timeline, classes={"paid": {"ttft": 4}})
    with pytest.raises(InvalidParameter, match="tpot_ms must be a number above 0"):
        goodput(timeline, classes={"paid": {"tpot_ms": 0}})


def test_slice_counts_only_what_happened_in_it():
    part = summarize(by_hand().slice(1, 3))  # 1.5 to 1.9; the tokens at 1.5 belong to the step before
    assert part["makespan_s"] == pytest.approx(0.4)
    assert part["num_output_tokens"] == 3  # a at 1.6 and 1.9, c at 1.9
    assert part["num_prompt_tokens"] == 4
    assert part["requests_per_s"] == pytest.approx(1 / 0.4)  # a at 1.9; b ended at 1.5
    assert part["slot_occupancy"] == pytest.approx(3 / 6)


def test_goodput():
    timeline = by_hand()
    assert goodput(timeline, ttft_ms=499)["num_good"] == 1  # b
    both = goodput(timeline, ttft_ms=501, tpot_ms=200.1)
    assert both["num_good"] == 2 and both["goodput_per_s"] == pytest.approx(2 / 1.75)
    assert both["good_share"] == pytest.approx(0.5) and both["objective"] == {"ttft_ms": 501, "tpot_ms": 200.1}
    assert goodput(timeline, tpot_ms=199)["num_good"] == 1  # b has one token: no gap to be late
    assert goodput(timeline, itl_p99_ms=297)["num_good"] == 1  # a's gaps: 100, 300 → p99 is 298
    assert goodput(timeline, itl_p99_ms=298.1)["num_good"] == 2
    assert goodput(timeline, e2el_ms=10_000)["num_good"] == 2  # the aborted and the unfinished one are never good


def test_cost():
    price = cost(by_hand(), 7.2)  # 1.75 s at 7.20 an hour: 0.0035
    assert price["cost_total"] == pytest.approx(0.0035)
    assert price["cost_per_million_output_tokens"] == pytest.approx(0.0035 / 6 * 1e6)
    assert price["cost_per_request"] == pytest.approx(0.0035 / 2)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "2", True])
def test_bad_prices_and_objectives_get_a_sentence(value):
    with pytest.raises(InvalidParameter, match="price_per_hour must be a number above 0"):
        cost(by_hand(), value)
    with pytest.raises(InvalidParameter, match="ttft_ms must be a number above 0"):
        goodput(by_hand(), ttft_ms=value)


def test_goodput_needs_an_objective_and_a_whole_run():
    with pytest.raises(InvalidParameter, match="at least one objective"):
        goodput(by_hand())
    with pytest.raises(InvalidParameter, match=r"whole run.*steps 1 to 2"):
        goodput(by_hand().slice(1, 3), ttft_ms=5)
    with pytest.raises(InvalidParameter, match="whole run"):
        cost(by_hand().slice(1, 3), 1.0)


def test_empty_run_has_no_nan():
    summary = summarize(Timeline("measured", {"max_num_seqs": 3, "block_size": 4}))
    text = json.dumps(summary, allow_nan=False)
    assert summary["ttft_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None, "n": 0}
    assert summary["output_tokens_per_s"] is None and summary["slot_occupancy"] is None
    assert "NaN" not in text


def test_one_sample_is_every_percentile():
    timeline = by_hand()
    timeline.requests = {"a": timeline.requests["a"]}
    assert summarize(timeline)["ttft_ms"] == pytest.approx({"mean": 500, "p50": 500, "p90": 500, "p99": 500, "n": 1})


@given(
    name=st.sampled_from(list(STRATEGIES)),
    n=st.integers(1, 25),
    seed=st.integers(0, 999),
    rate=st.floats(1, 500),
    slots=st.integers(1, 6),
    blocks=st.integers(12, 60),
)
def test_any_run_adds_up(name, n, seed, rate, slots, blocks):
    timeline = run(name, requests(n, seed, rate, longest=60), max_num_seqs=slots, num_blocks=12 * slots + blocks)
    s = summarize(timeline)
    json.dumps(s, allow_nan=False)
    assert s["num_finished"]["length"] == n == s["ttft_ms"]["n"] == s["e2el_ms"]["n"]
    assert s["itl_ms"]["n"] == s["num_output_tokens"] - n
    assert sum(s["slot_shares"].values()) == pytest.approx(1)
    assert s["slot_occupancy"] == pytest.approx(s["batch_fill"] * s["batch_efficiency"])
    assert s["slot_occupancy"] == pytest.approx(s["slot_shares"]["prefill"] + s["slot_shares"]["decode"])
    assert s["padding_share"] == pytest.approx(s["padding_prompt_share"] + s["padding_finished_share"])
    assert 0 <= s["padding_share"] < 1 and 0 < s["slot_occupancy_time"] <= 1 + 1e-12 and 0 < s["busy_share"] <= 1 + 1e-9
    if name in ("continuous", "chunked", "solo"):
        assert s["padding_share"] == 0 and s["slot_shares"]["finished"] == 0
    for request in timeline.requests.values():
        assert metrics.queue_time(request) <= metrics.ttft(request) <= metrics.e2el(request) + 1e-12
        if metrics.tpot(request) is not None:
            whole = metrics.ttft(request) + metrics.tpot(request) * (len(request.token_times) - 1)
            assert whole == pytest.approx(metrics.e2el(request))
    assert all(s[k]["p50"] <= s[k]["p90"] <= s[k]["p99"] for k in ("queue_ms", "ttft_ms", "e2el_ms"))


def test_gpu_figures_by_hand():
    timeline = by_hand()  # from 1.0 to 2.75, 6 output tokens
    timeline.device_samples = [
        DeviceSample(0.5, 0.1, 9 << 30, 40.0),  # before the first arrival: only where the line to the next begins
        DeviceSample(1.5, 0.2, 1 << 30, 140.0),
        DeviceSample(2.0, None, None, None),
        DeviceSample(2.5, 0.6, 3 << 29, 340.0),
        DeviceSample(3.0, 1.0, 1 << 30, 240.0),  # taken as the run ended
    ]
    joules = (90 + 140) / 2 * 0.5 + (140 + 340) / 2 * 1.0 + (340 + 290) / 2 * 0.25
    summary = summarize(timeline)
    assert summary["gpu_busy_share"] == pytest.approx(0.6) and summary["gpu_memory_peak_gib"] == 1.5
    assert summary["gpu_power_w"] == pytest.approx(joules / 1.75)
    assert summary["joules_per_output_token"] == pytest.approx(joules / 6)
    assert set(summary) - set(summarize(by_hand())) <= set(DEFINITIONS)


def test_energy_is_not_guessed_for_what_was_not_sampled():
    timeline = by_hand()
    timeline.device_samples = [DeviceSample(1.0, None, None, 100.0), DeviceSample(2.5, None, None, 300.0)]
    summary = summarize(timeline)  # 1.5 of 1.75 seconds
    assert summary["gpu_power_w"] == pytest.approx(200) and summary["joules_per_output_token"] is None
    assert summary["gpu_busy_share"] is None and summary["gpu_memory_peak_gib"] is None
    timeline.device_samples = [DeviceSample(1.2, 0.5, 1 << 30, 100.0)]
    assert summarize(timeline)["gpu_power_w"] is None
    timeline.device_samples = []
    assert "gpu_power_w" not in summarize(timeline)


MOMENTS = st.floats(0, 10).map(lambda seconds: round(seconds, 6))


@given(st.lists(st.tuples(MOMENTS, st.floats(0, 800)), min_size=1, max_size=20), MOMENTS, MOMENTS)
def test_mean_power_lies_between_the_samples(points, start, end):
    samples = [DeviceSample(moment, None, None, watts) for moment, watts in sorted(points)]
    power, seconds = mean_power(samples, start, end)
    first, last = samples[0].time, samples[-1].time
    assert seconds == pytest.approx(max(0.0, min(end, last) - max(start, first)))
    if power is None:
        assert seconds == 0
    else:
        watts = [watts for _, watts in points]
        assert min(watts) - 1e-6 <= power <= max(watts) + 1e-6
