"""The commands: what they print, what they write, and that bad input gets a sentence and exit code 2."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from minibatcher.cli import main, runs  # noqa: E402
from minibatcher.model.loader import load_model  # noqa: E402
from minibatcher.timeline import Timeline  # noqa: E402

LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2el_ms", "queue_ms")
SMALL = ["--num-requests", "6", "--max-num-seqs", "3", "--max-model-len", "160", "--quiet"]


def test_compare_prints_a_table_and_writes_all_it_says(tmp_path, capsys):
    out, plot, folder = tmp_path / "out.json", tmp_path / "slots.png", tmp_path / "timelines"
    names = ["solo", "static", "dynamic", "continuous", "chunked"]
    code = main(
        ["compare", *SMALL, "--strategies", *names, "--json", str(out), "--plot", str(plot), "--timeline", str(folder)]
    )
    printed = capsys.readouterr().out
    assert code == 0
    assert "MEASURED" in printed and "identical" in printed and all(name in printed for name in names)
    data = json.loads(out.read_text(encoding="utf-8"))
    assert list(data["strategies"]) == names and data["answers_identical"] is True
    hashes = set()
    for name, run in data["strategies"].items():
        assert run["output_tokens_per_s"] > 0
        for key in LATENCIES:
            assert {"mean", "p50", "p90", "p99"} <= set(run[key]) and run[key]["p99"] >= run[key]["p50"] >= 0
        assert 0 < run["slot_occupancy"] <= 1 and 0 <= run["padding_share"] < 1
        assert (run["padding_share"] > 0) == (name in ("static", "dynamic"))
        assert len(run["requests"]) == 6
        assert all(
            r["finish_reason"] == "length" and r["prompt_tokens"] and r["output_tokens"] for r in run["requests"]
        )
        hashes.add(tuple((r["id"], r["output_hash"]) for r in run["requests"]))
    assert len(hashes) == 1
    header = data["header"]
    assert header["model"] == "bard" and header["seed"] == 0 and header["workload"]["name"] == "azure-conv"
    assert header["software"]["torch"] == torch.__version__ and header["hardware"]["device"]
    assert data["measured"]["date"].endswith("+00:00") and data["measured"]["num_cpus"] == os.cpu_count()
    assert data["measured"].keys() == {"date", "git_commit", "load_average", "num_cpus"}
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000
    assert Timeline.load(folder / "chunked.json").header["strategy"] == "chunked"


def test_json_on_standard_output_is_nothing_but_json(capsys):
    assert main(["compare", *SMALL, "--strategies", "continuous", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)["strategies"]) == ["continuous"] and "MEASURED" in captured.err


def test_a_workload_file_keeps_its_own_arrivals_and_text(tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "ROMEO: O, she", "output_tokens": 5, "arrival_time": 0.0}\n'
        '{"prompt_tokens": 9, "output_tokens": 3, "arrival_time": 0.3}\n',
        encoding="utf-8",
    )
    args = ["--workload", str(path), "--strategies", "continuous", "--json", "-", "--quiet"]
    assert main(["compare", *args]) == 0
    run = json.loads(capsys.readouterr().out)["strategies"]["continuous"]
    assert [r["output_tokens"] for r in run["requests"]] == [5, 3] and run["makespan_s"] > 0.3


def test_generate_streams_one_prompt_and_batches_several(capsys, monkeypatch):
    assert main(["generate", "ROMEO:", "--max-tokens", "20", "--seed", "3"]) == 0
    streamed = capsys.readouterr().out
    assert streamed.startswith("ROMEO:") and len(streamed) > 12
    assert main(["generate", "ROMEO:", "JULIET:", "--max-tokens", "20", "--seed", "3", "--json", "-"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["prompt"] + first["text"] + "\n" != second["prompt"] + second["text"] + "\n"
    assert len(first["token_ids"]) <= 20 and first["finish_reason"] in ("stop", "length")
    assert (
        main(["generate", "ROMEO:", "--max-tokens", "5", "--temperature", "0", "--stop", "e", "--min-tokens", "1"]) == 0
    )


def test_same_command_same_text(capsys):
    texts = []
    for seed in ("7", "7", "8"):
        assert main(["generate", "HAMLET:", "--max-tokens", "25", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def generated(capsys, *args) -> list[str]:
    assert main(["generate", *args, "--max-tokens", "12", "--seed", "3", "--json", "-"]) == 0
    return [row["prompt"] + row["text"] for row in json.loads(capsys.readouterr().out)]


def test_a_prompt_has_the_same_text_streamed_alone_or_in_a_batch(capsys):
    assert main(["generate", "ROMEO:", "--max-tokens", "12", "--seed", "3"]) == 0
    streamed = capsys.readouterr().out.removesuffix("\n")
    assert generated(capsys, "ROMEO:") == [streamed]
    batch = generated(capsys, "ROMEO:", "ROMEO:", "--strategy", "static")
    assert batch[0] == streamed != batch[1]


@pytest.mark.parametrize("prompt", ["\ud800A", "\udcffA"])
def test_what_is_no_character_is_replaced(prompt, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xffA"), encoding="utf-8"))
    assert generated(capsys, prompt, "-", "--stop", prompt)[0].startswith("\ufffdA")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xffA"), encoding="utf-8"))
    assert generated(capsys, "-")[0].startswith("\ufffdA")


def test_an_interrupted_batch_prints_what_was_done_and_exits_with_130(capsys, monkeypatch):
    from minibatcher.engine import Engine

    step, steps = Engine._step, []

    def interrupted_step(engine):
        steps.append(step(engine))
        if len(steps) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return steps[-1]

    monkeypatch.setattr(Engine, "_step", interrupted_step)
    code = main(["generate", "ROMEO:", "JULIET:", "--max-tokens", "40", "--ignore-eos", "--json", "-"])
    captured = capsys.readouterr()
    assert code == 130 and "interrupted: the texts are what was done" in captured.err
    rows = json.loads(captured.out)
    assert [row["finish_reason"] for row in rows] == ["abort", "abort"]
    assert all(0 < len(row["token_ids"]) < 40 for row in rows)


QUICK = ["--workload", "uniform", "--num-requests", "3", "--max-model-len", "32", "--strategies", "continuous"]


@pytest.mark.parametrize(
    "workload, rate, gap",
    [
        ("uniform:request_rate=50", None, 1 / 50),
        ("uniform:arrivals=gamma,request_rate=50", None, 1 / 50),
        ("uniform:request_rate=3", "80", 1 / 80),
        ("uniform:prompt_max=20", None, 0),
        ("azure-conv", None, 0),
        ("azure-conv:request_rate=50", None, 1 / 50),
        ("azure-conv:arrivals=poisson", None, 1 / 5.38),
    ],
)
def test_a_workload_keeps_its_own_arrivals_unless_told(workload, rate, gap):
    args = argparse.Namespace(workload=workload, request_rate=rate and float(rate), num_requests=4000, seed=2)
    served = runs.read_workload(args, 48, float("inf"))
    assert served.requests[-1].arrival_time / 3999 == pytest.approx(gap, rel=0.1)


def test_rows_that_name_no_output_length_take_what_is_asked_for_or_left(tmp_path, capsys):
    path = tmp_path / "open.jsonl"
    path.write_text('{"prompt_tokens": 20}\n{"prompt_tokens": 55}\n{"prompt_tokens": 9, "output_tokens": 4}\n')
    lengths = {}
    for max_tokens in (["--max-tokens", "6"], []):
        args = ["--workload", str(path), "--max-model-len", "64", "--json", "-", "--strategies", "continuous", "static"]
        assert main(["compare", *args, *max_tokens]) == 0
        for run in json.loads(capsys.readouterr().out)["strategies"].values():
            lengths[tuple(max_tokens)] = [r["output_tokens"] for r in run["requests"]]
            assert all(r["prompt_tokens"] + r["output_tokens"] <= 64 for r in run["requests"])
    asked, left = lengths.values()
    assert asked[0] <= 6 and asked[1] <= 6 and asked[2] == left[2] == 4
    assert left[0] > 6


def test_arrivals_that_take_long_are_announced(tmp_path, capsys, monkeypatch):
    from minibatcher import compare

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run_comparison", stop)
    assert main(["compare", *QUICK, "--request-rate", "0.001", "--seed", "1"]) == 130
    assert re.search(r"requests of uniform arrive over \d+\.\d (minutes|hours)", capsys.readouterr().err)
    assert main(["compare", *QUICK, "--request-rate", "50"]) == 130
    assert "arrive over" not in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_one_output_that_fails_costs_no_other(tmp_path, capsys):
    plot, folder = tmp_path / "slots.svg", tmp_path / "runs"
    (folder / "continuous.json").mkdir(parents=True)
    code = main(["compare", *QUICK, "--json", "/dev/full", "--plot", str(plot), "--timeline", str(folder)])
    captured = capsys.readouterr()
    assert code == 2 and plot.stat().st_size > 1_000 and "MEASURED" in captured.out
    errors = captured.err.splitlines()
    assert [error for error in errors if "/dev/full" in error and "No space left" in error]
    assert [error for error in errors if "continuous.json" in error]


def test_no_leftovers_of_the_check_for_outputs(tmp_path):
    assert (
        main(["compare", "--json", str(tmp_path / "a.json"), "--timeline", str(tmp_path / "b"), "--model", "no"]) == 2
    )
    assert list(tmp_path.iterdir()) == []


def test_out_of_memory_is_a_sentence(capsys, monkeypatch):
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried …")):

        def fail(args, error=error):
            raise error

        monkeypatch.setattr("minibatcher.cli.compare.check_results", fail)
        assert main(["compare"]) == 2
        assert "not enough memory; lower" in capsys.readouterr().err
    monkeypatch.setattr("minibatcher.cli.compare.check_results", lambda args: [][0])
    with pytest.raises(IndexError):  # a bug stays a bug
        main(["compare"])


STREAMS = [
    ("compare {quick} --json x.json | true", 0, "", "x.json"),
    ("PYTHONIOENCODING=ascii compare {quick} --json x.json >/dev/null", 0, "", "x.json"),
    ("compare {quick} --json x.json >/dev/full", 2, "minibatcher compare: No space left on device\n", "x.json"),
    ("compare {quick} --json x.json 2>&-", 0, "", "x.json"),
    ("generate - <&-", 2, "minibatcher generate: - reads the prompt from standard input, and that is closed\n", None),
    ("generate X --max-tokens 2 >&-", 0, "", None),
]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("command, code, error, written", STREAMS)
def test_broken_streams(command, code, error, written, tmp_path):
    program = f"{sys.executable} -m minibatcher"
    command = re.sub(r"(compare|generate)", rf"{program} \1", command).format(quick=" ".join([*QUICK, "--quiet"]))
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (code, error)
    assert written is None or json.loads((tmp_path / written).read_text())["strategies"]


@pytest.mark.parametrize("given, threads", [([], 1), (["--threads", "2"], 2)])
def test_a_small_model_runs_on_one_thread_unless_told_otherwise(given, threads, capsys):
    before = torch.get_num_threads()
    try:
        assert main(["info", *given, "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["hardware"]["threads"] == threads == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def test_info_says_what_runs_where(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and "Model bard" in text and "Attention: " in text
    assert main(["info", "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"]["context"] == 2048 and facts["model"]["kv_bytes_per_token"] == 2 * 6 * 2 * 32 * 4


def test_info_says_what_a_report_of_a_bug_needs_and_whose_it_is_not(capsys, monkeypatch):
    home = str(Path(__file__).resolve().parents[1])  # as if the book were in somebody's home
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("MINIBATCHER_SOURCE", f"{home}/elsewhere")
    monkeypatch.setenv("CC", "/opt/cc")
    monkeypatch.setenv("COLAB_RELEASE_TAG", "1")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for words in (f"System: {platform.platform()}, ", " (Colab). minibatcher: ~/minibatcher", "C compiler: /opt/cc ("):
        assert words in text
    assert f"ipykernel {importlib.metadata.version('ipykernel')}" in text
    assert "MINIBATCHER_SOURCE=~/elsewhere" in text and home not in text
    assert main(["info", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert home not in json.dumps(told) and told["surroundings"]["memory_bytes"] > 2**28


@pytest.fixture
def broken(tmp_path) -> dict[str, str]:
    """Paths to model folders and workload files, each broken in its own way."""
    bard = Path(load_model("bard").source)
    paths = {}
    for name in ("no-config", "alien", "no-weights", "cut-weights"):
        folder = tmp_path / name
        shutil.copytree(bard, folder)
        paths[name] = str(folder)
    (tmp_path / "no-config" / "config.json").unlink()
    config = json.loads((tmp_path / "alien" / "config.json").read_text())
    config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (tmp_path / "alien" / "config.json").write_text(json.dumps(config))
    (tmp_path / "no-weights" / "model.safetensors").unlink()
    weights = tmp_path / "cut-weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    files = {
        "half.jsonl": '{"prompt_tokens": 5, "output_tokens": 2, "arrival_time": 0}\n{"prompt_tokens": 5, "outp',
        "negative.jsonl": '{"prompt_tokens": -5, "output_tokens": 2, "arrival_time": 0}\n',
        "nan.jsonl": '{"prompt_tokens": 5, "output_tokens": 2, "arrival_time": NaN}\n',
        "empty.jsonl": "",
        "late.jsonl": '{"prompt_tokens": 1, "arrival_time": 1e300}\n{"prompt_tokens": 1}\n',
        "open.jsonl": '{"prompt_tokens": 3}\n',
        "long.jsonl": '{"prompt": "%s", "output_tokens": 2, "arrival_time": 0}\n' % ("word " * 3000),
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        paths[name] = str(tmp_path / name)
    for name in ("folder", "folder.png"):
        (tmp_path / name).mkdir()
        paths[name] = str(tmp_path / name)
    return paths


POOL = ["--max-model-len", "400", "--kv-cache-tokens", "320"]
BAD = [
    (["compare", "--model", "no/such/model"], "no model 'no/such/model'"),
    (["compare", "--model", "{no-config}"], "config.json"),
    (["generate", "x", "--model", "{alien}"], "[Mm]amba.*supported.*[Ll]lama"),
    (["info", "--model", "{no-weights}"], "model.safetensors"),
    (["info", "--model", "{cut-weights}"], "model.safetensors"),
    (["compare", "--strategies", "orca"], "unknown strategy 'orca'; known: solo, static, dynamic, continuous, chunked"),
    (["compare", "--device", "cuda"], "finds no CUDA GPU here"),
    (["compare", "--device", "tpu"], "unknown device 'tpu'; known: auto, cpu, cuda"),
    (["compare", "--dtype", "int3"], "int3.*float32"),
    (["compare", "--attention", "magic"], "magic.*sdpa"),
    (["compare", "--num-requests", "0"], "'0' is not a whole number of at least 1"),
    (["compare", "--num-requests", "-3"], "whole number of at least 1"),
    (["compare", "--request-rate", "nan"], "'nan' is not a positive number"),
    (["compare", "--request-rate", "-1"], "'-1' is not a positive number"),
    (["compare", "--seed", "-1"], "'-1' is not a whole number of at least 0"),
    (["compare", "--batch-timeout-s", "nan"], "'nan' is not a number"),
    (["compare", "--max-queue-delay-s", "-1"], "max_queue_delay_s must be a number of seconds"),
    (["compare", "--workload", "no-such"], "no-such.*azure-conv"),
    (["compare", "--workload", "{half.jsonl}"], "line 2"),
    (["compare", "--workload", "{negative.jsonl}"], "line 1.*-5"),
    (["compare", "--workload", "{nan.jsonl}"], "line 1.*(NaN|nan)"),
    (["compare", "--workload", "{empty.jsonl}"], "no requests|empty"),
    (["compare", "--workload", "{long.jsonl}"], "context"),
    (["compare", "--max-model-len", "1"], "2 or more, not 1"),
    (["compare", "--max-model-len", "9999"], "above the context of bard, 2048"),
    (["compare", "--json", "/no/such/folder/out.json"], "does not exist"),
    (["compare", "--plot", "slots.txt"], "writes .png"),
    (["compare", "--json", "{folder}"], "is a folder, not a file"),
    (["compare", "--json", ""], "is a folder, not a file"),
    (["compare", "--json", "/proc/x"], "can't write '/proc/x'"),
    (["compare", "--json", "x" * 300], "File name too long"),
    (["compare", "--plot", "{folder.png}"], "is a folder, not a file"),
    (["compare", "--plot", "/no/such/folder/x.png"], "does not exist"),
    (["compare", "--timeline", "{empty.jsonl}"], "is no folder"),
    (["compare", "--timeline", ""], "needs a name"),
    (["generate", "x", "--json", "{folder}"], "is a folder, not a file"),
    (["info", "--json", "/no/such/folder/out.json"], "does not exist"),
    (["compare", "--strategies", ","], "names none"),
    (["compare", "--workload", "uniform:request_rate=nan"], "request rate must be a number .* not nan"),
    (["compare", "--workload", "uniform:arrivals=gamma"], "need a finite request_rate"),
    (["compare", "--request-rate", "1e-300"], "less than one request a year"),
    (["compare", "--workload", "{late.jsonl}"], "a year is the most"),
    (["compare", "--workload", "u" * 5000], "Unknown workload 'uuu"),
    (["compare", "--model", "m" * 5000], "File name too long"),
    (["compare", "--num-requests", str(10**12)], "more than 100,000"),
    (["simulate", "--num-requests", str(10**12)], "more than 10,000,000"),
    (["compare", "--max-num-seqs", str(10**12)], "more than 1,000,000"),
    (["compare", "--kv-cache-tokens", str(10**12)], "more than 1,000,000,000"),
    (["compare", "--block-size", str(10**8)], "more than 65,536"),
    (["compare", "--price-per-hour", "1e308"], "beyond 1,000,000,000"),
    (["compare", "--seed", "9" * 4000], "more than 9,223,372,036,854,775,807"),
    (["compare", "--workload", "{open.jsonl}", "--max-tokens", "300", "--kv-cache-tokens", "160",
      "--strategies", "chunked"], "need 19 blocks, have 10; lower max_tokens"),
    (["compare", *POOL, "--strategies", "chunked"], "need 25 blocks, have 20; .* kv_cache_tokens"),
    (["compare", *POOL], "need 400 tokens, have 320"),
    (["generate", "x " * 3000], "need .* tokens, have 2048"),
    (["generate", "x", "--max-tokens", "2100"], "lower max_tokens to"),
    (["generate", "x", "--temperature", "-1"], "temperature"),
    (["generate", "x", "--temperature", "nan"], "'nan' is not a number"),
    (["generate", "x", "--top-p", "0"], "top_p"),
    (["generate", "x", "--min-tokens", "9", "--max-tokens", "3"], "min_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("args, message", BAD, ids=[" ".join(args)[:60] for args, _ in BAD])
def test_bad_input_gets_a_sentence_and_exit_code_2(args, message, broken, capsys):
    args = [broken.get(arg.strip("{}"), arg) if arg.startswith("{") else arg for arg in args]
    try:
        code = main(args)
    except SystemExit as stop:  # argparse
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith(f"minibatcher {args[0]}: ") and "Traceback" not in error
    assert error.count("\n") == 1 and len(error) < 2_000
    assert re.search(message, error, flags=re.DOTALL), error


def test_python_dash_m_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "minibatcher", "compare", "--strategies", "orca"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("minibatcher compare: unknown strategy")


@pytest.mark.parametrize("command", [[], ["compare"], ["generate"], ["info"], ["labs", "build"]])
def test_help_teaches(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and len(text) > 300
