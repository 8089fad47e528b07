"""The set-up of a chapter: what is missing is installed, nothing that is there changes, the machine is looked at."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from minibatcher import here
from minibatcher.errors import MissingDependency
from minibatcher.here import Here, missing_requirements, prepare, project_name, stale_modules, too_old

ROOT = Path(__file__).resolve().parents[1]
LINES = [
    "numpy>=1.26",
    "Not-There>=2; sys_platform == 'linux'",
    "only-on-plan9>=2; sys_platform == 'plan9'",
    'tomli-of-old>=2; python_version < "3.2"',
    'anywidget>=0.9; extra == "lab"',
    'jupyterlab-of-mine>=4; extra == "lab"',
    'pygments>=2.11; extra == "test"',
]


@pytest.fixture
def installed(monkeypatch):
    """A machine with these packages, and a pip that only notes what it is asked for and provides it."""
    there, asked = {"numpy": "2.1.0", "torch": "2.11.0+cu128", "ipywidgets": "7.7.1"}, []
    monkeypatch.setattr(here, "_version", there.get)
    monkeypatch.setattr(here.metadata, "requires", lambda name: LINES)

    def pip(command, **kwargs):
        constraints = Path(command[command.index("-c") + 1]).read_text(encoding="utf-8").splitlines()
        wanted = command[command.index("-c") + 2 :]
        asked.append((wanted, constraints))
        there.update({project_name(line): "9.9" for line in wanted})
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(here.subprocess, "run", pip)
    monkeypatch.setattr(here.sys, "platform", "linux")
    return types.SimpleNamespace(there=there, asked=asked)


def test_what_is_missing_is_what_the_chapters_need_here(installed):
    assert missing_requirements(LINES) == ["Not-There>=2", "anywidget>=0.9"]


def test_it_is_installed_with_everything_else_held(installed, monkeypatch):
    monkeypatch.setattr(here, "stale_modules", list)
    said = []
    prepare(said.append)
    ((wanted, constraints),) = installed.asked
    assert wanted == ["Not-There>=2", "anywidget>=0.9"]
    assert any(line.startswith("torch==") for line in constraints) and not any("+" in line for line in constraints)
    assert said[0] == "Installing not-there, anywidget …" and said[1].startswith("minibatcher ")
    prepare(said.append)
    assert len(installed.asked) == 1  # nothing more to do


def test_of_two_versions_on_the_path_the_one_that_python_takes_is_held(installed, monkeypatch):
    found = [types.SimpleNamespace(metadata={"Name": "Old_Twin"}, version=version) for version in ("2.0", "1.0")]
    monkeypatch.setattr(here.metadata, "distributions", lambda: found)
    here.install(["not-there"])
    assert installed.asked == [(["not-there"], ["old-twin==2.0"])]


def test_a_large_package_that_most_of_the_book_does_without_is_only_named(installed, monkeypatch):
    monkeypatch.setattr(here, "stale_modules", list)
    monkeypatch.setattr(here.metadata, "requires", lambda _: ["numpy>=1.26", "triton>=3.4; sys_platform == 'linux'"])
    said = []
    prepare(said.append)
    assert installed.asked == [] and said[0].startswith("Without triton: only the kernels of chapter 7.3")
    installed.there["triton"] = "3.6.0"
    prepare(said.append)
    assert len(said) == 3 and said[2].startswith("minibatcher ")


def test_a_notebook_shows_what_is_missing_without_the_way_to_it():
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    lines = []
    fake = types.SimpleNamespace(
        _get_exc_info=lambda exc_tuple: (MissingDependency, MissingDependency("no x: pip install x"), None),
        _showtraceback=lambda kind, value, shown: lines.extend(shown),
        call_pdb=False,
    )
    shell.showtraceback(fake)
    assert lines == ["Missing: no x: pip install x"]


@pytest.mark.parametrize("name", ["torch", "ipywidgets"])
def test_torch_and_ipywidgets_are_never_installed(installed, monkeypatch, name):
    del installed.there[name]
    monkeypatch.setattr(here.metadata, "requires", lambda _: [*LINES, "torch>=2.8", "ipywidgets>=7.7; extra == 'lab'"])
    with pytest.raises(MissingDependency, match=f"{name} is missing, and is not installed from here"):
        prepare(lambda line: None)
    assert installed.asked == []


def test_a_pip_that_fails_is_quoted(installed, monkeypatch):
    monkeypatch.setattr(
        here.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, "", "no route to host")
    )
    with pytest.raises(MissingDependency, match=r"could not install Not-There>=2, anywidget>=0\.9:\nno route to host"):
        prepare(lambda line: None)


def test_a_pip_that_only_says_so_is_not_believed(installed, monkeypatch):
    monkeypatch.setattr(here.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, "", ""))
    with pytest.raises(MissingDependency, match="can't be found: restart the kernel"):
        prepare(lambda line: None)


def test_what_is_too_old_is_said_and_left_alone(installed):
    installed.there |= {"numpy": "1.9.3", "not-there": "2.0"}
    assert too_old(LINES) == ["numpy 1.9.3 is installed, minibatcher needs 1.26 or later"]
    with pytest.raises(MissingDependency, match="pip install --upgrade it, then restart the kernel"):
        prepare(lambda line: None)


def test_a_module_of_another_version_than_on_disk_needs_a_restart(installed, monkeypatch):
    modules = {
        "numpy": types.SimpleNamespace(__version__="2.0.2"),
        "torch": types.SimpleNamespace(__version__="2.11.0"),
    }
    assert stale_modules(modules) == ["numpy 2.0.2 is loaded, while 2.1.0 is installed"]
    monkeypatch.setattr(here, "stale_modules", lambda: stale_modules(modules))
    with pytest.raises(MissingDependency, match=r"So restart the kernel \(on Colab: Runtime → Restart session"):
        prepare(lambda line: None)


def test_settings_are_chosen_by_the_machine_and_said(capsys):
    assert Here("cpu", "CPU").choose(16, gpu=128) == 16
    assert capsys.readouterr().out == ""
    assert Here("cuda", "T4").choose(16, gpu=128) == 128
    assert capsys.readouterr().out == "On the GPU: 128, where a CPU takes 16.\n"


def test_a_gpu_is_used_where_there_is_one(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: types.SimpleNamespace(name="Tesla T4"))
    found = here.look_around()
    assert (found.device, found.name) == ("cuda", "Tesla T4")
    assert "Tesla T4.\nChapters choose larger settings" in capsys.readouterr().out


def test_it_needs_nothing_but_python():
    """On Colab it runs before minibatcher's own requirements are there."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import minibatcher.here; print('torch' in sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code, str(ROOT)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_cell_says_why_it_could_not_install(tmp_path):
    """The set-up cell in an environment without minibatcher, and a source that is not there."""
    cell = (ROOT / "minibatcher" / "labkit" / "set_up_cell.py").read_text(encoding="utf-8")
    (tmp_path / "cell.py").write_text(cell, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path = [p for p in sys.path if {str(ROOT)!r} not in p]\n"
         "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f)]\n" + cell],
        capture_output=True, text=True, env={"MINIBATCHER_SOURCE": str(tmp_path / "none"), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 1
    assert "minibatcher could not be installed from" in done.stderr and "none" in done.stderr
