"""What the commands say when memory or patience runs short: variants side by side, their costs, who was turned away."""

from __future__ import annotations

import argparse
import inspect
import json
import re

import pytest

from minibatcher.cli import main
from minibatcher.cli.options import choices, engine_options
from minibatcher.cli.pressure import shorten_memory
from minibatcher.errors import InvalidParameter
from minibatcher.hardware import device, model_spec
from minibatcher.limits import Limits, TenantLimit
from minibatcher.metrics import DEFINITIONS, summarize
from minibatcher.report import comparison, html, markdown, table
from minibatcher.runners.roofline import CostModel
from minibatcher.simulate import run_simulation
from minibatcher.timeline import RequestRecord, Timeline
from minibatcher.variants import make_variants, varied
from minibatcher.workload import Workload, WorkloadRequest, load_workload, profiles
from minibatcher.workload.generators import GENERATORS
from minibatcher.workload.mixes import MIXES

COST = CostModel(device("l4"), model_spec("llama-3.1-8b"))
SIMULATE = ["simulate", "--hardware", "l4", "--quiet"]


def test_columns_are_named_by_what_varies():
    assert make_variants(["static", "chunked", "static"]) == {
        "static": {"strategy": "static"},
        "chunked": {"strategy": "chunked"},
    }
    one = make_variants(["chunked"], {"admission": ["worst-case", "preempt"], "ordering": ["fcfs"]})
    assert one == {
        "worst-case": {"strategy": "chunked", "admission": "worst-case", "ordering": "fcfs"},
        "preempt": {"strategy": "chunked", "admission": "preempt", "ordering": "fcfs"},
    }
    assert varied(one) == ["admission"] and varied(make_variants(["static", "chunked"])) == []
    many = make_variants(["continuous", "chunked"], {"enable_prefix_caching": [False, True]})
    assert list(many) == [
        "continuous no prefix cache", "continuous prefix cache", "chunked no prefix cache", "chunked prefix cache",
    ]  # fmt: skip
    assert many["chunked prefix cache"] == {"strategy": "chunked", "enable_prefix_caching": True}


def test_variants_of_any_values():
    lists = make_variants(["chunked"], {"steps": [[1], [2], [1]], "ordering": ["fcfs"]})
    assert lists == {
        "[1]": {"strategy": "chunked", "steps": [1], "ordering": "fcfs"},
        "[2]": {"strategy": "chunked", "steps": [2], "ordering": "fcfs"},
    }
    assert varied(lists) == ["steps"]
    with pytest.raises(InvalidParameter, match=r"ordering needs a list of values, as \['fcfs'\], not 'fcfs'"):
        make_variants(["chunked"], {"ordering": "fcfs"})
    with pytest.raises(InvalidParameter, match=r"not \[\]"):
        make_variants([])
    with pytest.raises(InvalidParameter, match="two variants would be called '1'"):
        make_variants(["chunked"], {"seed": [1, "1"]})


def rows(*lengths: tuple[int, int | None]) -> Workload:
    return Workload("mine", tuple(WorkloadRequest(f"r{i}", 0.0, p, o) for i, (p, o) in enumerate(lengths)), "by hand")


def shortened(workload: Workload, options: dict, **given) -> tuple[int | None, str]:
    args = argparse.Namespace(
        **(
            {
                "admission": ("worst-case", "preempt"),
                "preemption": None,
                "declared_max_tokens": None,
                "max_model_len": None,
            }
            | given
        )
    )
    names = given.get("strategies", ["chunked"])
    return shorten_memory(args, workload, options, strategies=names, max_num_seqs=4, max_model_len=100, max_tokens=9)


def test_memory_is_short_where_admission_policies_are_compared():
    workload = rows((50, 10), (20, 40), (30, 30), (40, 20), (40, 20), (40, 20))  # 60 each, 40 declared
    options: dict = {}
    declared, sentence = shortened(workload, options)
    assert declared == 40 and options == {"kv_cache_tokens": 96}  # 0.4 * 4 * 60 = 96: more than 50 + 40
    assert "declare max_tokens 40, as far as their context goes, and use 23 on average" in sentence
    assert "KV pool of 96 tokens: 40 % of what 4 requests hold at their end" in sentence
    options = {}
    several = {"admission": None, "preemption": ("recompute", "swap")}  # who is preempted is told apart the same way
    assert shortened(workload, options, **several) == (declared, sentence) and options == {"kv_cache_tokens": 96}
    for single in ({"admission": ("preempt",)}, {"admission": None, "preemption": ("swap",)}):
        options = {}
        assert shortened(workload, options, **single) == (None, "") and options == {}
    options = {"block_size": 7}
    declared, sentence = shortened(workload, options, declared_max_tokens=70)  # the context leaves 50 and 80
    assert declared == 70 and options["kv_cache_tokens"] == 105  # 100 in whole blocks
    assert "what the largest request may ask for" in sentence
    options = {}
    shortened(workload, options, max_model_len=200, strategies=["static", "chunked"])
    assert options["kv_cache_tokens"] == 208  # a slot
    options = {}
    shortened(rows((50, None), (2, None)), options)  # outputs of at most 9 tokens
    assert options["kv_cache_tokens"] == 64


def test_memory_is_left_alone_otherwise():
    workload = rows((50, 10), (20, 40))
    options: dict = {}
    assert shortened(workload, options, admission=("preempt",)) == (None, "") and options == {}
    assert shortened(workload, options, admission=None) == (None, "") and options == {}
    options = {"kv_cache_tokens": 640}
    declared, sentence = shortened(workload, options)
    assert declared == 40 and options == {"kv_cache_tokens": 640} and "KV pool" not in sentence
    declared, sentence = shortened(workload, options, admission=None, declared_max_tokens=64)
    assert declared == 64 and sentence.startswith("Requests declare max_tokens 64")


def test_the_trade_of_admission_in_one_table(tmp_path, capsys):
    pytest.importorskip("torch")
    out, folder, page = tmp_path / "out.json", tmp_path / "runs", tmp_path / "page.html"
    args = ["compare", "--strategies", "chunked", "--admission", "worst-case,optimistic,preempt", "--quiet"]
    args += ["--num-requests", "24", "--max-num-seqs", "12", "--max-model-len", "200"]
    files = ["--json", str(out), "--timeline", str(folder), "--html", str(page), "--plot", str(tmp_path / "a.png")]
    assert main([*args, *files]) == 0
    printed, data = capsys.readouterr().out, json.loads(out.read_text())
    names = ["worst-case", "optimistic", "preempt"]
    assert list(data["strategies"]) == names and data["answers_identical"] is True
    assert data["num_answers_compared"] == 24 and "all runs gave identical tokens for each of 24" in printed
    worst, _, preempt = data["strategies"].values()
    assert worst["num_preemptions"] == 0 == worst["num_lost_tokens"] and worst["lost_share"] == 0
    assert preempt["num_preemptions"] > 0 and preempt["num_lost_tokens"] > 0
    assert preempt["kv_occupancy"]["blocks_of_pool"] > 1.1 * worst["kv_occupancy"]["blocks_of_pool"]
    assert preempt["num_steps"] < worst["num_steps"]
    text = " ".join(printed.split())
    assert "strategy chunked" in text and "Requests declare max_tokens" in text and "KV pool of" in text
    assert data["setting"] in text and "these are not the same" not in text
    lost = f"tokens computed again {worst['num_lost_tokens']:,} "
    assert lost in text and f"{preempt['num_lost_tokens']:,} of all tokens computed" in text
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.json" for name in names)
    for name in names:
        timeline = Timeline.load(folder / f"{name}.json")
        assert timeline.header["admission"] == name and timeline.header["declared_max_tokens"]
        assert {r.finish_reason for r in timeline.requests.values()} == {"stop", "length"}  # few use all they declare
        assert summarize(timeline)["num_lost_tokens"] == data["strategies"][name]["num_lost_tokens"]
    assert "worst-case" in page.read_text(encoding="utf-8") and data["setting"] in page.read_text(encoding="utf-8")


def test_labels_with_spaces_make_safe_file_names(tmp_path, capsys):
    args = ["--strategies", "chunked", "continuous", "--enable-prefix-caching", "off,on", "--workload", "uniform"]
    assert main([*SIMULATE, *args, "--num-requests", "4", "--timeline", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "chunked-no-prefix-cache.json", "chunked-prefix-cache.json",
        "continuous-no-prefix-cache.json", "continuous-prefix-cache.json",
    ]  # fmt: skip
    head = capsys.readouterr().out.split("─")[0].splitlines()[-3:]
    words = " ".join(head).split()
    assert [words.count(word) for word in ("chunked", "continuous", "prefix", "cache")] == [2, 2, 4, 4]
    assert max(map(len, head)) <= 96  # the names stand in several lines


def test_a_flag_alone_switches_prefix_caching_on(capsys):
    pytest.importorskip("torch")
    args = ["compare", "--workload", "shared-prefix", "--num-requests", "8", "--max-model-len", "256", "--quiet"]
    args += ["--strategies", "static", "chunked", "--enable-prefix-caching", "--json", "-"]
    assert main(args) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    static, chunked = data["strategies"].values()
    assert list(data["strategies"]) == ["static", "chunked"] and data["answers_identical"] is True
    assert static["num_cached_tokens"] == 0 and 0 < chunked["prefix_hit_rate"] < 1
    bound = chunked["header"]["prefix_bound"]
    assert chunked["num_cached_tokens"] <= bound["tokens"] < bound["of"] == chunked["num_prompt_tokens"]
    shown = [" ".join(line.split()) for line in captured.err.splitlines()]
    assert f"prompt tokens found in it – {100 * chunked['prefix_hit_rate']:.0f} %" in shown
    assert "static keeps KV in slots: no blocks to share, hence no prefix cache." in shown
    assert f"in a cache without end – {100 * bound['tokens'] / bound['of']:.0f} %" in shown


def test_orders_of_service_and_latency_of_classes(capsys):
    args = ["--strategies", "continuous", "--workload", "classes", "--num-requests", "150", "--max-num-seqs", "4"]
    args += ["--ordering", "fcfs,priority", "--request-rate", "inf", "--json", "-"]
    args += ["--slo-tpot-ms", "5000", "--slo", "paid:ttft=30000", "--slo", "paid:tpot=4000", "--slo", "batch:e2el=1"]
    assert main([*SIMULATE, *args]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    fcfs, priority = data["strategies"].values()
    assert list(fcfs["classes"]) == ["paid", "interactive", "batch", "background"]
    assert sum(group["n"] for group in fcfs["classes"].values()) == 150
    assert sum(group["output_share"] for group in fcfs["classes"].values()) == pytest.approx(1)
    assert priority["classes"]["paid"]["ttft_ms"]["p99"] < 0.7 * fcfs["classes"]["paid"]["ttft_ms"]["p99"]
    assert priority["goodput"]["classes"]["paid"]["objective"] == {"tpot_ms": 5000.0, "ttft_ms": 30000.0} | {
        "tpot_ms": 4000.0
    }
    assert priority["goodput"]["classes"]["batch"]["num_good"] == 0
    assert priority["goodput"]["classes"]["paid"]["good_share"] > fcfs["goodput"]["classes"]["paid"]["good_share"]
    text = captured.err
    assert "of paid requests: tpot ≤ 4000 ms, ttft ≤ 30000 ms" in text and "of interactive requests  " in text
    assert f"paid (n = {fcfs['classes']['paid']['n']})" in text and "TPOT by class" in text
    assert "by tenant" not in text  # each class is one tenant's
    assert "did the same work" not in text


def test_orders_that_make_no_difference_say_why(capsys):
    args = [
        *SIMULATE,
        "--strategies",
        "chunked",
        "--workload",
        "uniform",
        "--num-requests",
        "40",
        "--max-num-seqs",
        "4",
    ]
    assert main([*args, "--ordering", "fcfs,priority", "--request-rate", "inf"]) == 0
    assert "fcfs and priority served in the same order: all requests are of one class." in capsys.readouterr().out
    assert main([*args, "--admission", "worst-case,preempt", "--request-rate", "0.001", "--num-requests", "8"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "worst-case and preempt did the same work here: nobody waited (raise --request-rate; inf lets" in printed
    assert main([*args, "--preemption", "recompute,swap", "--kv-cache-tokens", "50000"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "recompute and swap did the same work here: nobody was preempted (lower --kv-cache-tokens)." in printed
    assert main([*args, "--preemption", "recompute,swap"]) == 0  # the pool is short where nobody says how long it is
    printed = " ".join(capsys.readouterr().out.split())
    assert "the same work" not in printed and "at their peak" in printed and "(--kv-cache-tokens)." in printed


def test_a_cache_that_found_nothing_says_so(capsys):
    args = [*SIMULATE, "--strategies", "static", "chunked", "--enable-prefix-caching", "off,on", "--num-requests", "20"]
    assert main([*args, "--workload", "uniform"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "prompt tokens found in it – – – 0 %" in printed and "in a cache without end" not in printed
    assert "No two prompts begin alike, so there is nothing to find in the prefix cache." in printed
    assert "static keeps KV in slots: no blocks to share, hence no prefix cache." in printed
    assert "Not the same in all runs: enable_prefix_caching" not in printed
    assert main([*args, "--workload", "shared-prefix"]) == 0
    assert "No two prompts" not in capsys.readouterr().out


def test_a_queue_too_short_for_a_burst_is_explained(capsys):
    args = [*SIMULATE, "--strategies", "chunked", "--workload", "uniform", "--num-requests", "30"]
    assert main([*args, "--max-waiting-requests", "20", "--request-rate", "inf"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "refused: queue full 10" in printed
        and "A full queue turned requests away although slots were free (10)" in printed
    )


def test_what_swapping_saves_and_what_it_copies(capsys):
    args = ["--strategies", "chunked", "--preemption", "recompute,swap", "--kv-cache-tokens", "4000", "--json", "-"]
    assert main([*SIMULATE, *args, "--workload", "longtail", "--num-requests", "100"]) == 0
    captured = capsys.readouterr()
    recompute, swap = json.loads(captured.out)["strategies"].values()
    assert recompute["num_lost_tokens"] > 0 == swap["num_lost_tokens"] and swap["num_preemptions"] > 0
    assert recompute["num_swapped_blocks"] == 0 < swap["num_swapped_blocks"]
    assert swap["num_swapped_blocks"] % 2 == 0  # all came back
    lines = [" ".join(line.split()) for line in captured.err.splitlines()]
    assert f"KV blocks swapped, out and in 0 {swap['num_swapped_blocks']:,}" in lines


def test_many_tenants_are_cut_to_the_largest(capsys):
    records = {
        f"r{i}": RequestRecord(f"r{i}", 0.0, 3, 1, 0.0, [0.5 + i], 0.5 + i, "length", tenant=f"t{i % 11}")
        for i in range(30)
    }
    timeline = Timeline("simulated", {"max_num_seqs": 4, "block_size": 4, "num_blocks": 8}, [], records)
    text = table(comparison({"one": timeline}))
    assert text.count("  t0 (n = 3)") == 1 and "  … and 3 more tenants, in the JSON" in text
    assert "t10" not in text and "by class" not in text  # t8, t9 and t10 have the fewest
    assert len(comparison({"one": timeline})["strategies"]["one"]["tenants"]) == 11


def test_refused_requests_are_told_by_reason(capsys):
    args = ["--strategies", "chunked", "--workload", "tenants", "--num-requests", "60", "--max-num-seqs", "8"]
    args += ["--max-waiting-requests", "25", "--tenant-limit", "*=20:2000", "--request-rate", "8", "--json", "-"]
    assert main([*SIMULATE, *args]) == 0
    captured = capsys.readouterr()
    run = json.loads(captured.out)["strategies"]["chunked"]
    refused = run["num_finished"]["refused"]
    assert refused == sum(run["refusals"].values()) > 0 and len(run["refusals"]) == 2
    assert run["num_finished"]["length"] + refused == 60
    lines = [" ".join(line.split()) for line in captured.err.splitlines()]
    sentences = "the queue has no room for request", "tenant has asked for as much as it may for now"
    queue, rate = (run["refusals"][sentence] for sentence in sentences)  # the JSON keeps them
    at = lines.index(f"Requests served to their end {run['num_finished']['length']}")
    assert sorted(lines[at + 1 : at + 3]) == [
        f"refused: queue full {queue}",
        f"refused: rate limit of its tenant {rate}",
    ]
    at = lines.index("Requests served / refused by tenant")
    for name, group in run["tenants"].items():
        assert f"{name} {group['num_served']} / {group['num_refused']}" in lines[at:]
        assert group["ttft_ms"]["n"] == group["num_served"] < group["n"] == group["num_served"] + group["num_refused"]
        assert any(line.startswith(f"{name} (n = {group['num_served']}) ") for line in lines)
    assert "aborted or unfinished" not in captured.err


def test_error_and_abort_have_rows_of_their_own():
    ends = ["length", "stop", "error", "error", "abort", None, "refused"]
    records = {
        f"r{i}": RequestRecord(
            f"r{i}", 0.0, 3, finish_time=1.0, finish_reason=end, error="x: need 1" if i == 6 else None
        )
        for i, end in enumerate(ends)
    }
    timeline = Timeline("measured", {"max_num_seqs": 4, "block_size": 4, "num_blocks": 8}, [], records)
    lines = [" ".join(line.split()) for line in table(comparison({"one": timeline})).splitlines()]
    at = lines.index("Requests served to their end 2")
    assert lines[at + 1 : at + 4] == ["refused: x 1", "ended by an error 2", "aborted or unfinished 2"]


def test_quiet_runs_have_no_rows_of_pressure(capsys):
    assert main([*SIMULATE, "--num-requests", "5", "--strategies", "static", "chunked"]) == 0
    text = capsys.readouterr().out
    for word in ("preempt", "again", "cache", "refused", "error", "by class", "by tenant", "declare"):
        assert word not in text, word
    assert " static" in text.splitlines()[3] and "relative to static" in text
    assert main([*SIMULATE, "--num-requests", "5", "--strategies", "chunked", "static"]) == 0
    assert "relative to chunked" in capsys.readouterr().out


def test_runs_are_measured_by_the_first():
    workload = load_workload("longtail", num_requests=12, seed=1).fit_to_context(200)
    variants = make_variants(["chunked"], {"ordering": ["shortest-prompt", "fcfs"]})
    runs = run_simulation(workload, COST, variants=variants, max_num_seqs=2)
    data = comparison(runs)
    assert "relative to shortest-prompt" in table(data) and data["differing"] == ["ordering"]
    assert "relative to shortest-prompt" in markdown(data) and "shortest-prompt" in html(data)
    both = comparison(
        run_simulation(workload, COST, variants=make_variants(["chunked", "static"], {"ordering": ["fcfs"]}))
    )
    assert "relative to chunked" in table(both)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
def test_running_sums_equal_the_timeline_under_pressure(preemption, caching):
    workload = load_workload("shared-prefix", num_requests=60, seed=2, request_rate=20.0).fit_to_context(400)
    mixed = tuple(
        WorkloadRequest(
            row.request_id, row.arrival_time, row.prompt_tokens, row.output_tokens, tenant=f"t{i % 3}", priority=i % 4,
            prefix_hashes=row.prefix_hashes, tokens_per_hash=row.tokens_per_hash,
        )
        for i, row in enumerate(workload)
    )  # fmt: skip
    limits = Limits(max_waiting_requests=30, tenants={"t1": TenantLimit(tokens_per_s=100, burst_tokens=3000)})
    options = {
        "variants": make_variants(["chunked"], {"preemption": [preemption], "enable_prefix_caching": [caching]}),
        "max_num_seqs": 8, "kv_cache_tokens": 800, "ordering": "priority", "limits": limits,
    }  # fmt: skip
    workload = Workload("mixed", mixed, "by hand")
    kept = run_simulation(workload, COST, **options)["chunked"]
    sums = run_simulation(workload, COST, keep_timeline=False, **options)["chunked"].summary()
    exact = summarize(kept)
    assert exact["num_preemptions"] > 0 and exact["refusals"] and (exact["num_cached_tokens"] > 0) is caching
    assert (exact["kv_occupancy"]["cached_of_pool"] > 0) is caching
    assert sums.keys() == exact.keys()
    assert (exact["num_swapped_blocks"] > 0) is (preemption == "swap")
    for key in exact:
        if key.startswith("num_") or key == "refusals":
            assert sums[key] == exact[key], key
    for key in ("lost_share", "prefix_hit_rate", "kv_occupancy", "queue_depth"):
        assert sums[key] == pytest.approx(exact[key]), key
    assert sum(group["num_refused"] for group in exact["tenants"].values()) == exact["num_finished"]["refused"]
    for key in ("classes", "tenants"):
        assert list(sums[key]) == list(exact[key]) and len(exact[key]) > 2
        for name, group in exact[key].items():
            assert sums[key][name].keys() == group.keys()
            for count in ("n", "num_served", "num_refused"):
                assert sums[key][name][count] == group[count]
            assert sums[key][name]["output_share"] == pytest.approx(group["output_share"], abs=2e-3)
            for latency in ("ttft_ms", "tpot_ms"):
                assert sums[key][name][latency] == pytest.approx(group[latency]), (key, name, latency)


def parsed(*args: str) -> argparse.Namespace:
    from minibatcher.cli.options import add_engine_options

    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return parser.parse_args(args)


def test_options_reach_the_engine():
    args = parsed(
        "--admission", "optimistic", "--watermark", "0.1", "--ordering", "priority,fcfs,priority", "--ageing-s", "5",
        "--preemption", "swap", "--swap-tokens", "640", "--enable-prefix-caching", "--max-waiting-tokens", "900",
        "--tenant-limit", "a=b=10", "--tenant-limit", "*=2:300",
    )  # fmt: skip
    limits = Limits(
        max_waiting_tokens=900,
        tenants={"a=b": TenantLimit(tokens_per_s=10), "*": TenantLimit(tokens_per_s=2, burst_tokens=300)},
    )
    assert engine_options(args) == {
        "admission": "optimistic", "watermark": 0.1, "ageing_s": 5.0, "preemption": "swap", "swap_tokens": 640,
        "enable_prefix_caching": True, "limits": limits,
    }  # fmt: skip
    assert choices(args) == {"ordering": ("priority", "fcfs")}
    assert engine_options(parsed("--enable-prefix-caching", "off")) == {"enable_prefix_caching": False}
    assert choices(parsed("--enable-prefix-caching", "off,on")) == {"enable_prefix_caching": (False, True)}


def test_generate_takes_what_makes_sense(capsys):
    pytest.importorskip("torch")
    args = ["generate", "ROMEO:", "ROMEO: O", "--max-tokens", "6", "--seed", "2", "--json", "-"]
    assert main(args) == 0
    plain = json.loads(capsys.readouterr().out)
    knobs = ["--enable-prefix-caching", "--ordering", "shortest-prompt", "--admission", "worst-case"]
    assert main([*args, *knobs, "--preemption", "swap", "--strategy", "chunked"]) == 0
    assert json.loads(capsys.readouterr().out) == plain


def test_a_queue_bound_does_not_turn_the_warm_up_away(capsys):
    pytest.importorskip("torch")
    args = ["compare", "--strategies", "chunked", "--num-requests", "3", "--max-model-len", "64", "--quiet"]
    assert main([*args, "--max-waiting-requests", "1", "--request-rate", "0.9", "--json", "-"]) == 0
    run = json.loads(capsys.readouterr().out)["strategies"]["chunked"]
    assert run["num_finished"] == {"stop": 0, "length": 3, "abort": 0}


BAD = [
    (["--admission", "eager"], "unknown admission 'eager'; known: worst-case, optimistic, preempt"),
    (["--ordering", "fcfs,lifo"], "unknown ordering 'lifo'; known: fcfs"),
    (["--preemption", ","], "',' must name one of recompute, swap"),
    (["--enable-prefix-caching", "maybe"], "unknown setting 'maybe'; known: off, on"),
    (["--watermark", "1"], "watermark must be a share from 0 to below 1"),
    (["--ageing-s", "0"], "'0' is not a number above 0"),
    (["--swap-tokens", "-1"], "whole number of at least 0"),
    (["--max-waiting-requests", "0"], "whole number of at least 1"),
    (["--tenant-limit", "a"], "'a' must be NAME=TOKENS_PER_S"),
    (["--tenant-limit", "=5"], "'=5' must be NAME=TOKENS_PER_S"),
    (["--tenant-limit", "a=x"], "'x' is not a number"),
    (["--tenant-limit", "a=-1"], "TOKENS_PER_S of 'a=-1' must be at least 0"),
    (["--tenant-limit", "a=5:0"], "BURST of 'a=5:0' must be at least 1 token"),
    (
        ["--workload", "tenants", "--tenant-limit", "mine=5"],
        "no request is of tenant 'mine'; tenants of this workload: tenant-0, tenant-1",
    ),
    (["--workload", "tenants:num_tenants=40", "--num-requests", "400", "--tenant-limit", "x=5"], ", …"),
    (
        ["--workload", "classes:payed_share=1"],
        "Unknown option 'payed_share=1' of workload 'classes'; known: paid_share, interactive_share, batch_share, cv,",
    ),
    (
        ["--workload", "tenants:prompt_mean=300,cv=0.001", "--tenant-limit", "tenant-1=3:350"],
        "asks for 364 tokens (prompt + max_tokens) at once, and the bucket of tenant 'tenant-1' holds 350; raise its "
        "BURST: --tenant-limit tenant-1=3:364",
    ),
    (
        ["--workload", "uniform", "--declared-max-tokens", "300", "--tenant-limit", "*=3:350"],
        "BURST: --tenant-limit def",
    ),
    (
        ["--workload", "tenants:prompt_mean=300,cv=0.001", "--max-waiting-tokens", "363"],
        "asks for 364 tokens (prompt + max_tokens), which alone is more than --max-waiting-tokens 363; raise it",
    ),
    (["--declared-max-tokens", "0"], "whole number of at least 1"),
    (["--slo", "vip:ttft=3"], "'vip:ttft=3' must be CLASS:ttft=MS,tpot=MS with a class of paid, interactive"),
    (["--slo", "paid"], "must be CLASS:ttft=MS"),
    (["--slo", "paid:"], "names no objective"),
    (["--slo", "paid:speed=3"], "'speed=3' must be an objective of ttft, tpot, itl_p99, e2el"),
    (["--slo", "paid:ttft=-3"], "'-3' is not a number above 0"),
    (["--slo", "paid:ttft=3", "--num-requests", "30000"], "every step, which is kept up to 10,000"),
]


@pytest.mark.parametrize("args, message", BAD, ids=[" ".join(args) for args, _ in BAD])
def test_bad_input_gets_a_sentence_and_exit_code_2(args, message, capsys):
    try:
        code = main([*SIMULATE, *args])
    except SystemExit as stop:  # argparse
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and error.count("\n") == 1 and error.startswith("minibatcher simulate: ")


def test_help_lists_each_workload_as_it_can_be_given(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    text = capsys.readouterr().out
    assert "(default: the workload's own; inf for one without)" in " ".join(text.split())
    whole = "".join(line.strip() if "=" in line else line for line in text.splitlines())
    for name in ("uniform", "lognormal", "longtail", "bimodal", "classes", "tenants", "shared-prefix"):
        spec = re.search(rf"{name}:[a-z_]+=[\w.,=]+(?=  )", whole).group()
        assert load_workload(spec, num_requests=5).requests == load_workload(name, num_requests=5).requests, spec
        parameters = dict(pair.split("=") for pair in spec.partition(":")[2].split(","))
        draw = (GENERATORS | MIXES)[name]
        own = set(inspect.signature(draw).parameters) - {
            "num_requests",
            "seed",
            "request_rate",
            "arrivals",
            "arrival_cv",
        }
        assert set(parameters) == own
    for name in profiles():
        assert name in text
    for example in ("tenants:flood=10", "shared-prefix:turns=2,arrivals=gamma,arrival_cv=2,request_rate=4"):
        assert example in text and len(load_workload(example, num_requests=5)) == 5


def test_help_and_definitions_teach(capsys):
    for command in ("compare", "simulate"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        for name in ("admission", "watermark", "ordering", "preemption", "find-capacity", "tenant-limit", "slo CLASS"):
            assert f"--{name}" in text, name
        assert DEFINITIONS["prefix_hit_rate"] in text and "(default: preempt)" in text
        assert "where nobody waits that long: in a short run try 2" in text
