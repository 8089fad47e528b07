"""Reading notebooks as data, whatever wrote them, and finding the answers in them."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import MinibatcherError
from ..audit import digest_of
from ..manifest import Exercise

_LARGEST = 400 * 2**20  # bytes of a file
_CELLS, _SOURCE = 3000, 200_000  # cells of a notebook, characters of a cell
_FIRST_LINE = re.compile(r"\s*#\s*Exercise\s+([\w.-]+)")


class Unreadable(MinibatcherError):
    """A submission that is no notebook; the sentence says why."""


@dataclass(frozen=True)
class Cell:
    """A code cell: its text, the exercise that its marks name, and whether it is that exercise's answer or check."""

    source: str
    exercise: str | None = None
    role: str | None = None
    tags: tuple[str, ...] = ()


@dataclass
class Lab:
    """A pristine lab: what its given cells and stubs say."""

    name: str
    given: list[str]
    stubs: dict[str, str]
    checks: dict[str, str]
    digest: str


@dataclass
class Answers:
    """What a submission says to one lab. answers: by exercise. others: its further code. remarks: by exercise."""

    answers: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=dict)

    def take(self, later: Answers, lab: Lab) -> None:
        """Answers of a further notebook, where there are none yet or only the stub."""
        for exercise, source in later.answers.items():
            if _bare(self.answers.get(exercise, "")) in ("", _bare(lab.stubs.get(exercise, ""))):
                self.answers[exercise] = source
        self.others += later.others

    def remark(self, exercise: str, sentence: str) -> None:
        self.remarks.setdefault(exercise, []).append(sentence)


def read_cells(path: Path, exercises: dict[str, Exercise]) -> list[Cell]:
    """The code cells of a notebook of any format. Raises Unreadable."""
    if not path.is_file():
        raise Unreadable(f"{path.name} is not a file")
    try:
        if path.stat().st_size > _LARGEST:
            raise Unreadable(f"{path.name} is larger than {_LARGEST >> 20} MiB; clear its outputs")
        data = json.loads(path.read_bytes().decode("utf-8-sig", errors="replace"))
        cells = data["cells"] if "cells" in data else [c for sheet in data["worksheets"] for c in sheet["cells"]]
        code = [cell for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    except OSError as error:
        raise Unreadable(f"{path.name} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError):
        raise Unreadable(f"{path.name} is not a notebook") from None
    slugs = {exercise.replace(".", "-"): exercise for exercise in exercises}
    return [_cell(cell, exercises, slugs) for cell in code[:_CELLS]]


def _cell(cell: dict, exercises: dict[str, Exercise], slugs: dict[str, str]) -> Cell:
    source = cell.get("source", cell.get("input", ""))
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    source = source[:_SOURCE] if isinstance(source, str) else ""
    exercise, role = _marks(cell, source, exercises, slugs)
    tags = _dict(cell.get("metadata")).get("tags")
    return Cell(source, exercise, role, tuple(t for t in tags if isinstance(t, str)) if isinstance(tags, list) else ())


def _marks(
    cell: dict, source: str, exercises: dict[str, Exercise], slugs: dict[str, str]
) -> tuple[str | None, str | None]:
    metadata = _dict(cell.get("metadata"))
    ours = _dict(metadata.get("minibatcher"))
    if ours.get("role") in ("answer", "check") and ours.get("exercise") in list(exercises):
        return ours["exercise"], ours["role"]
    for mark in (cell.get("id"), _dict(metadata.get("nbgrader")).get("grade_id")):
        for role in ("answer", "check"):
            if isinstance(mark, str) and mark.endswith(f"-{role}") and mark.removesuffix(f"-{role}") in slugs:
                return slugs[mark.removesuffix(f"-{role}")], role
    first = _FIRST_LINE.match(source)
    if first and first[1].rstrip(".:") in exercises:
        return first[1].rstrip(".:"), "answer"
    return None, None


def _dict(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def read_lab(path: Path, exercises: dict[str, Exercise]) -> Lab:
    """A lab as the build wrote it. Raises Unreadable, also if somebody has worked in it."""
    cells = read_cells(path, exercises)
    if not _pristine(path):
        raise Unreadable(f"{path} is not as it was built; grade against an untouched copy of the labs, named by --labs")
    return Lab(
        path.stem,
        [cell.source for cell in cells if "given" in cell.tags],
        {cell.exercise: cell.source for cell in cells if cell.exercise and cell.role == "answer"},
        {cell.exercise: cell.source for cell in cells if cell.exercise and cell.role == "check"},
        hashlib.sha256(path.read_bytes()).hexdigest()[:16],
    )


def _pristine(path: Path) -> bool:
    data = json.loads(path.read_text(encoding="utf-8"))
    sources = [(cell.get("cell_type"), "".join(cell.get("source", ""))) for cell in data.get("cells", [])]
    return _dict(_dict(data.get("metadata")).get("minibatcher")).get("sources") == digest_of(sources)


def lab_of(cells: list[Cell], labs: dict[str, Lab], exercises: dict[str, Exercise]) -> str | None:
    """The lab that a submission answers: the one most of whose exercises are in it, by mark or by name."""
    votes: Counter[str] = Counter()
    for exercise in exercises.values():
        if exercise.lab in labs:
            votes[exercise.lab] += sum(
                (cell.exercise == exercise.id) * 100 + bool(_defines(cell.source, exercise)) for cell in cells
            )
    return votes.most_common(1)[0][0] if votes and any(votes.values()) else None


def _defines(source: str, exercise: Exercise) -> bool:
    return bool(re.search(rf"^(?:async\s+def|def|class)\s+{re.escape(exercise.name)}\b", source, re.MULTILINE))


def find_answers(cells: list[Cell], lab: Lab, exercises: list[Exercise]) -> Answers:
    found = Answers()
    used: set[int] = set()
    for exercise in exercises:
        marked = [i for i, c in enumerate(cells) if c.exercise == exercise.id and c.role == "answer"]
        named = [i for i, c in enumerate(cells) if c.exercise is None and _defines(c.source, exercise)]
        stub = _bare(lab.stubs.get(exercise.id, ""))
        written = [i for i in [*named, *marked] if _bare(cells[i].source) not in ("", stub)]
        # A marked cell without the function (emptied, or moved elsewhere) gives way to a cell that has it.
        better = [i for i in written if _defines(cells[i].source, exercise)] or written
        chosen = max(better, default=max(marked, default=None))
        used.update([*marked, *named])
        if chosen is None:
            found.remark(exercise.id, "no cell with an answer was found")
        else:
            found.answers[exercise.id] = cells[chosen].source
            if len(better) > 1:
                found.remark(exercise.id, f"{len(better)} cells answer it; the last one counts")
        checks = [i for i, c in enumerate(cells) if c.exercise == exercise.id and c.role == "check"]
        edited = [i for i in checks if cells[i].source.strip() != lab.checks.get(exercise.id, "").strip()]
        used.update(set(checks) - set(edited))  # an edited one may define what an answer uses
        if edited:
            found.remark(exercise.id, "its check cell was edited, which changes nothing here")
    found.others = [cell.source for i, cell in enumerate(cells) if i not in used and "set-up" not in cell.tags]
    return found


def _bare(source: str) -> str:
    return _FIRST_LINE.sub("", source, count=1).strip()


def _of_a_program(path: Path) -> bool:
    """Check points, and what a Mac puts into archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.parts)


def students(paths: list[Path]) -> list[tuple[str, list[Path]]]:
    """Names with their files: a folder holds a file or a folder for each student."""
    found: dict[str, list[Path]] = {}

    def add(name: str, files: list[Path]) -> None:
        unique = name if name not in found else f"{files[0].resolve().parent.name}/{name}"
        number = 2
        while unique in found:
            unique, number = f"{name} ({number})", number + 1
        found[unique] = files

    for path in paths:
        if not path.is_dir():
            add(path.stem, [path])
            continue
        for entry in sorted(path.iterdir()):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                inside = sorted(p for p in entry.rglob("*.ipynb") if not _of_a_program(p.relative_to(entry)))
                if inside:
                    add(entry.name, inside)
            elif entry.suffix == ".ipynb":
                add(entry.stem, [entry])
    return list(found.items())
