"""Every shipped configuration compiles for GPUs that are not here, and a compile that goes wrong is seen."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="the kernels need Triton, which exists for Linux only")

from minibatcher.cli import main
from minibatcher.errors import InvalidParameter
from minibatcher.kernels import compile as compiling
from minibatcher.kernels.targets import SHARED_MEMORY, compile_targets

TESTS = Path(__file__).parent
FOUR = [75, 80, 89, 90]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    file = tmp_path_factory.mktemp("compile") / "rows.json"
    code = main(["kernels", "--compile", "--quiet", "--json", str(file)])
    data = json.loads(file.read_text())
    assert (code, data["errors"]) == (0, []), [row for row in data["rows"] if row["faults"]]
    return data["rows"]


def test_all_kernels_compile_for_all_four_targets_without_a_fault(rows):
    assert [row for row in rows if row["faults"]] == []
    kernels = {"store", "decode", "decode, split", "ragged", "naive", "tiled", "paged"}
    assert {(r["target"], r["kernel"]) for r in rows} == {(target, kernel) for target in FOUR for kernel in kernels}
    for target in FOUR:
        dtypes = {row["dtype"] for row in rows if row["target"] == target}
        assert dtypes == {"float16", "float32"} | ({"bfloat16"} if target >= 80 else set())
        assert {"merge_splits_kernel", "ragged_attention_kernel"} <= {r["name"] for r in rows if r["target"] == target}


def test_shared_memory_is_within_each_chip_s_limit_and_no_register_is_spilled(rows):
    for row in rows:
        assert row["shared_bytes"] <= row["shared_limit"] == SHARED_MEMORY[row["target"]], row
        assert row["stack_bytes"] == 0 and 0 < row["registers"] <= 255, row


def test_tensor_cores_are_used_where_they_are_meant(rows):
    halves = [row for row in rows if row["kernel"] in ("ragged", "tiled", "paged") and row["dtype"] != "float32"]
    assert len(halves) > 20
    for row in halves:
        assert (row["tensor_core_instructions"] > 0) == (row["target"] >= 80), row
    wide = [row for row in rows if row["name"] == "decode_attention_kernel" and "group 8" in row["shape"]]
    assert wide and all(
        row["tensor_core_instructions"] > 0 for row in wide if row["target"] >= 80 and row["dtype"] != "float32"
    )


def test_the_shapes_that_are_shipped_are_compiled(rows):
    shapes = {row["shape"] for row in rows}
    assert {f"head {size}" for size in (8, 64, 80, 128, 256)} == {shape.split(",")[0] for shape in shapes}
    assert {f"group {size}" for size in (1, 2, 4, 7, 8)} == {shape.split(", ")[1] for shape in shapes}
    assert len({shape.split(", ")[2] for shape in shapes}) == 2


def compile_faulty(target, *names):
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(TESTS.parent)
    command = [sys.executable, str(TESTS / "faulty_kernels.py"), str(target), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {row["kernel"]: row for row in map(json.loads, done.stdout.splitlines())}


def test_spills_excess_shared_memory_and_refused_code_are_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows = compile_faulty(89, "fine", "spills", "too much shared memory", "refused", "refused inside")
    assert rows["fine"]["faults"] == [] and rows["fine"]["tensor_core_instructions"] > 0
    assert any("spills registers" in fault for fault in rows["spills"]["faults"])
    assert any("101,376" in fault for fault in rows["too much shared memory"]["faults"])
    for name in ("refused", "refused inside"):
        assert rows[name]["faults"] == ["does not compile: arange's range must be a power of 2"]


def test_float32_that_is_rounded_for_tensor_cores_is_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    row = compile_faulty(80, "in TF32")["in TF32"]
    assert row["tensor_core_instructions"] > 0
    assert row["faults"] == ["multiplies float32 in TF32"]


def chain(*errors):
    """The first one, raised from the second, and so on."""
    for error, cause in pairwise(errors):
        error.__cause__ = cause
    return errors[0]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("at 2:4:\n  x = f(y)\n      ^\nodd range"), "odd range"),
        (RuntimeError("at 2:4:\n  x = f(y)\n      ^\n"), "x = f(y)"),
        (RuntimeError("ptxas error: no room\nRepro command: ptxas"), "ptxas error: no room"),
        (chain(RuntimeError("at 2:4:\n  x = f(y)\n      ^"), RuntimeError("at 9:1:\n  z\n  ^\nodd")), "odd"),
        (chain(RuntimeError("at 2:4:\n  x\n  ^"), AssertionError()), "AssertionError"),
        (KeyError(), "KeyError"),
    ],
)
def test_the_line_that_tells_why_it_does_not_compile(error, line):
    assert compiling.telling_line(error) == line


def row(**changes):
    fine = {
        "target": 80,
        "kernel": "ragged",
        "dtype": "float16",
        "registers": 99,
        "stack_bytes": 0,
        "shared_bytes": 1000,
        "shared_limit": 1000,
        "dot": True,
        "tensor_core_instructions": 4,
    }
    return fine | changes


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"stack_bytes": 8}, "spills"),
        ({"shared_bytes": 1001}, "shared memory"),
        ({"tensor_core_instructions": 0}, "without a tensor-core instruction"),
        ({"dot": False}, "no matrix product"),
        ({"dtype": "float32"}, "multiplies float32 in TF32"),
    ],
)
def test_each_fault_is_a_sentence(changes, complaint):
    (fault,) = compiling.faults(row(**changes))
    assert complaint in fault


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target": 75, "tensor_core_instructions": 0},
        {"dtype": "float32", "tensor_core_instructions": 0},
        {"kernel": "decode", "dot": False, "tensor_core_instructions": 0},
    ],
)
def test_what_is_meant_is_no_fault(changes):
    assert compiling.faults(row(**changes)) == []


def test_bfloat16_is_not_compiled_for_7_5():
    assert "bfloat16" not in {dtype for _, dtype, _ in compiling.configurations(75)}
    assert "bfloat16" in {dtype for _, dtype, _ in compiling.configurations(80)}


def test_an_interpreted_process_says_that_it_can_t_compile(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InvalidParameter, match="TRITON_INTERPRET"), compiling.compiling_for(80):
        pass


def test_a_target_that_breaks_off_is_told_and_costs_no_other(monkeypatch):
    def run_section(name, settings, env):
        assert env["TRITON_INTERPRET"] is None
        yield {"total": 2}
        yield {"target": settings["target"]}
        if settings["target"] == 75:
            raise compiling_failed("out of disk")
        yield {"target": settings["target"]}

    from minibatcher.kernels import targets

    compiling_failed = targets.SectionFailed
    monkeypatch.setattr(targets, "run_section", run_section)
    seen = []
    rows, errors, interrupted = compile_targets([75, 90], jobs=1, progress=lambda *args: seen.append(args))
    assert not interrupted
    assert [row["target"] for row in rows] == [75, 90, 90]
    assert errors == ["the compilation for 7.5 broke off: out of disk"]
    assert seen[-1] == ("compile", 3, 4)


@pytest.mark.parametrize("who", ["this process", "its children"])
def test_an_interrupt_keeps_the_rows_and_is_no_fault_of_a_target(who, monkeypatch):
    from minibatcher.kernels import targets

    begun = []

    def run_section(name, settings, env):
        begun.append(settings["target"])
        yield {"total": 2}
        yield {"target": settings["target"]}
        if settings["target"] == 80:
            raise KeyboardInterrupt if who == "this process" else targets.SectionInterrupted("interrupted")

    monkeypatch.setattr(targets, "run_section", run_section)
    rows, errors, interrupted = compile_targets([75, 80, 90], jobs=1)
    assert [row["target"] for row in rows][:2] == [75, 80]
    assert (errors, interrupted) == ([], True)
