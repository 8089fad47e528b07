"""Instant checks: `check("7.1-padding", my_function)` calls the reader's function and says what differed.

Behaviour only: random inputs in, whole numbers out, compared with a reference. What is inside, how fast it runs and
which class an object has is never looked at.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TextIO

from ..errors import UnknownName
from .manifest import load_manifest
from .time_limit import TimeLimitReached, time_limit

_LONGEST = 300  # characters that a message quotes of what an answer returned or raised
_PRINTED = 2000  # characters that an answer may print in one check
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
    It meets any object at all, and may let through whatever that raises.
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
    with (
        redirect_stdout(_Brief(sys.stdout)),
        redirect_stderr(_Brief(sys.stderr)),
        time_limit(exercise.time_limit_s) as limited,
    ):
        for arguments in cases:
            try:
                message = _guarded(limited, rules, arguments, answer).difference
            except TimeLimitReached:
                where = _call(rules, arguments)
                message = f"stopped after {exercise.time_limit_s} seconds {where}; is there a loop that never ends?"
                return CheckResult(exercise_id, False, message)
            if message:
                mistake = _recognised(limited, rules, cases, answer)
                return CheckResult(exercise_id, False, f"{message}. {mistake.message}" if mistake else message)
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


@dataclass(frozen=True)
class _Outcome:
    """What an answer gave for one case, as plain data, and what is wrong with it; None if nothing."""

    got: Any
    difference: str | None


def _outcome(rules: Judge, arguments: tuple, answer: Callable[..., Any]) -> _Outcome:
    """Call `answer` and look at what it returned. Objects of the reader's are met here alone, and may do anything."""
    call = _call(rules, arguments)
    expected = rules.plain(rules.answer(*deepcopy(arguments)))
    try:
        returned = answer(*deepcopy(arguments))  # it may sort or empty the lists that it gets
    except (KeyboardInterrupt, TimeLimitReached):
        raise
    except NotImplementedError:
        return _Outcome(None, "not written yet; replace the line `raise NotImplementedError(…)` by your answer")
    except SystemExit:
        return _Outcome(None, f"{call} called exit; return the answer instead")
    except BaseException as error:
        return _Outcome(None, f"{call} raised {_said(error)}")
    try:
        got = rules.plain(returned)
    except (KeyboardInterrupt, TimeLimitReached):
        raise
    except TypeError as error:
        return _Outcome(None, f"{call}: {_short(str(error))}")
    except BaseException as error:
        kind = _short(type(returned).__name__)
        return _Outcome(None, f"{call}: got an object ({kind}) that can't be read, it raised {_said(error)}")
    difference = None if got == expected else f"{call}: expected {_shown(expected)}, got {_shown(got)}"
    return _Outcome(got, difference)


def _guarded(limited: Callable[..., Any], rules: Judge, arguments: tuple, answer: Callable[..., Any]) -> _Outcome:
    """As `_outcome`, whatever happens in it. Raises TimeLimitReached, and the reader's own KeyboardInterrupt."""
    try:
        return limited(_outcome, rules, arguments, answer)
    except (KeyboardInterrupt, TimeLimitReached):
        raise
    except BaseException:  # an error that can't even be asked for its message
        return _Outcome(None, f"{_call(rules, arguments)} failed with something that can't be shown")


def _recognised(
    limited: Callable[..., Any], rules: Judge, cases: list[tuple], answer: Callable[..., Any]
) -> Mistake | None:
    """The known mistake that behaves like `answer` on every input, if there is one and the time allows to find it."""
    alike = list(rules.mistakes)
    for arguments in cases:
        try:
            got = _guarded(limited, rules, arguments, answer).got
        except TimeLimitReached:
            return None
        alike = [mistake for mistake in alike if rules.plain(mistake.answer(*deepcopy(arguments))) == got]
        if not alike:
            return None
    return alike[0]


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


def _call(rules: Judge, arguments: tuple) -> str:
    return "with " + ", ".join(f"{name}={value!r}" for name, value in zip(rules.names, arguments))


def _short(text: str) -> str:
    """The text on one line that any terminal can show, without its middle if it is long."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 100]} … {text[-90:]}"
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _said(error: BaseException) -> str:
    """The type of an exception and its message."""
    try:
        return _short(f"{type(error).__name__}: {error}").removesuffix(":")
    except (KeyboardInterrupt, TimeLimitReached):
        raise
    except BaseException:
        return _short(f"{type(error).__name__}, which has no readable message")


def _shown(value: Any) -> str:
    """Plain data as in Python, shortened. Python refuses to write out an integer of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a number of about {int(value.bit_length() * 0.30103) + 1} digits"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return _short(repr(value))


def _hint_offer(exercise_id: str) -> str:
    shown, total = _hints_shown.get(exercise_id, 0), len(_exercise(exercise_id).hints)
    if shown < total:
        return f'  Stuck? hint("{exercise_id}") shows hint {shown + 1} of {total}.'
    return f'  All {total} hints are out: hint("{exercise_id}") shows them again.'
