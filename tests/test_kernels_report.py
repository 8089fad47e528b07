"""Sections in processes of their own, and the report that they make together."""

import json

import pytest

torch = pytest.importorskip("torch")

from minibatcher.errors import DeviceError, MinibatcherError  # noqa: E402
from minibatcher.kernels import child, report, tables  # noqa: E402
from minibatcher.kernels.child import SectionFailed, run_section  # noqa: E402
from minibatcher.kernels.report import Section, failures, make_report  # noqa: E402

RIGHT = {"kernel": "store_kv", "dtype": "float32", "shape": "s", "error": 0.0, "tolerance": 1e-5, "ok": True, "seed": 7}
needs_triton = pytest.mark.skipif(
    pytest.importorskip("minibatcher.attention.triton_support").version() is None,
    reason="the kernels need Triton, which exists for Linux only",
)


@needs_triton
def test_a_section_stops_before_a_row_that_has_no_time():
    rows = list(run_section("check", {"device": "cpu", "stop_after_s": 0}, env={"TRITON_INTERPRET": "1"}))
    assert len(rows) == 1 and rows[0]["total"] > 20


def test_a_section_is_stopped_when_its_time_is_up():
    rows = []
    with pytest.raises(SectionFailed, match="stopped after"):
        rows.extend(run_section("check", {"device": "cpu"}, timeout_s=0.2))
    assert rows == []


def test_what_breaks_a_section_is_told():
    with pytest.raises(SectionFailed, match=r"TypeError.*nonsense"):
        list(run_section("compare", {"nonsense": 1}))


@pytest.mark.parametrize("end", ["exit 130", "kill -INT $$", "exit 1"])
def test_a_section_that_had_ctrl_c_is_told_from_one_that_failed(end, tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{end}\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(script))
    with pytest.raises(SectionFailed) as caught:
        list(run_section("check", {}))
    assert isinstance(caught.value, child.SectionInterrupted) == (end != "exit 1")


@needs_triton
def test_a_mistake_comes_back_as_a_sentence():
    with pytest.raises(MinibatcherError, match="compute capability 33 is not among those with known limits"):
        list(run_section("compile", {"target": 33}, env={"TRITON_INTERPRET": None}))


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", True),
        ("CUDA out of memory. Tried to allocate 2 GiB", False),
        ("no such kernel", False),
    ],
)
def test_only_some_errors_cost_the_gpu(message, lost):
    assert child.device_is_lost(RuntimeError(message)) is lost


def fake_sections(monkeypatch, **endings):
    """Each section gives one row, then ends as told."""
    calls = []

    def run_section(name, settings, env, timeout_s):
        calls.append((name, settings, env, timeout_s))
        yield {"total": 3, "seed": 7} if name == "check" else {"total": 3}
        yield RIGHT
        if endings.get(name):
            raise endings[name]

    monkeypatch.setattr(report, "run_section", run_section)
    return calls


def test_a_section_that_fails_keeps_its_rows_and_the_next_one_runs(monkeypatch):
    calls = fake_sections(monkeypatch, check=SectionFailed("the GPU fell off"), bench=DeviceError("no bfloat16"))
    seen = []
    made = make_report(
        [Section("check", 20), Section("bench"), Section("engine")], "cpu", progress=lambda *args: seen.append(args)
    )
    sections = made["sections"]
    assert [len(section["rows"]) for section in sections.values()] == [1, 1, 1]
    assert [section["error"] for section in sections.values()] == ["the GPU fell off", "no bfloat16", None]
    assert [section["mistake"] for section in sections.values()] == [False, True, False]
    assert all(section["planned"] == 3 and section["seconds"] >= 0 for section in sections.values())
    assert failures(made) == ["check (seed 7): the GPU fell off", "bench: no bfloat16"]
    assert seen[:2] == [("check", 0, 3), ("check", 1, 3)]
    name, settings, env, timeout_s = calls[0]
    assert (name, timeout_s, env) == ("check", 20, {"TRITON_INTERPRET": "1"})
    assert settings == {"device": "cpu", "stop_after_s": 20 - report.SLACK_S}


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), child.SectionInterrupted("interrupted")], ids=repr)
def test_an_interrupt_keeps_what_was_done(ending, monkeypatch):
    fake_sections(monkeypatch, check=ending)
    made = make_report([Section("check"), Section("bench")], "cpu")
    assert made["interrupted"] and list(made["sections"]) == ["check"]
    assert made["sections"]["check"]["rows"] == [RIGHT]
    text = tables.report_text(made)
    assert "check: 1 of 3 rows; interrupted." in text and "no time" not in text


def test_each_kind_of_failure_is_a_sentence():
    half = {"dtype": "float16", "ok": False, "error": None}
    rows = [
        RIGHT,
        RIGHT | {"ok": False, "error": 0.5},
        RIGHT | {"ok": False, "error": 0.7},
        RIGHT | {"ok": False, "error": None},
        RIGHT | half | {"failure": "ValueError: odd"},
        RIGHT | half,
        RIGHT | half | {"kernel": "naive_attention"},
        {"kind": "engine", "variant": "SDPA", "failure": "no memory"},
        {"kind": "answers", "runs": 8, "identical": False, "different": ["triton static"]},
        {"kind": "answers", "runs": 8, "identical": True, "different": []},
    ]
    sentences = failures({"sections": {"check": {"error": None, "rows": rows}}})
    assert sentences == [
        "store_kv in float32 is wrong, error 0.5, beyond 1e-05 (s, seed 7), and 2 more cases failed",
        "store_kv in float16 raised ValueError: odd (s, seed 7), and 1 more case failed",
        "naive_attention in float16 is wrong, error not finite, beyond 1e-05 (s, seed 7)",
        "check, engine, SDPA: no memory",
        "answers in float32 differ: triton static",
    ]


def test_the_prepared_report_fits_in_six_minutes():
    assert sum(section.seconds for section in report.REPORT) < 360
    assert {section.name for section in report.REPORT} == set(child.SECTIONS) - {"compile"}


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="a trial is for machines without a GPU")
def test_a_trial_of_the_whole_report(tmp_path, capsys):
    from minibatcher.cli import main

    file = tmp_path / "report.json"
    assert main(["kernels", "--report", str(file), "--device", "cpu", "--quiet"]) == 0
    made = json.loads(file.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert made["schema"] == "minibatcher.kernels" and made["schema_version"] == 1
    assert made["trial"] is True and made["interrupted"] is False and "TRIAL" in printed
    assert made["software"]["torch"] == torch.__version__ and made["hardware"]["device"]
    assert list(made["sections"]) == ["check", "bench", "engine", "compare"]
    for name, section in made["sections"].items():
        assert section["error"] is None and section["planned"] == len(section["rows"]) > 0, name
    assert all(row["ok"] for row in made["sections"]["check"]["rows"])
    assert {row["kind"] for row in made["sections"]["bench"]["rows"]} == {
        "device",
        "prefill",
        "decode",
        "mixed",
        "store",
    }
    (answers,) = (row for row in made["sections"]["compare"]["rows"] if row["kind"] == "answers")
    assert answers["identical"] is True and answers["runs"] == 4
    assert "This device copies" in printed and "tiny-random" in printed and "1b" not in printed
    assert f"seed {made['sections']['check']['seed']}." in printed.splitlines()[0]
    assert all(goal["value"] is None for goal in made["goals"])  # a trial shows no speed


def test_tables_show_what_failed_beside_what_did_not():
    rows = [RIGHT, RIGHT | {"shape": "t", "ok": False, "error": None}]
    text = tables.check_table(rows)
    assert "not finite" in text and "WRONG in 1" in text
    text = tables.check_table([*rows, RIGHT | {"ok": False, "error": None, "failure": "ValueError: odd"}])
    assert "raised ValueError " in text and "not finite" not in text and "WRONG in 2" in text
    lines = tables.table(("name ", "n"), [("a", "1"), ("long", "22")]).splitlines()
    assert lines[2] == "a      1" and lines[3] == "long  22"


@needs_triton
def test_a_gpu_is_checked_with_every_case_of_the_tests_and_larger_ones():
    from minibatcher.kernels import check
    from minibatcher.kernels.cases import CASES

    assert check.cases("cpu") == check.cases("cpu:3") == {kernel: CASES[kernel] for kernel in check.KERNELS}
    assert set(check.cases("cpu")) == set(check.cases("cuda")) == set(CASES)
    for kernel, shapes in check.cases("cuda").items():
        assert set(CASES[kernel]) < set(shapes)
        assert max(sum(s.context_lens) for s in shapes) > 2 * max(sum(s.context_lens) for s in CASES[kernel])
    for shape in check.cases("cuda")["decode_attention"]:
        assert set(shape.query_lens) == {1} and len(shape.query_lens) == len(shape.context_lens)
    for shape in check.cases("cuda")["ragged_attention"]:
        assert len(shape.query_lens) == len(shape.context_lens)
        assert all(queries <= context for queries, context in zip(shape.query_lens, shape.context_lens))
