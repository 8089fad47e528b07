"""`minibatcher kernels`: what it prints, what it writes, and its exit codes."""

import json
from itertools import islice

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
    assert printed.splitlines()[-1].startswith("Shown are the reports in ")


def test_the_goals_are_in_the_json_before_anything_is_measured(results, capsys):
    assert main(["kernels", "--json", "-"]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    assert [(goal["name"], goal["value"], goal["met"]) for goal in data["goals"]] == [
        ("decode", None, None),
        ("prefill", None, None),
        ("engine", None, None),
    ]
    assert all(0 < goal["least"] < 1 for goal in data["goals"])


def test_where_the_reports_lie_is_said(capsys):
    assert main(["kernels"]) == 0
    assert "minibatcher/kernels/results/ (" in capsys.readouterr().out.splitlines()[-1]


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
        (["--compile", "--targets", "x"], "'x' is no compute capability, such as 9.0 or 90"),
        (["--compile", "--targets", "9.0.1"], "no compute capability"),
        (["--compile", "--targets", "9.1"], "91 is not among"),
        (["--compile", "--seed", "3"], "--seed goes with --check"),
        (["--seed", "0"], "--seed goes with --check"),
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
    section = {"rows": [row | {"seed": 5}], "planned": 1, "seconds": 1.0, "error": None, "mistake": False, "seed": 5}
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
    assert captured.out.splitlines()[0].endswith("seed 5.") and "seed 5" in captured.err


@pytest.mark.parametrize(("options", "seed"), [([], None), (["--seed", "0"], 0), (["--seed", "41"], 41)])
def test_a_check_can_be_repeated(options, seed, made, monkeypatch):
    from minibatcher.kernels import report

    asked = []
    monkeypatch.setattr(report, "make_report", lambda sections, *args, **options: asked.extend(sections) or made)
    assert main(["kernels", "--check", *options]) == 0
    (section,) = asked
    assert (section.name, section.settings) == ("check", {"seed": seed})


def test_the_same_seed_gives_the_same_errors():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton", reason="the kernels need Triton, which exists for Linux only")
    from minibatcher.kernels import check

    def errors(seed):
        section = check.rows("cuda" if torch.cuda.is_available() else "cpu", seed=seed, most_cases=1)
        plan, *rows = islice(section, 6)  # store and decode
        assert plan["seed"] == seed and {row["seed"] for row in rows} == {seed}
        return [row["error"] for row in rows]

    assert errors(3) == errors(3) != errors(4)


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
    asked = []
    monkeypatch.setattr(
        targets, "compile_targets", lambda some, **_: asked.append(some) or ([row], ["7.5 broke off"], False)
    )
    assert main(["kernels", "--compile", "--targets", "9.0", "90", "8.6"]) == 1
    assert asked == [[90, 86]]
    captured = capsys.readouterr()
    assert "1 kernel for 1 GPU, 1 at fault" in captured.out
    assert "ragged in float16 for 9.0 (s): does not compile: odd" in captured.err and "7.5 broke off" in captured.err
    assert "TRITON_INTERPRET is set" in captured.err
    assert "ragged" in captured.out


def compiles(monkeypatch, rows, errors=(), interrupted=False):
    """Has --compile come to this."""
    pytest.importorskip("torch")
    pytest.importorskip("triton", reason="the kernels need Triton, which exists for Linux only")
    from minibatcher.kernels import targets

    monkeypatch.setattr(targets, "compile_targets", lambda *args, **options: (rows, list(errors), interrupted))


FINE = {"target": 90, "kernel": "ragged", "dtype": "float16", "shape": "s", "faults": []}


def test_an_interrupted_compilation_shows_its_rows_and_gives_exit_code_130(monkeypatch, capsys):
    compiles(monkeypatch, [FINE, FINE | {"target": 75}], interrupted=True)
    assert main(["kernels", "--compile"]) == 130
    captured = capsys.readouterr()
    assert "2 kernels for 2 GPUs, none at fault" in captured.out
    assert captured.err.splitlines()[-1] == "interrupted: the rows are those of what was done so far"


def test_nothing_compiled_gives_no_verdict(monkeypatch, capsys):
    compiles(monkeypatch, [], ["the compilation for 9.0 broke off: out of disk"])
    assert main(["kernels", "--compile", "--targets", "90"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "out of disk" in captured.err


@pytest.mark.parametrize(("value", "told"), [("1", True), ("0", False), ("true", True)])
def test_the_interpreter_is_told_of_only_where_it_is_asked_for(value, told, monkeypatch, capsys):
    compiles(monkeypatch, [FINE])
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert main(["kernels", "--compile", "--targets", "90"]) == 0
    assert ("TRITON_INTERPRET is set" in capsys.readouterr().err) == told


def test_the_help_names_every_target_and_exit_code(capsys):
    from minibatcher.kernels.targets import TARGETS

    with pytest.raises(SystemExit):
        main(["kernels", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert all(f"{target / 10:.1f}" in printed for target in TARGETS)
    assert "130 after Ctrl-C" in printed
