"""Workloads as objects, generators and fitted profiles."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.errors import UnknownName, WorkloadError
from minibatcher.workload import (
    Workload,
    WorkloadRequest,
    arrival_times,
    bimodal,
    load_workload,
    lognormal,
    longtail,
    profile,
    profiles,
    uniform,
    workload_names,
)
from minibatcher.workload.fit import ABOUT, fit_profile, main, prefix_hit_ratio

TRACES = {
    "azure-conv": "azure-llm-2023/AzureLLMInferenceTrace_conv.csv",
    "azure-code": "azure-llm-2023/AzureLLMInferenceTrace_code.csv",
    "mooncake-conv": "mooncake-fast25/conversation_trace.jsonl",
}


def lengths(workload):
    return np.array([(r.prompt_tokens, r.output_tokens) for r in workload]).T


def times(workload):
    return np.array([r.arrival_time for r in workload])


def of_lengths(pairs, **fields):
    requests = (WorkloadRequest(f"r{i}", float(i), p, o, **fields) for i, (p, o) in enumerate(pairs))
    return Workload("w", tuple(requests), "Made by a test.")


# Workload


@pytest.mark.parametrize("arrival", [-1.0, math.nan, math.inf, "1", None])
def test_bad_arrival(arrival):
    with pytest.raises(WorkloadError, match="arrival_time must be a finite number of seconds, 0 or more"):
        WorkloadRequest("a", arrival, 1, 1)


@pytest.mark.parametrize("tokens", [0, -3, math.nan, math.inf, 2.0, "5", 2**31])
def test_bad_length(tokens):
    with pytest.raises(WorkloadError, match="prompt_tokens must be a whole number"):
        WorkloadRequest("a", 0.0, tokens, 1)
    with pytest.raises(WorkloadError, match="output_tokens must be a whole number"):
        WorkloadRequest("a", 0.0, 1, tokens)


@pytest.mark.parametrize("priority", ["high", None, True, 1.0, 10**9 + 1, -(10**30)])
def test_bad_priority_and_tenant(priority):
    with pytest.raises(
        WorkloadError, match=r"priority must be a whole number \(int\), -1,000,000,000 to 1,000,000,000"
    ):
        WorkloadRequest("a", 0.0, 1, 1, priority=priority)
    with pytest.raises(WorkloadError, match="tenant must be a text, not None"):
        WorkloadRequest("a", 0.0, 1, 1, tenant=None)


def test_workload_sorts_and_refuses_nothing_and_twins():
    a, b, c = (WorkloadRequest(name, t, 1, 1) for name, t in (("a", 2.0), ("b", 1.0), ("c", 1.0)))
    assert Workload("w", (a, b, c), "").requests == (b, c, a)
    with pytest.raises(WorkloadError, match="'w' has no requests"):
        Workload("w", (), "")
    with pytest.raises(WorkloadError, match="'b' occurs twice"):
        Workload("w", (a, b, c, b), "")
    late = WorkloadRequest("late", 1.7e9, 1, 1)
    with pytest.raises(WorkloadError, match=r"'w' arrives 1.7e\+09 s after the start; a year is the most"):
        Workload("w", (a, late), "")


def test_summary():
    figures = of_lengths([(10, 1), (20, 2), (60, 6)]).summary()
    assert figures["num_requests"] == 3
    assert figures["prompt_tokens"] == {
        "mean": 30,
        "p50": 20,
        "p90": pytest.approx(52),
        "p99": pytest.approx(59.2),
        "max": 60,
    }
    assert (figures["arrival_rate"], figures["arrival_cv"]) == (1, 0)
    json.dumps(figures, allow_nan=False)
    at_once = Workload("w", (WorkloadRequest("a", 0.0, None, None, "text"), WorkloadRequest("b", 0.0, 3, None)), "")
    assert at_once.summary() == {
        "num_requests": 2,
        "prompt_tokens": None,
        "output_tokens": None,
        "arrival_rate": None,
        "arrival_cv": None,
    }


def test_at_rate():
    workload = of_lengths([(1, 1), (2, 2), (3, 3)])
    assert times(workload.at_rate(4)).tolist() == [0, 0.25, 0.5]
    at_once = workload.at_rate(math.inf)
    assert times(at_once).tolist() == [0, 0, 0] and at_once.notes == ("all requests arrive at once",)
    again = at_once.at_rate(5.0, seed=3)
    assert 0 == times(again)[0] < times(again)[1] < times(again)[2]
    assert again.notes[-1] == "Poisson arrivals at 5/s"
    assert [r.prompt_tokens for r in again] == [1, 2, 3]
    for rate in (0, -1, math.nan, "5"):
        with pytest.raises(WorkloadError, match=r"request rate must be a number .* above 0"):
            workload.at_rate(rate)


token_counts = st.integers(1, 200_000)


@given(st.lists(st.tuples(token_counts, st.none() | token_counts), min_size=1, max_size=60), st.integers(2, 5000))
def test_fit_to_context(pairs, max_model_len):
    before = of_lengths(pairs)
    after = before.fit_to_context(max_model_len)
    assert [r.request_id for r in after] == [r.request_id for r in before]
    totals = [
        (old.prompt_tokens + (old.output_tokens or 1), new.prompt_tokens + (new.output_tokens or 1))
        for old, new in zip(before, after)
    ]
    for old, new in zip(before, after):
        assert 1 <= new.prompt_tokens <= old.prompt_tokens
        assert (new.output_tokens is None) == (old.output_tokens is None)
        assert new.output_tokens is None or 1 <= new.output_tokens <= old.output_tokens
    assert all(2 <= new <= max_model_len for _, new in totals)
    ordered = [new for _, new in sorted(totals)]
    assert all(later >= earlier - 2 for earlier, later in itertools.pairwise(ordered))  # order stays, but for rounding
    if max(old for old, _ in totals) <= max_model_len:
        assert after is before
    else:
        assert "lengths scaled by" in after.notes[-1]


def test_fit_to_context_says_what_it_did():
    workload = of_lengths([(1000, 100)] * 199 + [(9000, 900)], prefix_hashes=(1, 2))
    fitted = workload.fit_to_context(550)
    assert {(r.prompt_tokens, r.output_tokens) for r in fitted} == {(500, 50)}
    assert fitted.notes == (
        "lengths scaled by 0.5 to fit a context of 550 (prompt p50 1000 -> 500, output p50 100 -> 50); 1 still longer "
        "requests cut to the context; each prefix hash now stands for 256 tokens",
    )
    for bad in (1, -5, 10.0, math.nan):
        with pytest.raises(WorkloadError, match="max_model_len must be a whole number, 2 or more"):
            workload.fit_to_context(bad)


def test_fit_to_context_leaves_out_text_that_is_too_long():
    workload = Workload(
        "w", (WorkloadRequest("a", 0.0, 90, 9, "long"), WorkloadRequest("b", 0.0, 9, None, "short")), ""
    )
    fitted = workload.fit_to_context(50)
    assert [r.request_id for r in fitted] == ["b"]
    assert fitted.notes == ("1 of 2 requests left out: longer than a context of 50",)
    with pytest.raises(WorkloadError, match="No request of 'w' fits a context of 5 tokens"):
        workload.fit_to_context(5)
    with pytest.raises(WorkloadError, match="count_tokens"):
        Workload("w", (WorkloadRequest("a", 0.0, None, 9, "text"),), "").fit_to_context(50)


# Generators


def test_uniform_bounds_and_moments():
    prompt, output = lengths(uniform(20_000, prompt_min=5, prompt_max=9, output_min=40, output_max=40, seed=1))
    assert np.bincount(prompt)[5:] == pytest.approx([4000] * 5, rel=0.06) and prompt.max() == 9
    assert set(output) == {40}


def test_lognormal_moments():
    prompt, output = lengths(lognormal(40_000, prompt_mean=300, output_mean=80, cv=0.7, seed=1))
    for values, mean in ((prompt, 300), (output, 80)):
        assert values.mean() == pytest.approx(mean, rel=0.02)
        assert values.std() / values.mean() == pytest.approx(0.7, rel=0.04)
    assert abs(np.corrcoef(prompt, output)[0, 1]) < 0.02


def test_longtail_follows_its_law():
    prompt, output = lengths(longtail(40_000, prompt_mean=100, output_min=10, output_max=1000, alpha=1.2, seed=1))
    assert output.min() == 10 and 900 < output.max() <= 1000
    beyond = 100**-1.2
    for length in (20, 80, 400):
        expected = ((length / 10) ** -1.2 - beyond) / (1 - beyond)
        assert np.mean(output > length) == pytest.approx(expected, rel=0.1)
    assert prompt.mean() == pytest.approx(100, rel=0.02)


def test_bimodal_kinds():
    workload = bimodal(20_000, rag_share=0.25, seed=1)
    rag = np.array([r.tenant == "rag" for r in workload])
    assert rag.mean() == pytest.approx(0.25, abs=0.01) and {r.tenant for r in workload} == {"rag", "chat"}
    prompt, output = lengths(workload)
    means = [values[kind].mean() for kind in (rag, ~rag) for values in (prompt, output)]
    assert means == pytest.approx([640, 24, 32, 128], rel=0.03)


@pytest.mark.parametrize(
    ("arrivals", "cv", "expected"), [("poisson", 9.0, 1), ("gamma", 2.5, 2.5), ("gamma", 0.3, 0.3)]
)
def test_arrival_moments(arrivals, cv, expected):
    at = arrival_times(50_000, 7.0, arrivals, cv=cv, seed=2)
    gaps = np.diff(at)
    assert at[0] == 0 and (gaps >= 0).all()
    assert 1 / gaps.mean() == pytest.approx(7, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(1 if arrivals == "poisson" else cv, rel=0.05)


def test_all_at_once():
    assert not arrival_times(5, 3.0, "all-at-once").any()
    assert not arrival_times(5, math.inf, "gamma").any()


@pytest.mark.parametrize("name", workload_names())
def test_equal_seeds_repeat_and_shorter_is_a_prefix(name):
    long = load_workload(name, num_requests=12_345, seed=4, request_rate=2.0)
    assert long == load_workload(name, num_requests=12_345, seed=4, request_rate=2.0)
    for count in (1, 37, 10_001):
        short = load_workload(name, num_requests=count, seed=4, request_rate=2.0)
        assert short.requests == long.requests[:count]
    other = load_workload(name, num_requests=37, seed=5, request_rate=2.0)
    assert (lengths(other) != lengths(long)[:, :37]).any() and (times(other) != times(long)[:37]).any()
    faster = load_workload(name, num_requests=37, seed=4, request_rate=4.0)
    assert times(faster) == pytest.approx(times(long)[:37] / 2)
    assert (lengths(faster) == lengths(long)[:, :37]).all()


def test_specs():
    assert len(load_workload("uniform")) == 64
    spec = "lognormal:prompt_mean=50, output_mean=20,cv=0.5,arrivals=gamma,arrival_cv=3"
    assert load_workload(spec, num_requests=9, seed=2, request_rate=3.0) == lognormal(
        9, prompt_mean=50, output_mean=20, cv=0.5, seed=2, request_rate=3.0, arrivals="gamma", arrival_cv=3
    )
    assert load_workload("uniform:output_max=20,request_rate=5", num_requests=3) == uniform(
        3, output_max=20, request_rate=5
    )
    assert load_workload("azure-conv:arrivals=poisson", num_requests=3) == profile("azure-conv", 3, arrivals="poisson")
    assert not times(load_workload("azure-code", request_rate=math.inf)).any()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "azure_conv",
            r"Unknown workload 'azure_conv', and there is no such file. Did you mean 'azure-conv'\? Known: uni",
        ),
        (
            "zzz",
            r"no such file. Known: uniform, lognormal, longtail, bimodal, classes, tenants, shared-prefix, azure",
        ),
        ("z" * 5000, r"Unknown workload 'zzz.*zzz', and there is no such file"),
        ("no/such.csv", r"There is no workload file no.such.csv"),
        ("uniform:prompt=3", r"Unknown option 'prompt=3' of workload 'uniform'; known: prompt_min"),
        ("uniform:seed=3", r"Unknown option 'seed=3'"),
        ("uniform:prompt_min", r"Unknown option 'prompt_min'"),
        ("uniform:prompt_min=2.5", r"option prompt_min must be a whole number, not '2.5'"),
        ("uniform:prompt_min=9,prompt_max=3", r"prompt_min and prompt_max must be .* not 9 and 3"),
        ("uniform:output_min=0", r"output_min and output_max must be"),
        ("lognormal:cv=x", r"option cv must be a number, not 'x'"),
        ("lognormal:cv=nan", r"cv must be a finite number above 0, not nan"),
        ("lognormal:prompt_mean=-1", r"prompt_mean must be a finite number above 0, not -1.0"),
        ("longtail:output_min=600", r"output_min must lie between 1 and output_max, not 600 \(max 512\)"),
        ("longtail:alpha=inf", r"alpha must be a finite number above 0, not inf"),
        ("bimodal:rag_share=1.5", r"rag_share must lie between 0 and 1, not 1.5"),
        ("bimodal:rag_share=nan", r"rag_share must lie between 0 and 1"),
        ("uniform:arrivals=poisson", r"poisson arrivals need a finite request_rate"),
        ("uniform:arrivals=steady,request_rate=1", r"Unknown arrivals 'steady'; known: poisson, gamma, all-at-once"),
        ("uniform:arrivals=gamma,request_rate=1,arrival_cv=0", r"arrival_cv must be a finite number above 0"),
        ("azure-conv:request_rate=-2", r"request rate must be a number .* not -2.0"),
        ("uniform:request_rate=nan", r"request rate must be a number .* not nan"),
        ("uniform:request_rate=1e-300", r"1e-300 would be less than one request a year"),
        ("azure-conv:request_rate=1e-300", r"1e-300 would be less than one request a year"),
        ("uniform:request_rate=1e-7", r"last request of 'uniform' arrives .* a year is the most.* request rate"),
        ("lognormal:cv=1e200", r"cv must lie between 0.001 and 1,000, not at 1e\+200"),
        ("lognormal:prompt_mean=1e300", r"prompt_mean must lie between 0.0 and 2,147,483,647"),
        ("longtail:alpha=1e-300", r"alpha must lie between"),
        ("bimodal:cv=1e-200", r"cv must lie between"),
        ("uniform:arrivals=gamma,request_rate=1,arrival_cv=1e-200", r"arrival_cv must lie between"),
    ],
)
def test_bad_specs(spec, message, recwarn):
    with pytest.raises(WorkloadError, match=message):
        load_workload(spec)
    assert not recwarn.list  # the sentence alone


def test_bad_counts_and_seeds():
    for name in workload_names():
        for count in (0, -1, 2.5):
            with pytest.raises(WorkloadError, match="number of requests must be a whole number, 1 or more"):
                load_workload(name, num_requests=count)
        for seed in (-1, 0.5, None):
            with pytest.raises(WorkloadError, match="seed must be a whole number, 0 or more"):
                load_workload(name, seed=seed, request_rate=1.0)
    with pytest.raises(UnknownName, match="unknown profile 'x'; known: azure-code"):
        profile("x", 1)


# Profiles


def spearman(prompt, output):
    def ranks(values):
        return np.array([np.searchsorted(np.sort(values), values, side) for side in ("left", "right")]).mean(axis=0)

    return np.corrcoef(ranks(prompt), ranks(output))[0, 1]


@pytest.mark.parametrize("name", TRACES)
def test_profile_table_is_sound(name):
    table = profiles()[name]
    assert table["licence"] in ("CC BY 4.0", "Apache-2.0") and "20" in table["citation"] and "hour" in table["source"]
    levels = table["levels_percent"]
    assert levels[0] == 0 and levels[-1] == 100 and {50, 90, 99} <= set(levels) and levels == sorted(set(levels))
    rows = [table["prompt_tokens"]["quantiles"], table["output_tokens"]["quantiles"]]
    rows += [table["arrivals"]["gap_quantiles_s"]] * (table["arrivals"]["gap_quantiles_s"] is not None)
    for values in rows:
        assert len(values) == len(levels) and values == sorted(values) and values[0] >= 0
    assert -1 < table["spearman"] < 1 and table["arrivals"]["rate_per_s"] > 0


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("seed", [0, 1])
def test_profile_sample_agrees_with_its_table(name, seed):
    table = profiles()[name]
    workload = load_workload(name, num_requests=20_000, seed=seed)
    figures = workload.summary()
    for kind in ("prompt_tokens", "output_tokens"):
        quantiles = dict(zip(table["levels_percent"], table[kind]["quantiles"]))
        for level in (50, 90, 99):
            assert figures[kind][f"p{level}"] == pytest.approx(quantiles[level], rel=0.02)
        assert figures[kind]["mean"] == pytest.approx(table[kind]["mean"], rel=0.03)
        drawn = [getattr(r, kind) for r in workload]
        assert quantiles[0] <= min(drawn) and max(drawn) <= quantiles[100]
    assert figures["arrival_rate"] == pytest.approx(table["arrivals"]["rate_per_s"], rel=0.03)
    assert figures["arrival_cv"] == pytest.approx(table["arrivals"]["gap_cv"], rel=0.06)
    assert spearman(*lengths(workload)) == pytest.approx(table["spearman"], abs=0.03)
    assert table["licence"] in workload.source and table["citation"] in workload.source


@pytest.mark.parametrize("name", TRACES)
def test_profile_sample_agrees_with_the_rows(name, shared_dir):
    trace = load_workload(shared_dir / "traces" / TRACES[name])
    rows, sample = trace.summary(), load_workload(name, num_requests=20_000, seed=7)
    drawn = sample.summary()
    for kind in ("prompt_tokens", "output_tokens"):
        for figure in ("mean", "p50", "p90", "p99"):
            assert drawn[kind][figure] == pytest.approx(rows[kind][figure], rel=0.05), (kind, figure)
    assert drawn["arrival_rate"] == pytest.approx(rows["arrival_rate"], rel=0.05)
    assert spearman(*lengths(sample)) == pytest.approx(spearman(*lengths(trace)), abs=0.05)


def test_fit_gives_the_shipped_table(shared_dir, tmp_path):
    out = tmp_path / "profiles.json"
    assert main([*(f"{name}={shared_dir / 'traces' / path}" for name, path in TRACES.items()), "--out", str(out)]) == 0
    shipped = Path(__file__).parents[1] / "minibatcher" / "workload" / "profiles.json"
    assert out.read_bytes() == shipped.read_bytes()


def test_fit_recovers_a_known_workload():
    workload = lognormal(
        5000, prompt_mean=200, output_mean=50, request_rate=3.0, arrivals="gamma", arrival_cv=2, seed=1
    )
    table = fit_profile(workload)
    assert table["prompt_tokens"]["mean"] == pytest.approx(200, rel=0.05)
    assert table["spearman"] == pytest.approx(0, abs=0.04)
    assert table["arrivals"]["rate_per_s"] == pytest.approx(3, rel=0.1)
    assert table["arrivals"]["gap_cv"] == pytest.approx(2, rel=0.1)


def test_fit_sees_through_a_coarse_clock():
    even = lognormal(20_000, request_rate=5.0, arrivals="gamma", arrival_cv=0.5, seed=1)
    ticks = (WorkloadRequest(r.request_id, r.arrival_time // 4 * 4, 1, 1) for r in even)
    arrivals = fit_profile(Workload("w", tuple(ticks), ""))["arrivals"]
    assert arrivals["gap_quantiles_s"] is None and arrivals["clock_s"] == 4
    assert arrivals["gap_cv"] == pytest.approx(0.5, rel=0.15)


def test_fit_refuses_what_it_cannot_fit(tmp_path, capsys):
    with pytest.raises(WorkloadError, match="100 requests or more that arrive over time"):
        fit_profile(uniform(200))
    assert main(["no-equals-sign"]) == 2 and "Expected NAME=TRACE" in capsys.readouterr().err
    assert main([f"mine={tmp_path / 'none.csv'}"]) == 2 and "no workload file" in capsys.readouterr().err
    assert set(ABOUT) == set(profiles())


def test_prefix_hit_ratio():
    hashes = [(1, 2), (1, 2, 3), (4,)]
    requests = (WorkloadRequest(f"r{i}", 0.0, 512 * len(h), 1, prefix_hashes=h) for i, h in enumerate(hashes))
    assert prefix_hit_ratio(Workload("w", tuple(requests), "")) == pytest.approx(2 / 6, rel=1e-5)
    assert prefix_hit_ratio(uniform(3)) is None
    assert profiles()["mooncake-conv"]["prefix_hit_ratio"] == pytest.approx(0.366, abs=0.001)
