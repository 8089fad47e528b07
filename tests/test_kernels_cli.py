"""`minibatcher kernels`: what it prints, what it writes, and its exit codes."""

import json

import pytest

from minibatcher.cli import main
from minibatcher.kernels import goals

REPORT = {
    "schema": "minibatcher.kernels",
    "date": "2026-12-01T10:00:00+00:00",
    "hardware": {"device": "NVIDIA H200"},
    "trial": False,
    "sections": {
        "bench": {"rows": [{"kind": "decode", "num_requests": 64, "context": 2048, "share_of_copy": 0.881}]},
        "engine": {"rows": [{"kind": "engine", "share_of_roofline": 0.66}]},
    },
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The folder of committed results, to be filled."""
    monkeypatch.setattr(goals, "RESULTS", tmp_path)
    return tmp_path


def test_without_an_option_it_says_what_there_is_and_what_is_not_measured_yet(results, capsys):
    assert main(["kernels"]) == 0
    printed = capsys.readouterr().out
    assert all(option in printed for option in ("--check", "--compile", "--bench", "--report FILE"))
    assert printed.count("not measured yet") == len(goals.GOALS)


def test_committed_results_stand_beside_the_goals(results, capsys):
    (results / "h200.json").write_text(json.dumps(REPORT), encoding="utf-8")
    assert main(["kernels", "--json", "-"]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    assert [goal["met"] for goal in data["goals"]] == [True, None, False]
    assert main(["kernels"]) == 0
    printed = capsys.readouterr().out
    assert "NVIDIA H200, 2026-12-01: 88%, met" in printed and "66%, not met" in printed
    assert printed.count("not measured yet") == 1


def test_the_results_in_the_package_are_reports():
    for report in goals.measured_reports():
        assert report["schema"] == "minibatcher.kernels" and report["trial"] is False
        assert report["hardware"]["device"] and report["git_commit"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--targets", "90"], "go with --compile"),
        (["--compile", "--targets", "90", "33"], "33 is not among 75, 80"),
        (["--compile", "--targets", "x"], "invalid int value"),
        (["--compile", "--check"], "not allowed with"),
        (["--compile", "--device", "cuda"], "--device goes with"),
        (["--check", "--device", "tpu"], "unknown device"),
        (["--report", "/no/such/folder/x.json"], "does not exist"),
        (["--report", "-"], "wants a file"),
    ],
)
def test_a_mistake_gets_a_sentence_and_exit_code_2(options, sentence, capsys):
    pytest.importorskip("torch")
    try:
        code = main(["kernels", *options])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("minibatcher kernels: ") and (sentence in error or "Triton is not installed" in error)


@pytest.mark.parametrize("options", [["--bench"], ["--report", "report.json"]])
def test_speed_needs_a_gpu(options, capsys, monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton", reason="the kernels need Triton, which exists for Linux only")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(tmp_path)
    assert main(["kernels", *options]) == 2
    assert "no CUDA GPU here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--check", "--compile", "--bench"])
def test_without_triton_a_sentence_says_where_it_runs(option, capsys, monkeypatch):
    pytest.importorskip("torch")
    from minibatcher.attention import triton_support

    monkeypatch.setattr(triton_support, "version", lambda: None)
    assert main(["kernels", option]) == 2
    error = capsys.readouterr().err
    assert "Linux" in error and "pip install triton" in error
    assert main(["kernels"]) == 0


@pytest.fixture
def made(monkeypatch):
    """The report that --check and --bench are told was made, to be changed."""
    pytest.importorskip("torch")
    pytest.importorskip("triton", reason="the kernels need Triton, which exists for Linux only")
    from minibatcher.kernels import report

    row = {"kernel": "store_kv", "dtype": "float32", "shape": "s", "error": 1e-7, "tolerance": 1e-5, "ok": True}
    section = {"rows": [row], "planned": 1, "seconds": 1.0, "error": None, "mistake": False}
    made = {**REPORT, "interrupted": False, "sections": {"check": section}}
    monkeypatch.setattr(report, "make_report", lambda *args, **options: made)
    return made


def test_check_passes(made, capsys):
    assert main(["kernels", "--check"]) == 0
    assert "right" in capsys.readouterr().out


def test_a_wrong_kernel_gives_exit_code_1(made, capsys):
    made["sections"]["check"]["rows"][0] |= {"ok": False, "error": 0.25}
    assert main(["kernels", "--check"]) == 1
    captured = capsys.readouterr()
    assert "WRONG in 1" in captured.out and "store_kv in float32 is wrong, error 0.25" in captured.err


def test_a_section_s_own_sentence_is_a_mistake_of_the_user(made, capsys):
    made["sections"]["check"] |= {"rows": [], "error": "this GPU is too old", "mistake": True}
    assert main(["kernels", "--check"]) == 2
    assert capsys.readouterr().err == "minibatcher kernels: this GPU is too old\n"


def test_an_interrupt_gives_exit_code_130(made, capsys):
    made["interrupted"] = True
    assert main(["kernels", "--check"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_json_on_standard_output_is_nothing_but_json(made, capsys):
    assert main(["kernels", "--check", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["sections"]["check"]["rows"][0]["kernel"] == "store_kv"


def test_a_kernel_that_does_not_fit_gives_exit_code_1(monkeypatch, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("triton", reason="the kernels need Triton, which exists for Linux only")
    from minibatcher.kernels import targets

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    row = {"target": 90, "kernel": "ragged", "dtype": "float16", "shape": "s", "faults": ["does not compile: odd"]}
    monkeypatch.setattr(targets, "compile_targets", lambda *args, **options: ([row], ["7.5 broke off"]))
    assert main(["kernels", "--compile", "--targets", "90"]) == 1
    captured = capsys.readouterr()
    assert "ragged in float16 for 9.0 (s): does not compile: odd" in captured.err and "7.5 broke off" in captured.err
    assert "TRITON_INTERPRET is set" in captured.err
    assert "ragged" in captured.out
