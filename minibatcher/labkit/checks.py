"""Instant checks: `check("7.1-padding", my_function)` puts the reader's answer through random cases, says what differed
first, and offers a hint."""

from __future__ import annotations

import os
import random
import sys
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from typing import Any, TextIO

from ..errors import UnknownName
from .judging import CheckResult, Key, Task, guarded, verdict
from .manifest import Exercise, ManifestError, load_manifest
from .time_limit import time_limit

_PRINTED = 2000  # characters that an answer may print in one check
LINE = 100  # characters: JupyterLab would break a longer line in the middle of a word
SEED_VARIABLE = "MINIBATCHER_CHECK_SEED"  # set by the build, so that solutions look the same whenever they are built
_hints_shown: dict[str, int] = {}


class CheckFailed(AssertionError):
    """A check that did not pass. A notebook shows its message without a traceback; nbval and pytest see a failure."""

    def _render_traceback_(self) -> list[str]:
        return [short for line in str(self).splitlines() for short in _fitting(line).split("\n")]


def check(exercise_id: str, answer: Any, *, seed: int | None = None) -> CheckResult:
    """Judge `answer`, print the result and return it. Raises CheckFailed, with the same message, if it is wrong.

    seed: as a result shows it, to have the same inputs again; None draws new ones each time.
    """
    result = judge(exercise_id, answer, seed=seed)
    if not result.ok:
        raise CheckFailed(f"{result}\n{_hint_offer(exercise_id)}")
    print(_fitting(str(result)))
    return result


def judge(exercise_id: str, answer: Any, *, seed: int | None = None) -> CheckResult:
    """Judge `answer` without printing or raising. Raises UnknownName for an exercise that does not exist."""
    exercise = known_exercise(exercise_id)
    task, key = task_of(exercise), key_of(exercise)
    seed = _any_seed() if seed is None else seed
    cases = task.cases(random.Random(seed))
    with (
        redirect_stdout(_Brief(sys.stdout)),
        redirect_stderr(_Brief(sys.stderr)),
        time_limit(exercise.time_limit_s) as limited,
    ):
        outcomes = (guarded(limited, task, arguments, answer) for arguments in cases)
        return verdict(exercise, task, key, cases, outcomes, seed)


def _any_seed() -> int:
    fixed = os.environ.get(SEED_VARIABLE, "")
    return int(fixed) if fixed.isdecimal() else random.SystemRandom().randrange(100_000)


def hint(exercise_id: str) -> None:
    """Print the next hint of an exercise; after the last one, all three. Raises UnknownName."""
    hints = known_exercise(exercise_id).hints
    shown = _hints_shown.get(exercise_id, 0)
    first, last = (shown, shown + 1) if shown < len(hints) else (0, len(hints))
    for number in range(first, last):
        print(_fitting(f"Hint {number + 1} of {len(hints)}: {hints[number]}"))
    _hints_shown[exercise_id] = min(shown + 1, len(hints))


def _fitting(line: str) -> str:
    """A line broken between words, so that it fits the page; its further lines are indented."""
    if len(line) <= LINE:
        return line
    return textwrap.fill(line, LINE, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def known_exercise(exercise_id: str) -> Exercise:
    """Raises UnknownName."""
    exercises = load_manifest()
    if exercise_id not in exercises:
        raise UnknownName("exercise", exercise_id, list(exercises))
    return exercises[exercise_id]


def task_of(exercise: Exercise) -> Task:
    """What its answers are put through: tasks/LAB.py."""
    return _part("tasks", exercise)


def key_of(exercise: Exercise) -> Key:
    """The right answer, and the known wrong ones: keys/LAB.py."""
    return _part("keys", exercise)


def _part(room: str, exercise: Exercise) -> Any:
    parts = getattr(import_module(f".{room}.{exercise.module}", __package__), room.upper())
    if exercise.id not in parts:
        raise ManifestError(f"exercise {exercise.id!r} has no entry in labkit/{room}/{exercise.module}.py")
    return parts[exercise.id]


class _Brief:
    """Passes on the first characters that are written to it, so that a flood of them does not bury the result."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._left = _PRINTED

    def write(self, text: str) -> int:
        if self._left > 0:
            self._stream.write(text[: self._left])
            self._left -= len(text)
            if self._left <= 0:
                self._stream.write("\n… the rest of what your function prints is left out\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _hint_offer(exercise_id: str) -> str:
    shown, total = _hints_shown.get(exercise_id, 0), len(known_exercise(exercise_id).hints)
    if shown < total:
        return f'  Stuck? hint("{exercise_id}") shows hint {shown + 1} of {total}.'
    return f'  All {total} hints are out: hint("{exercise_id}") shows them again.'
