"""`minibatcher bench`: orders, pairs, what peers may get wrong, and what is kept when a run is cut short."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from minibatcher.bench.bound import bound_s, share_of_bound  # noqa: E402
from minibatcher.bench.figures import WrongAnswer, check_served, figures, output_hashes  # noqa: E402
from minibatcher.bench.job import Clock, Job, JobRequest, Served  # noqa: E402
from minibatcher.bench.load import make_job, prepare_model  # noqa: E402
from minibatcher.bench.process import ProcessFailed, _others_share, ask  # noqa: E402
from minibatcher.bench.report import results  # noqa: E402
from minibatcher.bench.run import Peer, measure_rates, order  # noqa: E402
from minibatcher.bench.table import number  # noqa: E402
from minibatcher.cli import main  # noqa: E402
from minibatcher.errors import WorkloadError  # noqa: E402
from minibatcher.hardware import ModelSpec  # noqa: E402
from minibatcher.workload import Workload, WorkloadRequest, load_workload  # noqa: E402

TESTS = Path(__file__).parent
FAKE, OTHER = "bench_peers.fake", "bench_peers.other"
SMALL = ["--num-requests", "5", "--threads", "1", "--quiet"]
JOB = Job("folder", "float32", 2, [JobRequest("a", 0.0, [1, 2], 3), JobRequest("b", 0.5, [3], 1)])
RIGHT = {"a": ([5, 6, 7], [0.1, 0.2, 0.4]), "b": ([8], [0.6])}


@pytest.fixture
def bench(monkeypatch, capsys, tmp_path):
    """Runs the command on fake peers; gives its exit code, what it printed, and its JSON."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))

    def bench(*args, peers=(FAKE, OTHER)):
        out = tmp_path / "out.json"
        code = main(["bench", *SMALL, "--peers", *peers, "--json", str(out), *map(str, args)])
        return code, capsys.readouterr(), json.loads(out.read_text(encoding="utf-8")) if out.exists() else None

    return bench


def test_jobs_and_answers_cross_a_process_boundary():
    job = replace(JOB, warm_up=[JobRequest("w", 0.0, [4], 1)], settings={"x": [1]})
    assert Job.from_json(job.to_json()) == job
    served = Served(RIGHT, {"load_s": 1.5})
    assert Served.from_json(served.to_json()) == served


def test_the_clock_counts_from_its_start_and_waits():
    clock = Clock()
    clock.start()
    clock.wait_until(0.02)
    assert 0.02 <= clock.now() < 2
    clock.wait_until(-1)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_nobody_is_always_first_and_everybody_runs_in_each_round(count):
    peers = [Peer(str(i), "m") for i in range(count)]
    rounds = [order(peers, index) for index in range(2 * count)]
    assert all(sorted(p.name for p in one) == [p.name for p in peers] for one in rounds)
    assert sorted(one[0].name for one in rounds) == sorted([p.name for p in peers] * 2)
    assert count == 1 or rounds[0] == rounds[1][::-1] != rounds[1]


WRONG = {
    "lost": ({"a": RIGHT["a"]}, "1 of 2 requests got no answer: b"),
    "unknown": ({**RIGHT, "c": ([1], [1.0])}, "requests that nobody sent: c"),
    "short": ({**RIGHT, "a": ([5, 6], [0.1, 0.2])}, "request a got 2 tokens, and 3 were forced"),
    "long": ({**RIGHT, "b": ([5, 6], [0.6, 0.7])}, "request b got 2 tokens, and 1 were forced"),
    "times": ({**RIGHT, "a": ([5, 6, 7], [0.1, 0.2])}, "request a got 2 times of tokens, and 3 were forced"),
    "falling": ({**RIGHT, "a": ([5, 6, 7], [0.1, 0.3, 0.2])}, "the times of request a fall"),
    "nan": ({**RIGHT, "a": ([5, 6, 7], [0.1, math.nan, 0.2])}, "are no numbers"),
    "early": ({**RIGHT, "b": ([8], [0.4])}, "request b got its first token 0.1 s before it arrived"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_answer_that_is_not_the_work_asked_for_is_told(case):
    served, sentence = WRONG[case]
    with pytest.raises(WrongAnswer, match=sentence):
        check_served(JOB, Served(served))
    check_served(JOB, Served(RIGHT))


def test_figures_by_hand():
    found = figures(JOB, Served(RIGHT))
    assert found["seconds"] == pytest.approx(0.6)
    assert found["output_tokens_per_s"] == pytest.approx(4 / 0.6)
    assert found["total_tokens_per_s"] == pytest.approx(7 / 0.6)
    assert found["ttft_ms"]["p50"] == pytest.approx(100) and found["ttft_ms"]["n"] == 2
    assert found["itl_ms"]["mean"] == pytest.approx(150) and found["itl_ms"]["n"] == 2
    assert found["e2el_ms"]["mean"] == pytest.approx(250)
    late = replace(JOB, requests=[replace(r, arrival_s=r.arrival_s + 2) for r in JOB.requests])
    shifted = figures(late, Served({name: (ids, [t + 2 for t in times]) for name, (ids, times) in RIGHT.items()}))
    assert shifted["seconds"] == pytest.approx(0.6) and shifted["ttft_ms"]["p50"] == pytest.approx(100)


def test_outputs_have_hashes_where_they_are_told():
    hashes = output_hashes(Served(RIGHT))
    assert hashes.keys() == {"a", "b"} and hashes["a"] != hashes["b"]
    assert output_hashes(Served(RIGHT, {"ids": False})) is None


def test_the_bound_by_hand():
    spec = ModelSpec("m", 2, 8, 16, 2, 1, 4, 32, 64, tie_word_embeddings=True)
    rates = {"bandwidth": 1000.0, "flops": 4000.0}
    weights = 2 * (8 * (2 * 8 + 2 * 4) + 3 * 8 * 16) + 8 * 32  # two layers and the head
    decode = [2, 2, 10, 0.5]  # two rows of one token; contexts of ten tokens in all
    kv = 10 * 2 * 4 * 2 * 4  # K and V of one head of four, two layers, four bytes
    assert bound_s([decode], spec, "float32", rates) == pytest.approx((weights * 4 + kv) / 1000)
    prefill = [100, 1, 100, 2.0]
    flops = 2 * (100 * (weights - 8 * 32) + 8 * 32) + 4 * 2 * 2 * 4 * 199
    assert bound_s([prefill], spec, "float32", rates) == pytest.approx(flops / 4000)
    both = share_of_bound([decode, prefill], spec, "float32", rates, seconds=100.0)
    assert both["of_run"] == pytest.approx(both["bound_s"] / 100) and both["num_steps"] == 2
    assert both["of_steps"] == pytest.approx(both["bound_s"] / 2.5)


def test_pairs_are_of_the_same_round():
    peers = [Peer("x", "m", "X"), Peer("y", "m", "Y")]

    def run(peer, index, speed, others=0.0):
        row = {"peer": peer, "round": index, "failure": None, "output_hashes": {"a": "1", "b": str(index)}}
        return row | {"figures": {"output_tokens_per_s": speed}, "usage": {"others_share": others}}

    failed = {"peer": "y", "round": 3, "failure": "it fell over"}
    runs = [run("x", 0, 10.0), run("y", 0, 5.0), run("y", 1, 20.0, 0.5), run("x", 1, 60.0), run("x", 2, 9.0), failed]
    data = results(peers, runs, ["x", "y"], missing={})
    assert next(iter(data)) == "schema" and list(data).index("ratios") < list(data).index("figures")
    speed = data["ratios"]["x"]["y"]["output_tokens_per_s"]
    assert speed == {"median": 2.5, "min": 2.0, "max": 3.0, "values": [2.0, 3.0]}
    assert data["ratios"]["y"]["x"]["output_tokens_per_s"]["values"] == [0.5, 1 / 3]
    assert data["ratios"]["x"]["y"]["ttft_p99_ms"] is None
    assert data["outputs_equal"] == {"x": {"equal": 1, "of": 2}, "y": {"equal": 1, "of": 2}}
    assert data["failures"] == {"y": "it fell over"} and len(data["runs"]) == 6
    (warning,) = data["warnings"]
    assert "more than 5% of the processors in 1 of 5 runs (most: 50%, Y, round 2)" in warning
    assert not results(peers, runs[:2], ["x"], missing={})["warnings"]


@pytest.mark.parametrize("value, shown", [(0, "0"), (1.2345, "1.23"), (0.01234, "0.0123"), (56789.1, "56,789")])
def test_numbers_are_shown_with_three_digits(value, shown):
    assert number(value) == shown


def test_the_share_of_others_is_what_was_busy_beyond_our_own():
    ticks = os.sysconf("SC_CLK_TCK")
    assert _others_share((0, 0), (3 * ticks, 10 * ticks), 1.0) == pytest.approx(0.2)
    assert _others_share((0, 0), (3 * ticks, 10 * ticks), 5.0) == 0
    assert _others_share(None, (1, 1), 1.0) is None and _others_share((0, 0), (1, 1), None) is None


def test_ratios_come_from_alternating_pairs_in_fresh_processes(bench, tmp_path):
    log = tmp_path / "log.txt"
    args = ["--runs", 3, "--baseline", FAKE, "--set", f"{OTHER}.step_s=0.02", "--set", f"{FAKE}.me=f"]
    args += ["--set", f"{OTHER}.me=o", "--set", f"{FAKE}.log={log}", "--set", f"{OTHER}.log={log}"]
    code, printed, data = bench(*args)
    assert code == 0, printed.err
    assert log.read_text(encoding="utf-8").split() == list("foofof")
    assert data["ratios"][FAKE][OTHER]["output_tokens_per_s"]["values"] == pytest.approx([2.0] * 3)
    assert data["ratios"][FAKE][OTHER]["itl_p99_ms"]["median"] == pytest.approx(0.5)
    assert data["outputs_equal"][OTHER] == {"equal": 5, "of": 5}
    assert data["figures"][FAKE]["load_s"]["median"] == 2.5 and data["figures"][FAKE]["peak_rss_bytes"]["min"] > 2**20
    run = data["runs"][0]
    assert run["facts"]["warm_up"] == 5 and run["facts"]["environment"] == "1" == run["environment"]["OMP_NUM_THREADS"]
    facts = data["provenance"]
    assert facts["model"]["name"] == "bard" and facts["workload"]["num_requests"] == 5 and facts["software"]["torch"]
    assert facts["measured"]["date"] and facts["peers"][OTHER]["settings"]["step_s"] == 0.02
    assert "MEASURED" in printed.out and "fake engine / this one" in printed.out and "0.500" in printed.out


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ("one token short", "and 16 were forced"),
        ("raises", "ValueError: the weights are of cheese"),
        ("dies", "its process ended with code 3: last words"),
    ],
)
def test_a_failed_run_is_told_and_costs_no_other(bench, wrong, sentence):
    code, printed, data = bench("--runs", 2, "--set", f"{OTHER}.wrong={wrong}", "--workload", "uniform:output_max=16")
    assert code == 1
    assert sentence in printed.err and printed.err.startswith(f"minibatcher bench: {OTHER}: ")
    assert len(data["figures"][FAKE]["load_s"]["values"]) == 2 and OTHER not in data["figures"]
    assert sum(run["peer"] == OTHER for run in data["runs"]) == 1  # and it was not tried again
    assert sentence in data["failures"][OTHER] and data["ratios"] == {FAKE: {}}


def test_a_peer_that_hangs_is_stopped_with_its_descendants(bench, tmp_path):
    pid_file = tmp_path / "pid"
    args = ["--set", f"{OTHER}.wrong=hangs", "--set", f"{OTHER}.pid_file={pid_file}", "--timeout-s", 2, "--runs", 1]
    code, printed, data = bench(*args)
    assert code == 1 and "it was stopped after 2 s" in printed.err and FAKE in data["figures"]
    assert is_gone(int(pid_file.read_text(encoding="utf-8")))


def test_answers_that_differ_are_counted_and_secret_ones_are_not_compared(bench):
    code, printed, data = bench("--set", f"{OTHER}.wrong=one answer differs", "--runs", 1)
    assert code == 0 and data["outputs_equal"][OTHER] == {"equal": 4, "of": 5} and "4 of 5" in printed.out
    code, printed, data = bench("--set", f"{OTHER}.secret=true", "--runs", 1)
    assert code == 0 and data["outputs_equal"][OTHER] is None and "not told" in printed.out


def test_a_missing_peer_is_a_line(bench, capsys):
    missing = ["--set", f"{OTHER}.missing=It needs a sixth finger."]
    code, printed, data = bench(*missing, "--runs", 1)
    assert code == 0 and f"Not run: {OTHER}: It needs a sixth finger." in printed.out
    assert data["missing"] == {OTHER: "It needs a sixth finger."}
    assert main(["bench", "--list", "--peers", FAKE, OTHER, *missing]) == 0
    listed = capsys.readouterr().out
    assert f"{FAKE}: can run here (fake engine)" in listed and f"{OTHER}: It needs a sixth finger." in listed
    code, printed, _ = bench(*missing, peers=[OTHER])
    assert code == 2 and f"none of the peers can run here ({OTHER}: It needs a sixth finger.)" in printed.err
    code, printed, _ = bench(*missing, "--baseline", OTHER)
    assert code == 2 and "It needs a sixth finger." in printed.err


@pytest.mark.parametrize(
    "args, last, rate",
    [
        ([], 0, "inf"),
        (["--request-rate", "8"], 0.5, "8.0"),
        (["--request-rate", "own"], 4, "own"),
        (["--request-rate", "inf", "--workload", "longtail:request_rate=3"], 0, "inf"),
    ],
)
def test_arrivals_are_those_asked_for(bench, tmp_path, args, last, rate):
    file = tmp_path / "w.jsonl"
    rows = [{"prompt_tokens": 3, "output_tokens": 2, "arrival_time": i} for i in range(5)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    code, printed, data = bench("--workload", file, *args, "--runs", 1, peers=[FAKE])
    assert code == 0 and data["provenance"]["request_rate"] == rate
    assert data["provenance"]["workload"]["last_arrival_s"] == pytest.approx(last)
    assert ("all there at once" in printed.out) == (last == 0)


def test_lengths_that_were_cut_to_the_context_are_told(bench):
    cut = "uniform:prompt_min=5000,prompt_max=5000,output_min=20,output_max=20"
    code, printed, data = bench("--workload", cut, "--num-requests", 2, "--runs", 1, peers=[FAKE])
    (note,) = data["provenance"]["workload"]["notes"]
    assert code == 0 and "a context of 2,048" in note
    assert f"Workload: {note[:1].upper()}{note[1:]}." in " ".join(printed.out.split())


def test_a_workloads_own_rate_is_kept(bench):
    code, _, data = bench("--workload", "longtail:request_rate=3", "--runs", 1, peers=[FAKE])
    assert code == 0 and data["provenance"]["workload"]["last_arrival_s"] > 0.1


MISTAKES = {
    "unknown peer": (["--peers", "vlm"], "unknown peer 'vlm'; known: minibatcher:compiled"),
    "unknown variant": (["--peers", "minibatcher:quick"], "unknown peer 'minibatcher:quick'"),
    "variant of another": (["--peers", "vllm:plain"], "'vllm:plain': only minibatcher has variants"),
    "no interpreter": (["--python", f"{FAKE}=/no/python"], "'/no/python' is no program that can be run"),
    "setting of nobody": (["--set", "vllm.x=1"], "--set names 'vllm', which is not among the peers"),
    "setting without a value": (["--set", "vllm.x"], "'vllm.x' must be PEER.KEY=VALUE"),
    "no runs": (["--runs", "0"], "is not a whole number of at least 1"),
    "no such baseline": (["--baseline", "vllm"], f"the peers that can run here are {FAKE}"),
    "no such model": (["--model", "17M"], "no model '17M'"),
    "no such workload": (["--workload", "nothing"], "Unknown workload 'nothing'"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_get_a_sentence(case, monkeypatch, capsys):
    args, sentence = MISTAKES[case]
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    peers = [] if "--peers" in args else ["--peers", FAKE]
    try:
        code = main(["bench", *SMALL, *peers, *args])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2 and sentence in capsys.readouterr().err


def test_another_interpreter_sees_this_package_and_nothing_beside_it(bench):
    code, printed, _ = bench("--python", f"{OTHER}={sys.executable}", "--runs", 1)
    assert code == 1 and "No module named 'bench_peers'" in printed.err
    told, _ = ask(
        "minibatcher.bench.child",
        {"peer": "minibatcher", "ask": "about", "settings": {}},
        timeout_s=60,
        python=sys.executable,
    )
    assert told["title"] == "minibatcher"


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="the system does not tell")
def test_what_a_process_took_is_told():
    told, usage = ask("bench_peers.burn", {"seconds": 0.3}, timeout_s=60, env={"PYTHONPATH": str(TESTS)})
    assert told == "done" and usage.cpu_s >= 0.3 and usage.seconds >= 0.3 and usage.peak_rss_bytes > 2**20
    with pytest.raises(ProcessFailed, match=r"ended with code 1: .*No module named"):
        ask("bench_peers.nobody", {}, timeout_s=60)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has other signals")
def test_an_interrupt_keeps_what_was_done_and_leaves_nobody_behind(tmp_path):
    out, pid_file = tmp_path / "out.json", tmp_path / "pid"
    command = [sys.executable, "-m", "minibatcher", "bench", *SMALL, "--peers", FAKE, OTHER, "--json", str(out)]
    command += ["--set", f"{OTHER}.wrong=hangs", "--set", f"{OTHER}.pid_file={pid_file}"]
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text(encoding="utf-8")):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130 and "interrupted: the figures are those of the runs that were done" in err
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["interrupted"] and [run["peer"] for run in data["runs"]] == [FAKE] and FAKE in data["figures"]
    assert is_gone(int(pid_file.read_text(encoding="utf-8")))


def is_gone(pid: int) -> bool:
    """Ended, if perhaps not yet noted by whoever inherited it."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat")
            if state.exists() and state.read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z":
                return True
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_the_load_is_the_same_for_all(tmp_path):
    facts = prepare_model("bard", tmp_path / "model")
    assert facts["weights"] == "trained" and facts["context"] == 2048
    workload = load_workload("longtail", num_requests=100, seed=3, request_rate=2.0)
    job = make_job(workload, tmp_path / "model", dtype="float32", threads=1, seed=3)
    assert [len(r.prompt) for r in job.requests] == [r.prompt_tokens for r in workload]
    assert [r.output_tokens for r in job.requests] == [r.output_tokens for r in workload]
    assert job.requests[0].arrival_s == 0 < job.requests[-1].arrival_s
    assert not {0, 1, 2} & {token for r in job.requests for token in r.prompt}  # bard's special tokens
    assert len(job.warm_up) == 12 and all(r.output_tokens <= 4 and r.arrival_s == 0 for r in job.warm_up)
    assert job.warm_up[0].prompt == job.requests[0].prompt[::-1]
    assert make_job(workload, tmp_path / "model", dtype="float32", threads=1, seed=3) == job


def test_a_request_without_a_length_is_refused(tmp_path):
    prepare_model("bard", tmp_path / "model")
    open_ended = Workload("w", (WorkloadRequest("r0", 0.0, 5, None),), "Made by a test.")
    with pytest.raises(WorkloadError, match="request 'r0' of w names no output length"):
        make_job(open_ended, tmp_path / "model", dtype="float32", threads=1)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_ours_and_generate_give_the_same_tokens(monkeypatch, capsys, tmp_path):
    quick = functools.partial(measure_rates, seconds=0.05)
    monkeypatch.setattr("minibatcher.bench.benchmark.measure_rates", quick)
    out = tmp_path / "out.json"
    args = ["--num-requests", "4", "--workload", "uniform:prompt_max=24,output_min=3,output_max=6", "--threads", "1"]
    args += ["--peers", "minibatcher:plain", "transformers_generate", "--runs", "1", "--json", str(out), "--quiet"]
    assert main(["bench", *args]) == 0, capsys.readouterr().err
    data = json.loads(out.read_text(encoding="utf-8"))
    assert (
        list(data["ratios"]) == ["minibatcher:plain"] and data["titles"]["minibatcher:plain"] == "minibatcher (plain)"
    )
    assert data["outputs_equal"]["transformers_generate"] == {"equal": 4, "of": 4}
    assert data["ratios"]["minibatcher:plain"]["transformers_generate"]["output_tokens_per_s"]["median"] > 0
    share = data["figures"]["minibatcher:plain"]["bound_share_of_run"]["median"]
    assert 0 < share < 1 and data["bound"]["rates"]["bandwidth"] > 1e8
    assert "share of the bound" in capsys.readouterr().out
