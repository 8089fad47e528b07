"""The commands: what they print, what they write, and that bad input gets a sentence and exit code 2."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from minibatcher.cli import main  # noqa: E402
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


def test_info_says_what_runs_where(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and "Model bard" in text and "Attention: " in text
    assert main(["info", "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"]["context"] == 2048 and facts["model"]["kv_bytes_per_token"] == 2 * 6 * 2 * 32 * 4


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
        "long.jsonl": '{"prompt": "%s", "output_tokens": 2, "arrival_time": 0}\n' % ("word " * 3000),
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
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
    (["compare", "--max-model-len", "9999"], "above the context of bard, 2048"),
    (["compare", "--json", "/no/such/folder/out.json"], "does not exist"),
    (["compare", "--plot", "slots.txt"], "writes .png"),
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
