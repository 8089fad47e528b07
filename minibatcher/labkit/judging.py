"""How an answer is judged: it is played through random cases, what was seen is written down as plain data, and the
data is compared with what a right answer gives.

Behaviour only: what is inside an answer, how fast it runs and which class an object has is never looked at. Writing
down (`record`) and comparing (`verdict`) are apart, so that a grader can do the second in another process, out of an
answer's reach. A Task holds what the first needs, a Key what the second needs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple

from .time_limit import TimeLimitReached

_LONGEST = 300  # characters that a message quotes of what an answer returned or raised
_STOPS = (KeyboardInterrupt, TimeLimitReached)


class Unfit(Exception):
    """What an answer gave is not of the kind asked for; the message is a sentence without the case."""


class Seen(NamedTuple):
    """One observation. what: where and what ("step 3: tokens of request 'b'"), "" for the one value of a function.
    value: plain data (numbers, text, bool, None, lists and dicts of them). think: what to think about if it differs."""

    what: str
    value: Any
    think: str = ""


class Log:
    """What is seen while an answer is played. `at` says where we are; an exception is told with it."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.where = ""

    def at(self, where: str) -> None:
        self.where = where

    def see(self, what: str, value: Any, think: str = "") -> None:
        """Write down plain data. Tuples count as lists."""
        self.seen.append(Seen(f"{self.where}: {what}" if self.where and what else self.where or what, value, think))


@dataclass(frozen=True)
class Task:
    """What an answer is put through; no right answer is in here.

    cases: argument tuples for a random stream, the smallest and easiest first, so that the first failure is easy to
    follow. play(answer, log, *arguments): use the answer and write down what it does; raises Unfit. It gets copies.
    names: of the arguments, for messages; or `describe(*arguments)`, a text such as "with 3 requests, budget 16".
    success: what to say when all is well. tolerance: relative, for floats; whole numbers are compared exactly.
    """

    cases: Callable[[random.Random], list[tuple]]
    play: Callable[..., None]
    success: str
    names: tuple[str, ...] = ()
    describe: Callable[..., str] | None = None
    tolerance: float = 1e-6

    def call(self, arguments: tuple) -> str:
        """The case, for a message."""
        if self.describe is not None:
            return self.describe(*arguments)
        return "with " + ", ".join(f"{name}={value!r}" for name, value in zip(self.names, arguments))


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that readers give, and what to tell them."""

    answer: Any
    message: str


@dataclass(frozen=True)
class Key:
    """A right answer, and wrong ones that are recognised by their behaviour.

    assess(arguments, seen): for a task with more than one right result: a sentence about what is wrong, or None. It
    replaces the comparison with `answer`.
    """

    answer: Any
    mistakes: tuple[Mistake, ...] = field(default=())
    assess: Callable[[tuple, list[Seen]], str | None] | None = None


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


class Outcome(NamedTuple):
    """What was seen of an answer in one case. trouble: what went wrong then, to be put behind the case; or None."""

    seen: list[Seen]
    trouble: str | None = None
    unwritten: bool = False


def record(task: Task, arguments: tuple, answer: Any) -> Outcome:
    """Play an answer through one case. Objects of the reader's are met here alone, and may do anything."""
    log = Log()
    try:
        task.play(answer, log, *deepcopy(arguments))  # it may sort or empty the lists that it gets
    except _STOPS:
        raise
    except Unfit as error:
        return Outcome(_plain(log.seen), f"{_place(log)}: {short(str(error))}")
    except NotImplementedError:
        return Outcome([], None, True)
    except SystemExit:
        return Outcome(_plain(log.seen), f"{_place(log)} called exit; return the answer instead")
    except BaseException as error:
        return Outcome(_plain(log.seen), f"{_place(log)} raised {said(error)}")
    return Outcome(_plain(log.seen))


def guarded(limited: Callable[..., Any], task: Task, arguments: tuple, answer: Any) -> Outcome:
    """As `record`, whatever happens in it. Raises TimeLimitReached, and the reader's own KeyboardInterrupt."""
    try:
        return limited(record, task, arguments, answer)
    except _STOPS:
        raise
    except BaseException:  # an error that can't even be asked for its message
        return Outcome([], " failed with something that can't be shown")


def verdict(
    exercise: Any, task: Task, key: Key, cases: list[tuple], outcomes: Iterable[Outcome], seed: int
) -> CheckResult:
    """Compare what was seen with what a right answer gives, case by case, up to the first difference.

    exercise: of the manifest. outcomes: one a case, made while they are asked for or long ago; may raise
    TimeLimitReached.
    """
    done: list[Outcome] = []
    outcomes = iter(outcomes)
    for arguments in cases:
        try:
            outcome = next(outcomes)
        except TimeLimitReached:
            limit = f"stopped after {exercise.time_limit_s} seconds {task.call(arguments)}"
            return CheckResult(exercise.id, False, f"{limit}; is there a loop that never ends?")
        done.append(outcome)
        if outcome.unwritten:
            todo = "replace the line `raise NotImplementedError(…)` by your answer, and run its cell"
            return CheckResult(exercise.id, False, f"not written yet; {todo}")
        wrong = _wrong(task, key, arguments, outcome)
        if wrong is None:
            continue
        mistake = _recognised(task, key, cases, done, outcomes)
        sentence = f"{wrong.rstrip('.')}. {mistake.message}" if mistake else wrong
        return CheckResult(exercise.id, False, f"{sentence} (seed {seed})")
    return CheckResult(exercise.id, True, f"{task.success} ({len(cases)} inputs, seed {seed})")


def _wrong(task: Task, key: Key, arguments: tuple, outcome: Outcome) -> str | None:
    """What is wrong with one case, and what to think about; None if nothing."""
    call = task.call(arguments)
    if key.assess is not None and outcome.trouble is None:
        found = key.assess(arguments, outcome.seen)
        return f"{call}: {found}" if found else None
    if key.assess is None:
        expected = record(task, arguments, key.answer)
        if expected.trouble or expected.unwritten:
            raise RuntimeError(f"the right answer fails {call}{expected.trouble}")
        # What was seen before an exception may differ already, and is easier to follow.
        found = difference(expected.seen, outcome.seen, task.tolerance, whole=outcome.trouble is None)
        if found:
            return f"{call}{'' if found.startswith(':') else ', '}{found}"
    return f"{call}{short(outcome.trouble)}" if outcome.trouble else None


def _recognised(
    task: Task, key: Key, cases: list[tuple], done: list[Outcome], rest: Iterator[Outcome]
) -> Mistake | None:
    """The known mistake that behaves like the answer in every case, if there is one and the time allows to find it."""
    alike = list(key.mistakes)
    for number, arguments in enumerate(cases):
        if not alike:
            return None
        try:
            outcome = done[number] if number < len(done) else next(rest)
        except (TimeLimitReached, StopIteration):
            return None
        alike = [mistake for mistake in alike if _same(record(task, arguments, mistake.answer), outcome, task)]
    return alike[0] if alike else None


def _same(expected: Outcome, outcome: Outcome, task: Task) -> bool:
    return expected.trouble == outcome.trouble and not difference(expected.seen, outcome.seen, task.tolerance)


def difference(expected: list[Seen], got: list[Seen], tolerance: float, *, whole: bool = True) -> str | None:
    """The first difference, as "where: expected …, got …. what to think about"; None if there is none.

    whole: whether `got` is complete; else only what is there is compared.
    """
    for right, mine in zip(expected, got):
        if right.what != mine.what:
            return f"{right.what}: expected {shown(right.value)}, got {mine.what}: {shown(mine.value)}"
        found = _unlike(right.value, mine.value, tolerance)
        if found:
            path, one, other = found
            sentence = f"{right.what}{path}: expected {shown(one)}, got {shown(other)}"
            return f"{sentence}. {right.think}" if right.think else sentence
    if whole and len(expected) != len(got):
        longer, kind = (expected, "missing") if len(expected) > len(got) else (got, "too much")
        extra = longer[min(len(expected), len(got))]
        return f"{extra.what}: {kind}: {shown(extra.value)}"
    return None


def _unlike(right: Any, mine: Any, tolerance: float) -> tuple[str, Any, Any] | None:
    """The path of the first place where two values of plain data differ, and what stands there."""
    if isinstance(right, (list, tuple)) and isinstance(mine, (list, tuple)):
        if len(right) == len(mine) and len(right) > 8:  # say where, rather than show a long list
            for i, (one, other) in enumerate(zip(right, mine)):
                if found := _unlike(one, other, tolerance):
                    return f"[{i}]{found[0]}", found[1], found[2]
            return None
        same = len(right) == len(mine) and not any(_unlike(a, b, tolerance) for a, b in zip(right, mine))
    elif isinstance(right, dict) and isinstance(mine, dict):
        same = set(right) == set(mine) and not any(_unlike(right[k], mine[k], tolerance) for k in right)
    elif isinstance(right, float) or isinstance(mine, float):
        numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (right, mine))
        same = numbers and math.isclose(right, mine, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
    else:
        same = type(right) is type(mine) and right == mine
    return None if same else ("", right, mine)


# Reading what an answer gave


@contextmanager
def reading(value: Any) -> Iterator[None]:
    """Whatever an object raises while it is read becomes Unfit."""
    try:
        yield
    except (*_STOPS, Unfit, GeneratorExit):  # the last: this generator is being closed
        raise
    except BaseException as error:
        try:
            kind = short(type(value).__name__)
        except Exception:
            kind = "of a nameless class"
        raise Unfit(f"got an object ({kind}) that can't be read, it raised {said(error)}") from None


def whole_number(value: Any) -> int:
    """An int from anything that is a whole number (NumPy's and PyTorch's too)."""
    with reading(value):
        try:
            return int(index(value))
        except TypeError:
            raise Unfit(f"expected a whole number, got {value!r} ({type(value).__name__})") from None


def number(value: Any) -> float:
    """A float from any real number."""
    with reading(value):
        if isinstance(value, (str, bytes, bool)):
            raise Unfit(f"expected a number, got {value!r} ({type(value).__name__})")
        try:
            return float(value)
        except TypeError:
            raise Unfit(f"expected a number, got {value!r} ({type(value).__name__})") from None


def truth(value: Any) -> bool:
    """True or False, and nothing else."""
    with reading(value):
        if type(value) is not bool and type(value).__name__ not in ("bool_", "bool"):
            raise Unfit(f"expected True or False, got {value!r} ({type(value).__name__})")
        return bool(value)


def text(value: Any) -> str:
    """A plain str."""
    with reading(value):
        if not isinstance(value, str):
            raise Unfit(f"expected a text, got {value!r} ({type(value).__name__})")
        return "".join(value)


def list_of(read: Callable[[Any], Any]) -> Callable[[Any], list]:
    """A reader of any sequence (or iterable) of what `read` reads, but for texts."""

    def read_all(value: Any) -> list:
        with reading(value):
            if isinstance(value, (str, bytes, dict)):
                raise Unfit(f"expected a list, got {value!r} ({type(value).__name__})")
            try:
                items = iter(value)
            except TypeError:
                raise Unfit(f"expected a list, got {value!r} ({type(value).__name__})") from None
            return [read(item) for item in items]

    return read_all


def pair_of(*names: str, read: Callable[[Any], Any] = whole_number) -> Callable[[Any], dict[str, Any]]:
    """A reader of a tuple, for `returns`: each part is seen under its name."""

    def read_all(value: Any) -> dict[str, Any]:
        with reading(value):
            try:
                parts = list(value)
            except TypeError:
                parts = []
            if len(parts) != len(names):
                raise Unfit(f"expected {len(names)} values, ({', '.join(names)}), got {value!r}")
            return {name: read(part) for name, part in zip(names, parts)}

    return read_all


def returns(read: Callable[[Any], Any]) -> Callable[..., None]:
    """A `play` for a plain function: call it, read what it returned. A dict from `pair_of` is seen part by part."""

    def play(answer: Any, log: Log, *arguments: Any) -> None:
        value = read(answer(*arguments))
        if isinstance(value, dict):
            for name, part in value.items():
                log.see(name, part)
        else:
            log.see("", value)

    return play


# Showing


def short(text: str) -> str:
    """The text on one line that any terminal can show, without its middle if it is long."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 100]} … {text[-90:]}"
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return f" {line}" if text.startswith(" ") else line


def said(error: BaseException) -> str:
    """The type of an exception and its message."""
    try:
        return short(f"{type(error).__name__}: {error}").removesuffix(":")
    except _STOPS:
        raise
    except BaseException:
        return short(f"{type(error).__name__}, which has no readable message")


def shown(value: Any) -> str:
    """Plain data as in Python, shortened. Python refuses to write out an integer of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a number of about {int(value.bit_length() * 0.30103) + 1} digits"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return short(f"[{', '.join(map(shown, value[:_LONGEST]))}]")
    return short(repr(value))


def _place(log: Log) -> str:
    return f", {log.where}" if log.where else ""


def _plain(seen: list[Seen]) -> list[Seen]:
    return [Seen(short(what), _untupled(value), think) for what, value, think in seen]


def _untupled(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_untupled(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _untupled(item) for key, item in value.items()}
    return value
