"""From MyST Markdown to notebooks, without running anything: cell ids, metadata, stubs, and one way of writing them.

A code cell of a lab's master is an answer (`:exercise: 7.1-padding`, with a solution region) or a check
(`:check: 7.1-padding`); a line `{{exercise 7.1-padding}}` in the prose becomes the exercise's heading.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

from ..errors import MinibatcherError, MissingDependency
from ..tomlfile import read_toml
from .manifest import Exercise

GIVEN = "given"  # tag of a lab's cell that answers may build on: imports and plain Python, which the grader runs too
FOLDED = "folded"  # tag of a cell whose code is no part of the story, such as one that draws a chapter's first picture
SET_UP = "set-up"  # tag of an empty cell of a chapter, which the build fills
SPOILER = "spoiler"  # tag of a cell whose saved output answers an earlier question, and is folded until it is run
UNSAVED = "unsaved"  # tag of a cell whose output a reader should not meet before running it, such as an answer
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
_HEADING = re.compile(r"^\{\{exercise (\S+)\}\}$", re.MULTILINE)


class BuildError(MinibatcherError):
    """A source that can't become a notebook; the sentence names the file and what to change."""


def require(module: str) -> Any:
    """Import a package that only the build of the book needs."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(
            f"building the notebooks needs the package {module}: pip install 'minibatcher[lab]'"
        ) from error


def read_page(path: Path) -> str:
    """A Markdown file's text. Raises BuildError for what is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BuildError(f"can't read {path}: {error}") from error


def pyproject(root: Path) -> dict[str, Any]:
    """What pyproject.toml says. Raises BuildError."""
    try:
        return read_toml(root / "pyproject.toml")
    except (OSError, ValueError) as error:
        raise BuildError(f"can't read pyproject.toml, which says where the book is published: {error}") from error


def repository(root: Path) -> str:
    """Where the book is published. Raises BuildError where pyproject.toml does not say it."""
    try:
        address = pyproject(root)["project"]["urls"]["Repository"].rstrip("/")
    except (AttributeError, LookupError, TypeError):
        address = ""
    if not re.fullmatch(r"https?://[^\s/]+/\S+", address):
        raise BuildError('pyproject.toml names no Repository = "https://…" under [project.urls]')
    return address


def read_source(path: Path, exercises: dict[str, Exercise]) -> Any:
    """The notebook that a Markdown source describes, with stable ids, no outputs and only our own metadata."""
    text = read_page(path)
    nb = require("jupytext").reads(text, fmt="md:myst")
    nb.nbformat, nb.nbformat_minor = 4, 5
    nb.metadata = require("nbformat").from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(nb.cells):
        role = _role(cell, path)
        if role:
            kind, exercise_id = role
            if exercise_id not in exercises:
                raise BuildError(f"{path.name}: exercise {exercise_id!r} is not in exercises.toml; add it there")
            cell.id = f"{_slug(exercise_id)}-{kind}"
            cell.metadata["nbgrader"] = _nbgrader(cell.id, kind, exercises[exercise_id])
            cell.metadata["minibatcher"] = {"exercise": exercise_id, "role": kind}
            mark = f"# Exercise {exercise_id}"  # by which an answer is found when its notebook has lost its ids
            if kind == "answer" and cell.source.split("\n")[0] != mark:
                cell.source = f"{mark}\n{cell.source}"
        else:
            cell.id = f"{_slug(path.stem)}-{number:03d}"[-64:]
        if cell.cell_type == "markdown":
            cell.source = _HEADING.sub(lambda match: _heading(match[1], exercises, path), cell.source)
        elif SET_UP in cell.metadata.get("tags", []):
            if cell.source.strip():
                raise BuildError(
                    f"{path.name}: the {SET_UP} cell is filled by the build (set_up_cell.py); leave it empty"
                )
            cell.source = set_up_cell(path.parents[1])
            _fold(cell, path)
        elif not cell.source.strip():
            raise BuildError(f"{path.name}: code cell {number} is empty; take it out")
        elif FOLDED in cell.metadata.get("tags", []):
            _fold(cell, path)
    tagged = [cell for cell in nb.cells if SPOILER in cell.metadata.get("tags", [])]
    for cell in [*tagged, *spoilers(nb.cells)]:
        if UNSAVED in cell.metadata.get("tags", []):
            continue
        # JupyterLab shows it when the cell is run.
        cell.metadata["jupyter"] = cell.metadata.get("jupyter", {}) | {"outputs_hidden": True}
    return nb


def set_up_cell(root: Path) -> str:
    """The code of a set-up cell: what is not installed comes from where this book is published."""
    code = Path(__file__).with_name("set_up_cell.py").read_text(encoding="utf-8").strip()
    if not (root / "pyproject.toml").exists():  # a folder with a few chapters of its own: the reader says where
        return code
    unset, filled = '("MINIBATCHER_SOURCE", "")', f'("MINIBATCHER_SOURCE", "git+{repository(root)}@main")'
    if code.count(unset) != 1:
        raise BuildError(f"set_up_cell.py should hold {unset} once, for the address to be filled in")
    return code.replace(unset, filled)


def _fold(cell: Any, path: Path) -> None:
    """Show the first line of the code alone, in JupyterLab; on Colab, a form with its title."""
    if not cell.source.startswith("# @title "):
        raise BuildError(f"{path.name}: a folded cell must begin with a line `# @title …` that says what is in it")
    cell.metadata |= {"cellView": "form", "jupyter": {"source_hidden": True}}


def spoilers(cells: list[Any]) -> list[Any]:
    """Code cells whose saved output would answer a question before the reader has guessed.

    Those between `name = predict(…)` and `name.reveal(…)`, and those that follow the latter before any prose.
    """
    found: dict[str, Any] = {}
    for i, cell in enumerate(cells):
        if cell.cell_type != "code":
            continue
        for guess in re.findall(r"^(\w+) = predict\(", cell.source, re.MULTILINE):
            later = [j for j in range(i, len(cells)) if f"{guess}.reveal(" in cells[j].source]
            stop = later[0] + 1 if later else i
            while stop < len(cells) and later and cells[stop].cell_type == "code":
                stop += 1
            found |= {c.id: c for c in cells[i + 1 : stop] if c.cell_type == "code" and "predict(" not in c.source}
    return list(found.values())


def student_copy(nb: Any) -> Any:
    """The notebook with each solution region replaced by a line that raises NotImplementedError."""
    nb = copy.deepcopy(nb)
    for cell in nb.cells:
        if role_of(cell) == "answer":
            cell.source = stub(cell.source, cell.metadata["minibatcher"]["exercise"])
    return nb


def stub(source: str, exercise_id: str) -> str:
    """Replace each solution region; the stub line is indented like the region's first line."""
    lines: list[str] = []
    inside = False
    for line in source.split("\n"):
        if line.strip() == BEGIN and not inside:
            inside = True
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f'{indent}raise NotImplementedError("your answer to exercise {exercise_id}")')
        elif line.strip() == END and inside:
            inside = False
        elif line.strip() in (BEGIN, END):
            raise BuildError(f"exercise {exercise_id!r}: {line.strip()!r} without its partner")
        elif not inside:
            lines.append(line)
    if inside:
        raise BuildError(f"exercise {exercise_id!r}: {BEGIN!r} without {END!r}")
    return "\n".join(lines)


def solution_lines(source: str) -> list[str]:
    """The lines inside the solution regions, without indentation and comments-only or empty ones."""
    inside, lines = False, []
    for line in map(str.strip, source.split("\n")):
        if line in (BEGIN, END):
            inside = line == BEGIN
        elif inside and line and not line.startswith("#"):
            lines.append(line)
    return lines


def role_of(cell: Any) -> str | None:
    """ "answer", "check", or None for any other cell."""
    return cell.metadata.get("minibatcher", {}).get("role")


def without_outputs(nb: Any) -> Any:
    """The notebook as it was before it ran; nb.metadata.minibatcher holds only digests of its outputs and sources."""
    nb = copy.deepcopy(nb)
    nb.metadata.pop("minibatcher", None)
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nb


def dumps(nb: Any) -> str:
    """One notebook, one text, in the form that Jupyter itself saves: sorted keys, a line of source a line, UTF-8."""
    nbformat = require("nbformat")
    nbformat.validate(nb)
    return nbformat.writes(nb, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"


def _role(cell: Any, path: Path) -> tuple[str, str] | None:
    found = {
        kind: cell.metadata.pop(key)
        for kind, key in (("answer", "exercise"), ("check", "check"))
        if key in cell.metadata
    }
    if len(found) > 1:
        raise BuildError(f"{path.name}: a cell is an exercise or a check, not both ({found})")
    return next(((kind, str(exercise_id)) for kind, exercise_id in found.items()), None)


def _nbgrader(grade_id: str, kind: str, exercise: Exercise) -> dict[str, Any]:
    """Metadata of nbgrader's schema 3, so that an instructor can also use the masters with nbgrader."""
    metadata = {"schema_version": 3, "cell_type": "code", "grade_id": grade_id, "task": False}
    if kind == "answer":
        return metadata | {"grade": False, "locked": False, "solution": True}
    return metadata | {"grade": True, "locked": True, "solution": False, "points": exercise.points}


def _heading(exercise_id: str, exercises: dict[str, Exercise], path: Path) -> str:
    if exercise_id not in exercises:
        raise BuildError(f"{path.name}: heading of {exercise_id!r}, which is not in exercises.toml; add it there")
    return exercises[exercise_id].heading


def _slug(name: str) -> str:
    """Letters, digits and dashes only: what nbgrader and the notebook format allow in an id."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name)
