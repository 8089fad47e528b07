"""The parts of a reader's own server: the answers in the labs beside the notebook, or the reference for a missing one.

And the tournament of the capstone.
"""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import stand_ins
from .checks import judge, key_of
from .judging import said
from .manifest import load_manifest

PARTS = (
    "7.1-static-loop",
    "7.2-next-batch",
    "7.2-four-ends",
    "7.3-chunk-planner",
    "7.3-ragged-attention",
    "7.4-block-pool",
)


@dataclass(frozen=True)
class Part:
    exercise: str
    name: str
    answer: Any
    whose: str  # "yours" or "reference"
    why: str


class Parts:
    """`parts.plan_step` and the others, each the reader's own where it passes its check."""

    def __init__(self, found: list[Part]) -> None:
        self.found = found

    def __getattr__(self, name: str) -> Any:
        for part in self.__dict__.get("found", ()):
            if part.name == name:
                return part.answer
        raise AttributeError(f"no part is named {name!r}; there are {', '.join(part.name for part in self.found)}")


def my_parts(folder: str | Path | None = None, *, seed: int | None = None) -> Parts:
    """Read the labs in `folder` (the notebook's own), check each part, print whose it is, and return them."""
    home = Path(folder) if folder is not None else Path.cwd()
    known = load_manifest()
    with redirect_stdout(io.StringIO()):  # what answers print would tear the table
        found = [_part(exercise_id, home, seed) for exercise_id in PARTS if exercise_id in known]
    width = max([4, *(len(part.name) for part in found)])
    print(f"{'part':{width}}  {'whose':9}  why")
    for part in found:
        print(f"{part.name:{width}}  {part.whose:9}  {part.why}")
    return Parts(found)


def _part(exercise_id: str, home: Path, seed: int | None) -> Part:
    exercise = load_manifest()[exercise_id]
    path = home / f"{exercise.lab}.ipynb"
    try:
        answer = _answer(path, exercise_id, exercise.name)
        result = judge(exercise_id, answer, seed=seed)
        if result.ok:
            return Part(exercise_id, exercise.name, answer, "yours", "passes its check")
        alone = re.search(r"raised (NameError: name '\w+' is not defined)", result.message)
        unwritten = result.message.startswith("not written yet")
        why = f"fails its check; see {exercise.lab}.ipynb"
        if alone or unwritten:
            why = f"{alone[1]}; define it in its cell" if alone else "not written yet"
    except _Missing as error:
        why = str(error)
    except Exception as error:  # a reader's cell may do anything
        why = f"its cell raised {said(error)}"
    why = why if len(why) <= 70 else f"{why[:69]}…"
    return Part(exercise_id, exercise.name, reference(exercise_id), "reference", why)


def reference(exercise_id: str) -> Any:
    """A right answer that can be used as a part of a server."""
    exercise = load_manifest()[exercise_id]
    return getattr(stand_ins, exercise.name, None) or key_of(exercise).answer


class _Missing(Exception):
    """The sentence says what is not there."""


def _answer(path: Path, exercise_id: str, name: str) -> Any:
    """What the last written answer cell defines, with the lab's given cells before it."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [(_source(c), c.get("metadata", {})) for c in cells if c["cell_type"] == "code"]
    except FileNotFoundError:
        raise _Missing(f"{path.name} is not beside this notebook") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise _Missing(f"{path.name} can't be read as a notebook") from None
    answers = [source for source, _ in code if source.split("\n", 1)[0].strip() == f"# Exercise {exercise_id}"]
    if not answers:
        raise _Missing(f"{path.name} has no cell that begins with # Exercise {exercise_id}")
    written = [
        source for source in answers if not re.search(r"^[^#\n]*raise NotImplementedError\(", source, re.MULTILINE)
    ]
    if not written:
        raise _Missing("not written yet")
    room: dict[str, Any] = {"__name__": "__lab__"}
    for source, metadata in code:
        if "given" in metadata.get("tags", []):
            exec(compile(source, path.name, "exec"), room)
    exec(compile(written[-1], path.name, "exec"), room)
    if name not in room:
        raise _Missing(f"its cell defines no {name}")
    return room[name]


def _source(cell: dict) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def leaderboard(policy: Callable, *, seed: int = 7, size: int = 120) -> None:
    """Play `policy` and four others on one busy workload, and print who served how many in time."""
    from .keys.capstone import NAIVE, best_known, decode_first
    from .tasks.capstone import BadPlan, play_requests, workload

    arrivals = workload(random.Random(seed), size, pace=2.5)
    entrants = {"yours": policy, "reference": best_known, "decode first": decode_first, **NAIVE}
    board = []
    for name, entrant in entrants.items():
        try:
            board.append((len(play_requests(arrivals, 512, 240, entrant)), name, ""))
        except BadPlan as error:
            board.append((0, name, f"  {error}"))
    for good, name, trouble in sorted(board, key=lambda row: -row[0]):
        print(f"{name:13} {good:4} of {size} requests in time  {'█' * round(40 * good / size)}{trouble}")
