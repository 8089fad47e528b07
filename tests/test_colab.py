"""The book on the versions that Colab has: the set-up cell in kernels without the book, chapter 7.1, the widgets."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from datetime import datetime
from pathlib import Path

import colab_environment
import pytest
from colab_environment import ROOT, all_packages, folder, obstacle, pins, python
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from minibatcher.here import FOR_NOTEBOOKS, project_name
from minibatcher.labkit.manifest import load_manifest
from minibatcher.labkit.notebooks import SET_UP, dumps, read_source, set_up_cell
from minibatcher.tomlfile import read_toml

nbformat = pytest.importorskip("nbformat")

COLAB = folder()
CHAPTER = "7.1-static-and-dynamic"
on_colab = pytest.mark.skipif(obstacle(COLAB) is not None, reason=str(obstacle(COLAB)))

RUN = """
import sys, nbformat
from nbclient import NotebookClient
nb = nbformat.read(sys.argv[1], 4)
NotebookClient(nb, kernel_name="python3", timeout=180, allow_errors=True).execute()
nbformat.write(nb, sys.argv[1])
"""


class Machine:
    """A machine as Colab gives it: its packages, no minibatcher, an empty folder to work in; and no package index."""

    def __init__(self, home: Path, without: tuple[str, ...] = ()) -> None:
        self.work, self.environment = home / "content", home / "environment"
        self.work.mkdir(parents=True)
        venv.create(self.environment, symlinks=True)
        links = home / "links"
        links.mkdir()
        for source in all_packages(COLAB):
            if not source.name.startswith(without):
                (links / source.name).symlink_to(source)
        (self.packages / "colab.pth").write_text(f"{links}\n", encoding="utf-8")
        dropped = ("PYTHONPATH", "MPLBACKEND", "TRITON_INTERPRET")  # of this run, not of a reader's kernel
        self.variables = {name: value for name, value in os.environ.items() if name not in dropped} | {
            **{f"JUPYTER_{kind}_DIR": str(home / kind) for kind in ("CONFIG", "DATA", "RUNTIME")},
            **{"IPYTHONDIR": str(home / "ipython"), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"},
            **{"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2"},
        }

    @property
    def packages(self) -> Path:
        return colab_environment.packages(self.environment)

    def installed(self) -> set[str]:
        return {path.name for path in self.packages.iterdir()} - {"colab.pth"}

    def run(self, nb, **variables: str):
        """The notebook, run from top to bottom in a fresh kernel, whatever fails in it."""
        path = self.work / "notebook.ipynb"
        path.write_text(dumps(nb), encoding="utf-8")
        command = [str(python(self.environment)), "-c", RUN, str(path)]
        environment = self.variables | variables
        done = subprocess.run(command, cwd=self.work, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return nbformat.read(path, 4)

    def cells(self, *codes: str, **variables: str) -> list[str]:
        """What each of these cells showed, as text."""
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
        return [shown(cell) for cell in self.run(nb, **variables).cells]


def shown(cell) -> str:
    parts = [
        "\n".join(out.traceback) if out.output_type == "error" else out.get("text", "") + str(out.get("data", ""))
        for out in cell.outputs
    ]
    return "".join(parts)


def a_wheel(target: Path, version: str) -> Path:
    """minibatcher as it is here, under some version, as a wheel."""
    tree = target / "tree"
    shutil.copytree(ROOT / "minibatcher", tree / "minibatcher", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name, line in (("pyproject.toml", 'version = "{}"'), ("minibatcher/__init__.py", '__version__ = "{}"')):
        text = (tree / name).read_text(encoding="utf-8")
        assert line.format("0.1.0") in text
        (tree / name).write_text(text.replace(line.format("0.1.0"), line.format(version)), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(target), str(tree)], check=True)
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> str:
    return str(a_wheel(tmp_path_factory.mktemp("wheel"), "0.1.0"))


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


SETUP = set_up_cell(ROOT)
READY = "minibatcher 0.1.0 on PyTorch"


@on_colab
def test_the_set_up_installs_the_book_once(machine, wheel):
    first, again = machine.cells(SETUP, SETUP, MINIBATCHER_SOURCE=wheel)
    assert first.startswith(f"Installing minibatcher from {wheel} …\n{READY}")
    assert again.startswith(READY)
    assert {name.split("-")[0] for name in machine.installed()} == {"minibatcher"}  # and nothing else
    (installed,) = machine.cells(SETUP, MINIBATCHER_SOURCE="/nowhere/never-read.whl")
    assert installed.startswith(READY)
    shutil.rmtree(machine.packages / "minibatcher")  # half removed: pip still counts it as installed
    (whole,) = machine.cells(SETUP, MINIBATCHER_SOURCE=wheel)
    assert whole.endswith(again)


@on_colab
def test_a_book_that_is_not_to_be_had_is_told_in_a_few_lines(machine):
    sources = ["", "/nowhere/minibatcher-0.1.0-py3-none-any.whl", "git+http://127.0.0.1:9/a/book@main"]  # no network
    cells = [f"import os; os.environ['MINIBATCHER_SOURCE'] = {source!r}\n{SETUP}" for source in sources]
    *said, follows = machine.cells(*cells, "here")
    for source, sentence in zip(sources, said):
        assert "Not ready: minibatcher " in sentence and source in sentence
        assert len(sentence.splitlines()) <= 5 and "Traceback" not in sentence
    assert "Write in SOURCE, in this cell, where it is to be had." in said[0]
    assert "address in SOURCE, in this cell, is right" in said[1] and "No such file or directory" in said[1]
    assert "NameError" in follows
    assert machine.installed() == set()


@on_colab
def test_a_folder_of_that_name_is_no_obstacle_and_a_module_is_named(machine, wheel):
    (machine.work / "minibatcher").mkdir()
    _, ready = machine.cells("import minibatcher", SETUP, MINIBATCHER_SOURCE=wheel)
    assert READY in ready
    (machine.work / "minibatcher.py").write_text("", encoding="utf-8")
    (said,) = machine.cells(SETUP, MINIBATCHER_SOURCE=wheel)
    assert "Not ready: minibatcher is installed, but" in said and f"{machine.work}, rename it" in said
    assert len(said.splitlines()) <= 3


@on_colab
def test_another_version_than_the_one_in_memory_asks_for_a_restart(machine, wheel, tmp_path):
    newer = a_wheel(tmp_path / "newer", "0.2.0")
    pip = "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', {!r}])"
    _, _, said = machine.cells(SETUP, pip.format(str(newer)), SETUP, MINIBATCHER_SOURCE=wheel)
    assert said.startswith("Missing: minibatcher 0.1.0 is loaded, while 0.2.0 is installed. So restart the kernel")
    assert len(said.splitlines()) == 1
    (after,) = machine.cells(SETUP, MINIBATCHER_SOURCE=wheel)
    assert after.startswith("minibatcher 0.2.0 on PyTorch")


@on_colab
def test_what_the_book_needs_comes_by_pip_once_there_is_a_network_save_triton(tmp_path, wheel):
    machine = Machine(tmp_path / "machine", without=("anywidget", "triton"))
    (said,) = machine.cells(SETUP, MINIBATCHER_SOURCE=wheel)
    assert "Missing: pip could not install anywidget>=0.9:" in said and "Traceback" not in said
    shelf = repacked(colab_environment.packages(COLAB), "anywidget", tmp_path)
    ready, tried = machine.cells(
        SETUP,
        "import torch\nfrom minibatcher.attention import choose_attention\n"
        "choose_attention('triton', 'cpu', torch.float32)",
        MINIBATCHER_SOURCE=wheel,
        PIP_FIND_LINKS=str(shelf),
    )
    without = "Without triton: only the kernels of chapter 7.3 and of its lab need it: %pip install triton\n"
    if sys.platform.startswith("linux"):  # elsewhere it is not asked for
        assert ready.startswith(f"Installing anywidget …\n{without}{READY}") and "Triton is not installed" in tried
    assert {name.split("-")[0] for name in machine.installed()} == {"anywidget", "minibatcher"}


def repacked(home: Path, project: str, target: Path) -> Path:
    """A folder with the wheel of an installed project that is plain Python."""
    (info,) = home.glob(f"{project}-*.dist-info")
    name = info.name.removesuffix(".dist-info")
    for source in (home / project, info):
        shutil.copytree(source, target / "unpacked" / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    shelf = target / "shelf"
    shutil.make_archive(str(shelf / name), "zip", target / "unpacked")
    (shelf / f"{name}.zip").rename(shelf / f"{name}-py3-none-any.whl")
    return shelf


@pytest.fixture(scope="module")
def chapter(tmp_path_factory, wheel):
    """Chapter 7.1 as it comes out on a machine that has just been handed out."""
    nb = read_source(ROOT / "chapters" / f"{CHAPTER}.md", load_manifest())
    return Machine(tmp_path_factory.mktemp("colab")).run(nb, MINIBATCHER_SOURCE=wheel)


def saved_cells():
    path = ROOT / "chapters" / f"{CHAPTER}.ipynb"
    return {cell["id"]: cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}


@on_colab
def test_chapter_7_1_runs_and_counts_the_same(chapter, capsys):
    code = [cell for cell in chapter.cells if cell.cell_type == "code"]
    assert [shown(cell) for cell in code if any(out.output_type == "error" for out in cell.outputs)] == []
    assert [shown(cell) for cell in code if any(out.get("name") == "stderr" for out in cell.outputs)] == []
    saved, compared = saved_cells(), 0
    for cell in code:
        if "nbval-check-output" in cell.metadata.get("tags", []):
            text = "".join(line for out in saved[cell.id]["outputs"] for line in out["text"])
            assert text and "".join(out.text for out in cell.outputs) == text
            compared += 1
    assert compared >= 8
    with capsys.disabled():
        print(f"\nchapter 7.1: {seconds_to_first_picture(code):.0f} s from the set-up to the first picture")


def seconds_to_first_picture(code) -> float:
    """From the start of the set-up, which installs the book, to the first picture of the page."""
    when = lambda cell, event: datetime.fromisoformat(cell.metadata["execution"][event].replace("Z", "+00:00"))  # noqa: E731
    first = next(cell for cell in code if any("text/html" in out.get("data", {}) for out in cell.outputs))
    return (when(first, "shell.execute_reply") - when(code[0], "iopub.execute_input")).total_seconds()


@on_colab
def test_pictures_of_chapter_7_1_stand_without_a_widget_manager(chapter):
    pictures = 0
    for cell in chapter.cells:
        kinds = [set(out["data"]) for out in cell.get("outputs", []) if "data" in out]
        saved = [set(out["data"]) for out in saved_cells()[cell.id].get("outputs", []) if "data" in out]
        if "unsaved" not in cell.metadata.get("tags", []):
            assert kinds == saved
        for out in cell.get("outputs", []):
            if "text/html" in out.get("data", {}):
                assert len(out.data["text/plain"]) > 100
                if "<pre" not in out.data["text/html"]:  # that is code, coloured
                    pictures += 1
                    assert 'alt="' in out.data["text/html"] and "data:image/png" in out.data["text/html"]
    assert pictures >= 3


@on_colab
def test_every_widget_is_built_on_those_versions():
    tests = ["tests/test_widgets.py", "tests/test_live.py"]
    command = [str(python(COLAB)), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *tests]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.match(r"\d+ passed,? ", done.stdout.splitlines()[-1])  # none was skipped for want of a package


@on_colab
def test_colab_is_asked_to_show_widgets_that_are_not_its_own(tmp_path):
    """Colab shows anywidget's kind once its manager for such widgets is on; anywidget sees to it."""
    code = """
import sys, types
asked, output = [], types.ModuleType("google.colab.output")
output.enable_custom_widget_manager = lambda: asked.append(True)
output._widgets = types.SimpleNamespace(_installed_url="the manager")
sys.modules |= {"google.colab": types.ModuleType("google.colab"), "google.colab.output": output}
from minibatcher.viz import padding_view
widget = padding_view().widget()
print(asked, widget._repr_mimebundle_()[1])
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [str(python(COLAB)), "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("[True] {'application/vnd.jupyter.widget-view+json'"), done.stderr
    assert "'custom_widget_manager': {'url': 'the manager'}" in done.stdout


def test_the_book_asks_for_nothing_newer_than_colab_has():
    project = read_toml(ROOT / "pyproject.toml")["project"]
    colab = {project_name(name): version for name, version in (pins() | pins(compared=True)).items()}
    for_notebooks = [line for line in project["optional-dependencies"]["lab"] if project_name(line) in FOR_NOTEBOOKS]
    needed = [Requirement(line) for line in (*project["dependencies"], *for_notebooks)]
    too_new = [
        f"{needs}, and Colab has {colab[needs.name.lower()]}"
        for needs in needed
        if (needs.marker is None or needs.marker.evaluate({"python_version": colab["python"], "sys_platform": "linux"}))
        and not needs.specifier.contains(colab[needs.name.lower()])
    ]
    assert too_new == []
    assert SpecifierSet(project["requires-python"]).contains(colab["python"])


def test_every_notebook_with_code_begins_with_the_set_up():
    paths = [path for kind in ("chapters", "labs", "solutions") for path in (ROOT / kind).glob("*.ipynb")]
    for path in paths:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert not code or SET_UP in code[0]["metadata"]["tags"], path.name
    assert len(paths) > 15


def test_a_copy_that_is_published_elsewhere_is_installed_from_there(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[project.urls]\nRepository = "https://example.org/a/book"\n', encoding="utf-8"
    )
    assert '"git+https://example.org/a/book@main")' in set_up_cell(tmp_path)
