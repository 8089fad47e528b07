"""Chapters and solutions run from top to bottom in a fresh kernel; an unsolved lab does not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minibatcher.labkit.build import kernel_environment, sources
from minibatcher.labkit.manifest import load_manifest
from minibatcher.labkit.notebooks import BuildError, dumps, read_source, spoilers, student_copy

pytest.importorskip("nbval")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [*sources(ROOT, "chapters"), *sources(ROOT, "solutions")]


def written(path, folder, change=lambda nb: nb):
    """The notebook of a source, made afresh: what a reader did to the one in the tree is no concern of these tests."""
    folder.mkdir(exist_ok=True)
    target = folder / f"{path.stem}.ipynb"
    target.write_text(dumps(change(read_source(path, load_manifest()))), encoding="utf-8")
    return target


def compared(nb, path):
    """The same with what the build saved for cells that print the same everywhere, for nbval to compare."""
    saved = {cell["id"]: cell for cell in json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]}
    for cell in nb.cells:
        if "nbval-check-output" in cell.metadata.get("tags", []):
            there = saved[cell.id]
            assert there["outputs"] and there["execution_count"], (
                f"{cell.id} has nothing to compare"
            )  # nbval would pass
            cell.outputs = nbformat.from_dict(there["outputs"])
            cell.execution_count = there["execution_count"]
    return nb


def run_notebooks(paths, tmp_path):
    """The classroom's run, in the way of pytest and its own folder, so that no setting of this run gets in."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-c", str(tmp_path / "pytest.ini"), "--rootdir", str(tmp_path)),
            *("-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=120"),
            *("--nbval-sanitize-with", str(ROOT / "tests" / "nbval_sanitize.cfg")),
            *map(str, paths),
        ],
        env=kernel_environment(str(tmp_path)) | {"PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=600,
    )


def test_there_are_chapters_and_solutions():
    assert {path.parent.name for path in SOURCES} == {"chapters", "solutions"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path, tmp_path):
    target = written(path, tmp_path / path.parent.name, lambda nb: compared(nb, path))
    result = run_notebooks([target], tmp_path)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


@pytest.mark.parametrize(
    "code, saved, red",
    [
        ("print(2 + 3)", "5\n", False),
        ("print(2 + 3)", "6\n", True),
        ("print('<div id=\"minibatcher-slots-2\">')", '<div id="minibatcher-slots-1">\n', False),
        ("print('data:image/png;base64,AbC=')", "data:image/png;base64,xYz0\n", False),
    ],
)
def test_a_changed_figure_is_red(code, saved, red, tmp_path):
    cell = nbformat.v4.new_code_cell(code, metadata={"tags": ["nbval-check-output"]}, execution_count=1)
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=saved)]
    target = tmp_path / "one.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), target)
    assert run_notebooks([target], tmp_path).returncode == red


@pytest.mark.parametrize("path", sources(ROOT, "solutions"), ids=lambda path: path.stem)
def test_an_unsolved_lab_is_red_and_says_why(path, tmp_path):
    result = run_notebooks([written(path, tmp_path / "labs", student_copy)], tmp_path)
    assert result.returncode == 1
    checks = [exercise.id for exercise in load_manifest().values() if exercise.lab == path.stem]
    assert [name for name in checks if f"✗ {name}: not written yet" not in result.stdout] == []
    failed = int(re.search(r"(\d+) failed", result.stdout.splitlines()[-1])[1])
    # The capstone goes on to use what was not written.
    assert 'hint("' in result.stdout and (failed == len(checks) or path.stem == "capstone")
    assert "NotImplementedError: your answer" not in result.stdout


def cells(*sources):
    """Notebook cells: prose begins with #."""
    make = {True: nbformat.v4.new_markdown_cell, False: nbformat.v4.new_code_cell}
    return [make[source.startswith("#")](source) for source in sources]


@pytest.mark.parametrize(
    "sources, hidden",
    [
        (["x = 1", "g = predict('q', None)", "g.reveal(x)", "print(x)", "# So it is.", "print(x)"], [2, 3]),
        (["g = predict('q', None)", "# That is:", "draw()", "g.reveal(draw)", "# So."], [2, 3]),
        (["g = predict('q', None)", "h = predict('r', None)", "g.reveal(1)", "h.reveal(2)"], [2, 3]),
        (["g = predict('q', None)", "print(2)"], []),
    ],
)
def test_what_would_answer_a_question_is_folded_away(sources, hidden):
    made = cells(*sources)
    assert [i for i, cell in enumerate(made) if cell in spoilers(made)] == hidden


@pytest.mark.parametrize("path", sorted((ROOT / "chapters").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_line_that_jupyterlab_shows_of_a_folded_output_answers_nothing(path):
    """It is the first one that is not empty. Each of its words stands in the code, so none was computed."""
    for cell in nbformat.read(path, as_version=4).cells:
        outputs = cell.get("outputs", [])
        if cell.metadata.get("jupyter", {}).get("outputs_hidden") and outputs and outputs[0].output_type == "stream":
            first = next(filter(None, outputs[0].text.split("\n")))
            computed = [word for word in first.split() if word not in cell.source]
            assert computed == [], f"{first!r} is shown under the question: print a heading first"


def test_a_folded_cell_says_what_is_in_it(tmp_path):
    path = tmp_path / "page.md"
    text = "# A page\n\n```{code-cell} ipython3\n:tags: [folded]\n\n# @title A picture\ndraw()\n```\n"
    path.write_text(text, encoding="utf-8")
    metadata = read_source(path, {}).cells[1].metadata
    assert metadata["jupyter"] == {"source_hidden": True} and metadata["cellView"] == "form"
    path.write_text(text.replace("# @title A picture\n", ""), encoding="utf-8")
    with pytest.raises(BuildError, match="must begin with a line `# @title"):
        read_source(path, {})


def test_the_naive_loop_is_under_forty_lines():
    nb = read_source(ROOT / "chapters" / "7.1-static-and-dynamic.md", {})
    parts = [cell.source for cell in nb.cells if "def padded(" in cell.source or "def static_batch(" in cell.source]
    assert len(parts) == 2
    assert len([line for line in "\n".join(parts).split("\n") if line.strip()]) < 40
