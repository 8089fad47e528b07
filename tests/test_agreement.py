"""The table of what published load generators told of our server, beside its own record."""

import json

import pytest

from minibatcher.labkit.agreement import FILES, agreement
from minibatcher.labkit.notebooks import BuildError


def report(name, ttft=100.0, **more):
    figures = {"num_requests": 9.0, "ttft_ms mean": 102.0}
    medians = {
        "generator": figures | more,
        "server": {"num_requests": 9.0, "ttft_ms mean": ttft, "itl_ms p99": 7.0},
        "replay": {"num_requests": 9.0, "ttft_ms mean": 90.0, "itl_ms p99": 8.0},
    }
    return {
        "generator": name,
        "version": f"{name} 1.2",
        "model": "m",
        "request_rate": 2.0,
        "workload": {"name": "w", "num_requests": 9},
        "measured": {"date": "2030-01-02T03:04:05+00:00"},
        "rounds": [{}, {}, {}],
        "medians": medians,
    }


def written(folder, *reports):
    for one in reports:
        file = folder / FILES.replace("*", one["generator"])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(one), encoding="utf-8")
    return folder


def test_each_generator_stands_beside_the_server_and_a_replay(tmp_path):
    table = agreement(written(tmp_path, report("guidellm"), report("vllm", **{"itl_ms p99": 7.07})))
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    assert rows[0][:3] == ["guidellm 1.2", "the server", "apart by"] and len(rows) == 5
    assert rows[2] == ["requests", *["9", "9", "+0.0%", "9"] * 2]
    assert rows[3] == ["TTFT mean, ms", *["102.0", "100.0", "+2.0%", "90.00"] * 2]
    assert rows[4] == ["ITL p99, ms", "–", "–", "–", "–", "7.070", "7.000", "+1.0%", "8.000"]
    assert "guidellm 1.2: model m, 9 requests of w at 2.00 a second, 3 rounds, medians, 2030-01-02" in table


def test_two_sides_of_a_run_that_differ_are_marked(tmp_path):
    table = agreement(written(tmp_path, report("guidellm"), report("vllm", ttft=90.0)))
    assert "| +2.0% |" in table and "| **+13.3%** |" in table and table.count("**") == 4


def test_without_a_measurement_there_is_no_table(tmp_path):
    with pytest.raises(BuildError, match="there is no chapters/measured/load-generator"):
        agreement(tmp_path)
