"""Instant checks: `check("7.1-padding", my_function)` calls the reader's function and says what differed.

Behaviour only: random inputs in, whole numbers out, compared with a reference. What is inside, how fast it runs and
which class an object has is never looked at.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import UnknownName
from .manifest import load_manifest
from .time_limit import TimeLimitReached, time_limit

_hints_shown: dict[str, int] = {}


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that readers give, and what to tell them."""

    answer: Callable[..., Any]
    message: str


@dataclass(frozen=True)
class Judge:
    """How one exercise is judged.

    answer: a right solution. plain: turns what a function returned into plain data; raises TypeError with a sentence.
    cases: argument tuples for a random stream, the smallest first, so that the first failure is easy to follow.
    names: of the arguments, for messages. success: what to say when all is well.
    """

    answer: Callable[..., Any]
    plain: Callable[[Any], Any]
    cases: Callable[[random.Random], list[tuple]]
    names: tuple[str, ...]
    success: str
    mistakes: tuple[Mistake, ...] = field(default=())


@dataclass(frozen=True)
class CheckResult:
    """The outcome of a check, ready to be printed."""

    exercise: str
    ok: bool
    message: str

    def __str__(self) -> str:
        return f"{'✓' if self.ok else '✗'} {self.exercise}: {self.message}"

    def _ipython_display_(self) -> None:
        """Nothing: `check` has printed it already."""


class CheckFailed(AssertionError):
    """A check that did not pass. A notebook shows its message without a traceback; nbval and pytest see a failure."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def check(exercise_id: str, answer: Callable[..., Any]) -> CheckResult:
    """Judge `answer`, print the result and return it. Raises CheckFailed, with the same message, if it is wrong."""
    result = judge(exercise_id, answer)
    if not result.ok:
        raise CheckFailed(f"{result}\n{_hint_offer(exercise_id)}")
    print(result)
    return result


def judge(exercise_id: str, answer: Callable[..., Any], *, seed: int | None = None) -> CheckResult:
    """Judge `answer` without printing or raising. seed: of the random inputs; None draws new ones each time.

    Raises UnknownName for an exercise that does not exist.
    """
    exercise, rules = _exercise(exercise_id), judges()[exercise_id]
    cases = rules.cases(random.Random(seed))
    calls = 0
    try:
        with time_limit(exercise.time_limit_s):
            for arguments in cases:
                calls += 1
                message = _difference(rules, arguments, answer)
                if message:
                    return CheckResult(exercise_id, False, _recognised(rules, cases, answer) or message)
    except TimeLimitReached:
        where = _call(rules, cases[calls - 1])
        message = f"stopped after {exercise.time_limit_s} seconds {where}; is there a loop that never ends?"
        return CheckResult(exercise_id, False, message)
    return CheckResult(exercise_id, True, f"{rules.success} ({len(cases)} inputs)")


def hint(exercise_id: str) -> None:
    """Print the next hint of an exercise; after the last one, all three. Raises UnknownName."""
    hints = _exercise(exercise_id).hints
    shown = _hints_shown.get(exercise_id, 0)
    first, last = (shown, shown + 1) if shown < len(hints) else (0, len(hints))
    for number in range(first, last):
        print(f"Hint {number + 1} of {len(hints)}: {hints[number]}")
    _hints_shown[exercise_id] = min(shown + 1, len(hints))


def judges() -> dict[str, Judge]:
    """How each exercise of the manifest is judged, by id."""
    from .judges_7_1 import JUDGES

    return dict(JUDGES)


def _exercise(exercise_id: str):
    exercises = load_manifest()
    if exercise_id not in exercises:
        raise UnknownName("exercise", exercise_id, list(exercises))
    return exercises[exercise_id]


def _difference(rules: Judge, arguments: tuple, answer: Callable[..., Any]) -> str | None:
    """What `answer` gets wrong for these arguments; None if nothing."""
    call = _call(rules, arguments)
    try:
        got = answer(*_copies(arguments))
    except NotImplementedError:
        return "not written yet; replace the line `raise NotImplementedError(…)` by your answer"
    except Exception as error:
        return f"{call} raised {type(error).__name__}: {error}"
    try:
        got = rules.plain(got)
    except TypeError as error:
        return f"{call}: {error}"
    expected = rules.plain(rules.answer(*_copies(arguments)))
    return None if got == expected else f"{call}: expected {expected}, got {got}"


def _recognised(rules: Judge, cases: list[tuple], answer: Callable[..., Any]) -> str | None:
    """The message of the known mistake that behaves like `answer` on every input, if there is one."""
    for mistake in rules.mistakes:
        as_mistake = Judge(mistake.answer, rules.plain, rules.cases, rules.names, rules.success)
        if all(_difference(as_mistake, arguments, answer) is None for arguments in cases):
            differences = (_difference(rules, arguments, answer) for arguments in cases)
            return f"{next(filter(None, differences), mistake.message)}. {mistake.message}"
    return None


def _copies(arguments: tuple) -> list:
    """The reader's function may sort or empty the lists that it gets; the next call has its own."""
    return [list(value) if isinstance(value, list) else value for value in arguments]


def _call(rules: Judge, arguments: tuple) -> str:
    return "with " + ", ".join(f"{name}={value!r}" for name, value in zip(rules.names, arguments))


def _hint_offer(exercise_id: str) -> str:
    shown, total = _hints_shown.get(exercise_id, 0), len(_exercise(exercise_id).hints)
    if shown < total:
        return f'  Stuck? hint("{exercise_id}") shows hint {shown + 1} of {total}.'
    return f'  All {total} hints are out: hint("{exercise_id}") shows them again.'
