"""Windows, macOS and bare machines, as far as a Linux can play them: elsewhere.py takes away what they lack."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path, PureWindowsPath

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minibatcher"
TESTS = ROOT / "tests"
SYSTEMS = ("Windows", "macOS")

LOAD_ALL = """
import contextlib, importlib, io, pkgutil, minibatcher
for module in pkgutil.walk_packages(minibatcher.__path__, "minibatcher."):
    if not module.name.endswith("__main__"):  # it runs the command line
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the set-up cell greets
                importlib.import_module(module.name)
        except Exception as error:
            print(f"{module.name}: {type(error).__name__}: {error}")
"""
SLOW_ANSWER = """
import time
from minibatcher.labkit import checks
real = checks.time_limit
checks.time_limit = lambda seconds: real(0.2)
result = checks.judge("7.1-padding", lambda *arguments: time.sleep(0.3) or (0, 0))
checks.time_limit = real
print(result)
"""
KERNEL_ANSWER = """
from minibatcher.labkit import checks
print(checks.judge("7.3-triton-attention", lambda *arguments: None))
"""
# The worker that runs an answer plays the same system.
GRADER = """
import sys
from minibatcher.labkit.grading import run
run._ENTRY = (
    f"import sys; sys.path.insert(0, {TESTS!r}); import elsewhere; elsewhere.{SYSTEM}(load=False); " + run._ENTRY
)
"""
MEMORY = "from minibatcher.host_memory import host_memory; print(*host_memory())"


def commands(system):
    """What is run on each system, by name."""
    grader = GRADER.replace("{TESTS!r}", repr(str(TESTS))).replace("{SYSTEM}", system.lower()).replace('f"', '"')
    return {
        "info": ["info"],
        "kernels": ["kernels"],
        "check": ["kernels", "--check"],
        "compile": ["kernels", "--compile"],
        "bench": ["kernels", "--bench"],
        "triton": ["generate", "ROMEO:", "--attention", "triton"],
        "generate": ["generate", "ROMEO:", "--max-tokens", "5"],
        "simulate": ["simulate", "--num-requests", "20"],
        "compare": ["compare", "--num-requests", "3", "--max-model-len", "64"],
        "load all": ["python", LOAD_ALL],
        "memory": ["python", MEMORY],
        "slow answer": ["python", SLOW_ANSWER],
        "kernel answer": ["python", KERNEL_ANSWER],
        "set the grader up": ["python", grader],
        "grade": ["grade", str(ROOT / "solutions" / "lab-7.1.ipynb"), "--labs", str(ROOT / "labs")],
    }


def played(system, lines):
    """[exit code, output, errors] of each command line."""
    environment = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, str(TESTS / "elsewhere.py"), system],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | environment,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@cache
def results(system):
    lines = commands(system)
    return dict(zip(lines, played(system, list(lines.values()))))


@pytest.fixture(params=SYSTEMS)
def on(request):
    return results(request.param)


def test_every_module_loads_but_the_kernels(on):
    code, out, _ = on["load all"]
    assert code == 0
    kernels = r"minibatcher\.attention\.triton_\w+: ModuleNotFoundError: No module named 'triton'"
    assert out and [line for line in out.splitlines() if not re.fullmatch(kernels, line)] == []


def test_info_says_that_there_is_no_triton_and_why(on):
    code, out, err = on["info"]
    assert (code, err) == (0, "")
    assert re.search(r"triton not installed, .* on (Windows AMD64|Darwin arm64)\.\n", out)
    assert "Triton kernels: can't run here: Triton is not installed (it exists for Linux: pip install triton)." in out


@pytest.mark.parametrize("command", ["check", "compile", "bench", "triton"])
def test_what_needs_triton_is_refused_in_a_sentence(on, command):
    code, out, err = on[command]
    assert (code, out) == (2, "")
    assert "Triton is not installed" in err and err.count("\n") == 1


def test_everything_else_works(on):
    for name in ("kernels", "generate", "simulate", "compare"):
        code, out, err = on[name]
        assert (code, err) == (0, ""), name
        assert out.strip()
    assert "Answers: all strategies gave identical tokens" in on["compare"][1]


def test_the_memory_is_known(on):
    code, out, _ = on["memory"]
    total, free = map(int, out.split())
    assert code == 0 and 0 < free < total


def test_a_slow_answer_is_stopped_or_does_not_count(on):
    code, out, err = on["slow answer"]
    assert (code, err) == (0, "")
    assert "is there a loop that never ends?" in out


def test_the_one_exercise_for_triton_says_so(on):
    code, out, err = on["kernel answer"]
    assert (code, err) == (0, "")
    assert "Triton is not installed (it exists for Linux: pip install triton); only this exercise needs it" in out


def test_tests_of_the_kernels_are_skipped_with_a_reason():
    files = [
        path.name for kind in ("triton", "kernels_compile", "kernels_bench") for path in TESTS.glob(f"test_{kind}*")
    ]
    lines = "import elsewhere, pytest, sys; elsewhere.without('triton'); sys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", lines, "-p", "no:cacheprovider", "-p", "no:xdist", *files],
        capture_output=True,
        encoding="utf-8",
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])},
        timeout=200,
    )
    skipped = re.findall(r"^SKIPPED \[1\] (?:tests/)?(\w+\.py):\d+: the kernels need Triton", done.stdout, re.MULTILINE)
    assert sorted(skipped) == sorted(files) and len(files) > 5, done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_labs_are_graded_and_the_limits_that_hold_are_said():
    points = {system: re.search(r"(\d+)/(\d+)|(\d+) of (\d+)", results(system)["grade"][1]) for system in SYSTEMS}
    for system in SYSTEMS:
        code, out, err = results(system)["grade"]
        assert code == 0, err
        numbers = [number for number in points[system].groups() if number]
        assert numbers[0] == numbers[1] != "0", out
    assert "Protections on: a limit on time; not possible here: limits on memory" in results("Windows")["grade"][2]
    assert "Protections on: limits" in results("macOS")["grade"][2]


def test_without_the_extras_each_command_works_or_names_the_extra():
    names = {
        "info": ["info"],
        "compare": ["compare", "--num-requests", "2", "--strategies", "chunked"],
        "simulate": ["simulate", "--num-requests", "5"],
        "labs": ["labs", "build", "--check"],
        "hub": ["generate", "--model", "somebody/model", "x"],
        "gguf": ["generate", "--model", str(ROOT / "pyproject.toml"), "x"],
    }
    done = dict(zip(names, played("without extras", list(names.values()))))
    assert [done[name][0] for name in ("info", "compare", "simulate")] == [0, 0, 0]
    assert "For models by hub id: not installed: pip install 'minibatcher[hub]'." in done["info"][1]
    for name, words in (("labs", "lab"), ("hub", "minibatcher[hub]")):
        code, _, err = done[name]
        assert code == 2 and words in err and err.count("\n") == 1, (name, err)


def test_a_console_of_few_characters_prints_question_marks():
    """As one of Windows with the code page 1252, which has no box-drawing lines."""
    done = subprocess.run(
        [sys.executable, "-m", "minibatcher", "compare", "--num-requests", "2", "--max-model-len", "64"],
        capture_output=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "cp1252"},
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"????" in done.stdout and b"Answers: all strategies gave identical tokens" in done.stdout


def test_without_any_program_on_the_path_the_interpreter_works():
    """No compiler above all: Triton's interpreter needs none."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "minibatcher", "generate", "ROMEO:", "--max-tokens", "2", "--attention", "triton"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("PATH", "CC")} | {"PATH": str(TESTS)},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ROMEO:")


# It reads what pip prints, and that is in the system's own encoding.
NO_ENCODING_NEEDED = {PACKAGE / "labkit" / "set_up_cell.py"}
OPENERS = {"open", "read_text", "write_text", "NamedTemporaryFile", "fdopen", "TextIOWrapper"}
RUNNERS = {"run", "Popen", "check_output"}


def without_encoding(source):
    """Lines that read or write text in whatever encoding the system prefers."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        if "encoding" in options or None in options:
            continue
        if name in RUNNERS and ("text" in options or "universal_newlines" in options):
            yield node.lineno
        if name in OPENERS and not is_binary(node, name, options):
            yield node.lineno


def is_binary(node, name, options):
    """Whether bytes are read or written, or nothing is opened at all."""
    texts = [arg.value for arg in [*node.args, *options.values()] if isinstance(arg, ast.Constant)]
    modes = [text for text in texts if isinstance(text, str) and re.fullmatch(r"[rwxab+]{1,4}", text)]
    if name == "open" and isinstance(node.func, ast.Attribute):
        owner = ast.unparse(node.func.value)
        if owner in ("os", "self", "interrupts", "webbrowser"):
            return True
    return any("b" in mode for mode in modes) or (name == "NamedTemporaryFile" and not modes)


def test_files_are_text_in_a_named_encoding():
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{line}"
        for path in sorted({*PACKAGE.rglob("*.py")} - NO_ENCODING_NEEDED)
        for line in without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert found == [], "name the encoding: Windows takes another one than UTF-8"


@pytest.mark.parametrize(
    "source, wrong",
    [
        ("open(p)", 1),
        ("open(p, 'rb')", 0),
        ("p.open('a')", 1),
        ("p.read_text()", 1),
        ("p.write_text(t, encoding='utf-8')", 0),
        ("subprocess.run(c, text=True)", 1),
        ("subprocess.run(c)", 0),
        ("os.open(p, 0)", 0),
    ],
)
def test_rule_encoding(source, wrong):
    assert len(list(without_encoding(source))) == wrong


def test_file_names_are_names_on_every_system():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        pytest.skip("not a git checkout")
    names = done.stdout.splitlines()
    assert len({name.lower() for name in names}) == len(names)
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9._/-]{1,120}", name), name
        assert not any(PureWindowsPath(part).is_reserved() or part.endswith(".") for part in name.split("/")), name


def test_the_makefile_suits_make_3_81_and_the_tools_of_macos():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    newer = (
        ".ONESHELL",
        ".RECIPEPREFIX",
        ".EXTRA_PREREQS",
        "!=",
        "::=",
        "$(file",
        "$(guile",
        "undefine",
        "&:",
        "$(let",
    )
    assert [word for word in newer if word in text] == []
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    gnu_only = (
        r"\bsed\b.*(\\t|\\n|\s-[iEr]\b)|grep -P|readlink -f|\brealpath\b|\bnproc\b|\bxargs -r|\bdate -d"
        r"|\bcp -[a-z]*[au]|\bstat -c|\[\["
    )
    assert [line for line in lines if re.search(gnu_only, line)] == []
    assert "SHELL" not in text  # /bin/sh, whatever that is


def test_make_help_lists_every_target():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"^  make (\w+) +\S", done.stdout, re.MULTILINE) == targets


def test_make_lab_asks_no_question_about_news(tmp_path):
    """Written by the Makefile, told on the page for a class, and understood by the JupyterLab that is installed."""
    if importlib.util.find_spec("jupyterlab") is None:
        pytest.skip("no JupyterLab here: pip install 'minibatcher[lab]', to compare its settings")
    path = tmp_path / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    make = ["make", f"VENV={tmp_path}", "-o", str(tmp_path / ".installed-lab"), str(path)]
    subprocess.run(make, cwd=ROOT, check=True, capture_output=True)
    written = path.read_text(encoding="utf-8")
    assert written in (ROOT / "chapters" / "class.md").read_text(encoding="utf-8")
    ((plugin, values),) = json.loads(written).items()
    package, name = plugin.split(":")
    schemas = Path(sys.prefix) / "share" / "jupyter" / "lab" / "schemas"
    known = json.loads((schemas / package / f"{name}.json").read_text(encoding="utf-8"))["properties"]
    assert {key: type(known[key]["default"]) for key in values} == {key: type(value) for key, value in values.items()}


def test_make_clean_deletes_an_environment_and_nothing_of_ones_own(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("mine/work.txt", "own/pyvenv.cfg", ".venv/pyvenv.cfg", "pages/__pycache__/a.pyc", "build/book.html"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()

    def clean(*arguments, **variables):
        command = ["make", "clean", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True)
        assert done.returncode == 0, done.stderr
        return {path.name for path in tmp_path.iterdir()}

    assert clean("VENV=mine") == {"Makefile", "mine", "own", ".venv", "pages"}
    assert clean(VENV="own") == {"Makefile", "mine", "own", "pages"}  # what a shell happens to have set is not meant
    assert list((tmp_path / "pages").iterdir()) == []
    assert clean("VENV=own") == {"Makefile", "mine", "pages"}
    assert clean("VENV=.") == {"Makefile", "mine", "pages"}


def test_outside_a_clone_the_book_is_asked_for(tmp_path):
    """As for who has installed the package alone: a wheel holds no chapters."""
    shutil.copytree(PACKAGE, tmp_path / "installed" / "minibatcher")

    def errors(*command):
        done = subprocess.run(
            [sys.executable, "-m", "minibatcher", *command],
            capture_output=True,
            encoding="utf-8",
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        )
        return done.returncode, done.stderr

    for command, option in ((["labs", "build", "nothing"], "--root"), (["grade", str(tmp_path)], "--labs")):
        (tmp_path / "a.ipynb").touch()
        code, said = errors(*command)
        assert code == 2 and re.search(rf"no chapters/ and solutions/ in .* {option} FOLDER", said)
    code, said = errors("labs", "build", "nothing", "--root", str(ROOT))  # the option is one
    assert code == 2 and "no source named 'nothing'" in said
