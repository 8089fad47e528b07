"""Every exercise of the labs, as exercises.toml lists it: the build, the checks and the grader read only this."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import MinibatcherError
from ..tomlfile import read_toml

MANIFEST = Path(__file__).with_name("exercises.toml")
_ID = re.compile(r"(7\.[0-4]|capstone)(-[a-z0-9]+)+")


class ManifestError(MinibatcherError):
    """exercises.toml is unreadable, or an entry lacks something; the sentence names the entry and the key."""


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    name: of the function or class that is to be written. lab: its master's file name without ending. rows: of the
    syllabus, which it practises. minutes: that a reader needs. difficulty: 1 to 5. hints: three, from a nudge to nearly
    the answer. time_limit_s: seconds for all calls of one check.
    """

    id: str
    title: str
    name: str
    lab: str
    rows: tuple[str, ...]
    points: int
    minutes: int
    difficulty: int
    hints: tuple[str, str, str]
    time_limit_s: int
    needs_gpu: bool

    def __post_init__(self) -> None:
        where = f"exercise {self.id!r}"
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise ManifestError(f"{where}: an id is a section and a word in small letters, such as 7.1-padding")
        for name in ("title", "name", "lab"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise ManifestError(f"{where}: {name} must be a text, not {getattr(self, name)!r}")
        for name, low, high in (("points", 1, 20), ("minutes", 1, 120), ("difficulty", 1, 5), ("time_limit_s", 1, 300)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ManifestError(f"{where}: {name} must be a whole number from {low} to {high}, not {value!r}")
        if not self.rows or not all(isinstance(row, str) for row in self.rows):
            raise ManifestError(f'{where}: rows must list rows of the syllabus, such as ["1.2"], not {self.rows!r}')
        if type(self.needs_gpu) is not bool:
            raise ManifestError(f"{where}: needs_gpu must be true or false, not {self.needs_gpu!r}")
        hints = self.hints
        if len(hints) != 3 or len(set(hints)) != 3 or not all(isinstance(h, str) and h.strip() for h in hints):
            raise ManifestError(f"{where}: needs three different hints, has {len(set(hints))}")

    @property
    def module(self) -> str:
        """The name of its lab's modules under tasks/ and keys/."""
        return self.lab.replace("-", "_").replace(".", "_")

    @property
    def heading(self) -> str:
        """The line under which the exercise stands in its lab."""
        points = f"{self.points} point{'s' if self.points > 1 else ''}"
        stars = "●" * self.difficulty + "○" * (5 - self.difficulty)
        gpu = " · needs a GPU" if self.needs_gpu else ""
        return (
            f"## Exercise {self.id}: {self.title}\n\n{points} · about {self.minutes} minutes · difficulty {stars}{gpu}"
        )


def read_manifest(path: Path) -> dict[str, Exercise]:
    """Exercises by id, in the file's order. Raises ManifestError."""
    try:
        data = read_toml(path)
    except (OSError, ValueError) as error:
        raise ManifestError(f"can't read the manifest {path}: {error}") from error
    unknown = set(data) - {"exercise"}
    if unknown:
        raise ManifestError(f"{path.name}: unknown table {sorted(unknown)[0]!r}; exercises stand under [[exercise]]")
    exercises: dict[str, Exercise] = {}
    for number, entry in enumerate(data.get("exercise", []), start=1):
        exercise = _exercise(entry, number)
        if exercise.id in exercises:
            raise ManifestError(f"exercise {exercise.id!r} is listed twice in {path.name}")
        exercises[exercise.id] = exercise
    return exercises


@cache
def load_manifest() -> dict[str, Exercise]:
    """The manifest that is installed with the package."""
    return read_manifest(MANIFEST)


def _exercise(entry: dict[str, Any], number: int) -> Exercise:
    where = f"exercise {entry['id']!r}" if "id" in entry else f"exercise number {number}"
    known = [f.name for f in fields(Exercise) if f.default is MISSING]
    missing = [name for name in known if name not in entry]
    if missing:
        raise ManifestError(f"{where} lacks {', '.join(missing)}")
    unknown = [name for name in entry if name not in known]
    if unknown:
        raise ManifestError(f"{where} has an unknown key {unknown[0]!r}; known: {', '.join(known)}")
    if not isinstance(entry["hints"], list):
        raise ManifestError(f"{where}: hints must be a list of three texts, not {entry['hints']!r}")
    if not isinstance(entry["rows"], list):
        raise ManifestError(f"{where}: rows must be a list, not {entry['rows']!r}")
    return Exercise(**(entry | {name: tuple(entry[name]) for name in ("hints", "rows")}))
