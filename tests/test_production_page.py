"""The page on production: its table is that of the measured files, and its commands, keys and metrics are real ones."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import needed, running_server

from minibatcher.cli import _parser
from minibatcher.labkit import production
from minibatcher.labkit.notebooks import BuildError
from minibatcher.replay.keys import check_keys, tenant_keys
from minibatcher.tomlfile import read_toml
from minibatcher.workload import load_workload

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "chapters" / "production.md").read_text(encoding="utf-8")


def blocks(language):
    """Lines that end in a backslash go on, as in a shell."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.replace("\\\n", " "), re.DOTALL | re.MULTILINE)


# The table of measured runs


def spread(value):
    return {"p50": value, "p99": 10 * value}


def report(name="minibatcher", speed=100.0, hashes=("a", "b"), ends=("length", "stop"), **changes):
    run = {
        "num_requests": 2,
        "output_tokens_per_s": speed,
        "ttft_ms": spread(1.0),
        "itl_ms": None,
        "e2el_ms": spread(30.0),
        "requests": [
            {"id": f"r{i}", "output_hash": one, "finish_reason": end, "token_times": [1, 2]}
            for i, (one, end) in enumerate(zip(hashes, ends))
        ],
        "slot_occupancy": None,
        "header": {"base_url": "http://10.0.0.7:8000/v1", "server": {"owned_by": name, "version": "1.2"}},
    }
    header = {"workload": {"name": "w", "num_requests": 2}, "seed": 3, "base_url": "http://10.0.0.7:8000/v1"}
    return {
        "clock": "measured",
        "header": header | changes.pop("header", {}),
        "strategies": {name: run},
        "setting": f"{name} --threads 2",
        "measured": {"date": "2030-01-02T03:04:05+00:00", "num_cpus": 2},
        "definitions": {"long": "words"},
        "timelines": {name: {"requests": [{"request_id": f"r{i}", "output_text": f"{i}!"} for i in range(2)]}},
        **changes,
    }


def table_of(tmp_path, *reports):
    folder = tmp_path / production.FOLDER
    folder.mkdir(parents=True)
    for i, one in enumerate(reports):
        (folder / f"{i}.json").write_text(json.dumps(one), encoding="utf-8")
    return production.measured(tmp_path)


def test_an_engine_has_a_row_with_medians_and_how_many_answers_are_the_same(tmp_path):
    others = [report("vllm", 50.0, ("a", "x")), report(speed=120.0)]
    text = table_of(tmp_path, report(), *others, report(speed=110.0))
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    assert rows[0] == ["minibatcher", "110 (100, 120)", "1.00 / 10.0", "– / –", "30.0 / 300", "6 of 6", "2 of 2"]
    assert rows[1] == ["vllm", "50.0 (50.0, 50.0)", "1.00 / 10.0", "– / –", "30.0 / 300", "2 of 2", "1 of 2"]
    assert "medians of 1 to 3 runs of each" in text and "2 requests of the workload w, seed 3; 2 processors" in text
    assert "minibatcher 1.2, vllm 1.2; 2030-01-02." in text
    assert text.endswith("\n- minibatcher --threads 2\n- vllm --threads 2\n")


def test_a_single_run_has_no_median(tmp_path):
    assert "by the client: one run of each; 2 requests" in table_of(tmp_path, report())


def test_who_was_refused_has_no_answer_that_could_be_the_same(tmp_path):
    rows = table_of(tmp_path, report(), report("vllm", hashes=("a", "b"), ends=("length", "refused"))).splitlines()
    assert rows[3].endswith("| 1 of 2 | 1 of 1 |")


def test_what_the_client_had_to_say_stands_below(tmp_path):
    text = table_of(tmp_path, report(header={"client_notes": ["requests were sent late"]}))
    assert text.endswith("\n- minibatcher --threads 2\n- minibatcher: requests were sent late.\n")


def test_answers_of_which_no_ids_are_told_are_compared_as_text(tmp_path):
    silent = report("llama.cpp", hashes=(None, None))
    silent["timelines"]["llama.cpp"]["requests"][1]["output_text"] = "else"
    mute = report("mute", hashes=(None, None)) | {"timelines": {}}
    rows = table_of(tmp_path, *map(production.keep, (report(), silent, mute))).splitlines()
    assert rows[2].endswith("| 2 of 2 |") and rows[3].endswith("| 1 of 2 as text |") and rows[4].endswith("| – |")


@pytest.mark.parametrize(
    "reports, sentence",
    [
        ([], "holds no run"),
        ([report(clock="simulated")], "no measured run"),
        ([report(header={"interrupted": True})], "cut short"),
        ([report(), report("vllm", header={"seed": 4})], "other requests"),
    ],
)
def test_what_can_not_stand_in_one_table_is_refused(reports, sentence, tmp_path):
    with pytest.raises(BuildError, match=sentence):
        table_of(tmp_path, *reports)


def test_what_is_kept_names_no_address_and_is_read_alike(tmp_path):
    kept = production.keep(report())
    assert not [word for word in ("10.0.0.7", "token_times", "long", "so much") if word in json.dumps(kept)]
    assert table_of(tmp_path / "a", kept) == table_of(tmp_path / "b", report())


# What the page says


COMMANDS = [line for block in blocks("console") for line in block.splitlines() if line.startswith("minibatcher ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_our_commands_are_understood(command):
    assert _parser().parse_args(shlex.split(command)[1:]).run


def test_commands_were_found():
    assert {shlex.split(command)[1] for command in COMMANDS} == {"serve", "replay", "compare", "simulate"}


def options_of(command):
    (commands,) = [action for action in _parser()._actions if action.dest == "command"]
    return {option for action in commands.choices[command]._actions for option in action.option_strings}


def tables():
    """The rows of each table of the page, without its head."""
    found = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    return [[[c.strip() for c in line.strip("|\n").split("|")] for line in t.splitlines()] for t in found]


def test_each_knob_of_ours_is_an_option_of_serve():
    knobs = [table for table in tables() if table[0][1:2] == ["`minibatcher serve`"]]
    assert len(knobs) == 2 and all(len(row) == 7 for table in knobs for row in table)
    named = {option for table in knobs for row in table for option in re.findall(r"--[a-z][\w-]*", row[1])}
    assert len(named) > 15 and named <= options_of("serve")


def test_options_in_the_prose_are_real_ones():
    """Of one of our commands, or in a cell of the tables, or in a command of the engine that it belongs to."""
    known = set().union(*map(options_of, ("serve", "replay", "compare")))
    elsewhere = set(re.findall(r"--[a-z][\w-]*", "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))))
    elsewhere |= {o for block in blocks("console") for o in re.findall(r"(?<= )--[a-z][\w-]*", block)}
    prose = re.sub(r"^(```.*?^```|\|.*?)$", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"`(--[a-z][\w-]*)", prose)) <= known | elsewhere | {"--help"}


def test_the_metrics_named_are_those_of_the_server():
    pytest.importorskip("prometheus_client")
    from minibatcher.serve.metrics import COUNTERS, GAUGES, HISTOGRAMS

    named = set(re.findall(r"`((?:vllm|minibatcher):\w+)`", PAGE))
    assert len(named) > 10 and named <= GAUGES.keys() | COUNTERS.keys() | HISTOGRAMS.keys()


def test_the_file_of_keys_is_one(tmp_path):
    pytest.importorskip("pydantic")
    from minibatcher.serve.keys import ApiKeys

    (text,) = blocks("toml")
    (tmp_path / "keys.toml").write_text(text, encoding="utf-8")
    keys = ApiKeys.from_file(tmp_path / "keys.toml")
    secret = read_toml(tmp_path / "keys.toml")["keys"]["tenant-1"]["key"]
    assert keys.find(secret).name == "tenant-1" and f"Authorization: Bearer {secret}" in PAGE


def test_the_replay_with_keys_has_tenants_of_their_names(tmp_path):
    (text,) = blocks("toml")
    (tmp_path / "keys.toml").write_text(text, encoding="utf-8")
    (command,) = [
        shlex.split(command) for command in COMMANDS if "--api-keys keys.toml" in command and "replay" in command
    ]
    check_keys(tenant_keys(tmp_path / "keys.toml"), load_workload(command[2], num_requests=48))


def test_a_class_gets_a_key_each(tmp_path, capsys):
    pytest.importorskip("pydantic")
    from minibatcher.serve.keys import ApiKeys

    (block,) = [block for block in blocks("console") if "class.toml" in block]
    python, _, code, _, file = shlex.split(block)[:5]
    assert (python, file) == ("python", "class.toml")
    exec(compile(code, "the page", "exec"), {})
    (tmp_path / file).write_text(capsys.readouterr().out, encoding="utf-8")
    assert len(ApiKeys.from_file(tmp_path / file)) == 30


def test_the_workload_is_one(tmp_path):
    (lines,) = blocks("text")
    (tmp_path / "conversations.jsonl").write_text(lines, encoding="utf-8")
    assert [row.output_tokens for row in load_workload(str(tmp_path / "conversations.jsonl"))] == [60, 120, 15]


# What it shows, on a live server

ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def url():
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        needed(package)
    with running_server() as address:
        yield address


def test_the_python_of_the_page_talks_to_the_server(url, capsys):
    needed("openai")
    (code,) = blocks("python")
    assert code.count(ADDRESS) == 1
    exec(compile(code.replace(ADDRESS, url), "the page", "exec"), {})
    printed = capsys.readouterr().out
    said, answer = printed.split("CompletionUsage(")[:2]
    assert said.strip() and printed.count("CompletionUsage(") == 2
    assert answer.partition("\n")[2].strip()  # what the chat said, after the rest of the usage


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_curl_lines_of_the_page_are_answered(url):
    lines = [line for block in blocks("console") for line in block.splitlines() if line.startswith("curl ")]
    lines = [line for line in lines if "Authorization" not in line]
    answers = []
    for line in lines:
        command = [word.replace(ADDRESS, url) for word in shlex.split(line)] + ["--silent", "--fail"]
        answers.append(subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True).stdout)
    models, answer, stream = answers
    assert json.loads(models)["data"][0]["id"] == "bard"
    assert 0 < json.loads(answer)["usage"]["completion_tokens"] <= 30
    assert 0 < stream.count("data: {") <= 30 and stream.rstrip().endswith("data: [DONE]")
