"""Chapters and solutions run from top to bottom in a fresh kernel; an unsolved lab does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from minibatcher.labkit.build import kernel_environment, sources
from minibatcher.labkit.manifest import load_manifest
from minibatcher.labkit.notebooks import dumps, read_source, student_copy

pytest.importorskip("nbval")

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [*sources(ROOT, "chapters"), *sources(ROOT, "solutions")]


def written(path, folder, change=lambda nb: nb):
    """The notebook of a source, made afresh: what a reader did to the one in the tree is no concern of these tests."""
    folder.mkdir(exist_ok=True)
    target = folder / f"{path.stem}.ipynb"
    target.write_text(dumps(change(read_source(path, load_manifest()))), encoding="utf-8")
    return target


def run_notebooks(paths, tmp_path):
    """The classroom's run, in the way of pytest and its own folder, so that no setting of this run gets in."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-c", str(tmp_path / "pytest.ini"), "--rootdir", str(tmp_path)),
            *("-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=120"),
            *map(str, paths),
        ],
        env=kernel_environment(str(tmp_path)) | {"PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )


def test_there_are_chapters_and_solutions():
    assert {path.parent.name for path in SOURCES} == {"chapters", "solutions"}


def test_they_run_from_top_to_bottom(tmp_path):
    result = run_notebooks([written(path, tmp_path / path.parent.name) for path in SOURCES], tmp_path)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


@pytest.mark.parametrize("path", sources(ROOT, "solutions"), ids=lambda path: path.stem)
def test_an_unsolved_lab_is_red_and_says_why(path, tmp_path):
    result = run_notebooks([written(path, tmp_path / "labs", student_copy)], tmp_path)
    assert result.returncode == 1
    assert "not written yet" in result.stdout and 'hint("' in result.stdout
    assert "NotImplementedError: your answer" not in result.stdout


def test_the_naive_loop_is_under_forty_lines():
    nb = read_source(ROOT / "chapters" / "7.1-static-and-dynamic.md", {})
    parts = [cell.source for cell in nb.cells if "def padded(" in cell.source or "def static_batch(" in cell.source]
    assert len(parts) == 2
    assert len([line for line in "\n".join(parts).split("\n") if line.strip()]) < 40
