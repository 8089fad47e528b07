"""Predict, then run: a chapter asks for a guess in one cell, and shows in the next how far off it was.

    share_guess = predict("fastest-finisher", None, unit="%")  # the reader writes a number in place of None
    share_guess.reveal(share)                                  # next cell: "You said 40 %, it is 99 %: …"
    guesses()                                                  # end of the chapter: all of them in a table

Each question needs a variable of its own, so that cells may run in any order. Guesses are kept as long as the kernel
runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import InvalidParameter

CLOSE = 0.25  # a guess is close if it is off by no more than this share of the true value,
CLOSE_POINTS = 5  # and one in percent, by no more than so many percentage points and half of the true value
_LARGEST = 1e100  # no guess needs more, and with more the words of the gap would overflow
_asked: dict[str, Guess] = {}


class NotAGuess(InvalidParameter):
    """What was written in place of None is no guess. A notebook shows the sentence without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@dataclass
class Guess:
    """One question, what the reader said (None: nothing), and the true value once it is revealed."""

    question: str
    guess: float | str | None
    unit: str = ""
    choices: tuple[str, ...] = ()
    truth: float | str | None = field(default=None, init=False)

    def reveal(self, truth: float | str) -> None:
        """Print the true value, and how far off the guess was. Raises InvalidParameter where it can't be true."""
        if not _fits(truth, self.choices):
            wanted = f"one of {_quoted(self.choices)}" if self.choices else "a finite number, as int or float"
            raise InvalidParameter(f"the true value of {self.question!r} must be {wanted}, not {truth!r}")
        self.truth = truth
        if self.guess is None:
            print(f"It is {self.shown(truth)}. (You made no guess: write one into the cell above and run both again.)")
        else:
            print(f"You said {self.shown(self.guess)}, it is {self.shown(truth)}: {self.gap}.")

    def shown(self, value: float | str | None) -> str:
        """A guess or a true value, with its unit."""
        if value is None:
            return "–"
        return value if isinstance(value, str) else _with_unit(value, self.unit)

    @property
    def right(self) -> bool:
        """Whether the guess and the true value look the same when printed."""
        return None not in (self.guess, self.truth) and self.shown(self.guess) == self.shown(self.truth)

    @property
    def close(self) -> bool:
        """Whether the guess is right or nearly so: no choice is nearly right."""
        if self.right or self.guess is None or self.truth is None:
            return self.right
        if isinstance(self.guess, str) or isinstance(self.truth, str):
            return False
        gap, truth = abs(self.guess - self.truth), abs(self.truth)
        return gap <= min(CLOSE_POINTS, truth / 2) if self.unit == "%" else gap <= CLOSE * truth

    @property
    def gap(self) -> str:
        """How far off the guess is, in words."""
        if self.truth is None:
            return "not revealed yet"
        if self.guess is None:
            return "no guess"
        if self.right:
            return "exactly right"
        if isinstance(self.guess, str) or isinstance(self.truth, str):
            return "the other one" if len(self.choices) == 2 else "not that one"
        low = self.guess < self.truth
        points = "percentage points" if self.unit == "%" else self.unit
        gap = f"too {'low' if low else 'high'} by {_with_unit(abs(self.guess - self.truth), points)}"
        return f"close, {gap}" if self.close else gap + _times(self.guess, self.truth)


def predict(
    question: str, guess: float | str | None = None, *, unit: str = "", choices: Sequence[str] | None = None
) -> Guess:
    """Note the reader's guess, or with None ask for one in a printed line. Asking again replaces the earlier guess.

    question: its name in the table of `guesses`. unit: of the number, in the plural ("steps"); gaps in "%" are told in
    percentage points. choices: words, one of which is the guess, instead of a number.
    Raises NotAGuess for a guess that is no finite number or none of the choices, InvalidParameter for a question
    that can't be asked.
    """
    words = () if choices is None else tuple(choices)
    if choices is not None and (isinstance(choices, str) or len(set(words)) < 2 or unit):
        raise InvalidParameter(
            f"{question!r} needs two different choices or more and no unit, not {choices!r}, {unit!r}"
        )
    if guess is not None and not _fits(guess, words):
        raise NotAGuess(_refusal(guess, words))
    asked = _asked[question] = Guess(question, guess, unit, words)
    if guess is not None:
        print(f"Noted, your guess is {asked.shown(guess)}. Now run the next cell.")
    else:
        wanted = _quoted(words) if words else f"a number (in {unit})" if unit else "a number"
        print(f"Guess first: write {wanted} in place of None and run this cell. Then run the next one.")
    return asked


def guesses() -> None:
    """Print all questions asked since the kernel started: the guess, the true value, how far off; and a word on it."""
    if not _asked:
        print("No question has been asked yet: run the cells with predict(…) first.")
        return
    head = ("question", "yours", "true", "how far off")
    rows = [head, *((a.question, a.shown(a.guess), a.shown(a.truth), a.gap) for a in _asked.values())]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for name, yours, true, gap in rows:
        print(f"{name:{widths[0]}}  {yours:>{widths[1]}}  {true:>{widths[2]}}  {gap}")
    print(_encouragement([asked for asked in _asked.values() if None not in (asked.guess, asked.truth)]))


def _encouragement(told: list[Guess]) -> str:
    near = sum(asked.close for asked in told)
    if not told:
        return "No guess to compare yet. Even a wild one helps: a number that surprised you is one that you remember."
    if near == len(told):
        return f"Right or close: {near} of {len(told)}. You see what a batch does before it does it."
    if near:
        return f"Right or close: {near} of {len(told)}. Look once more at the others: they teach the most."
    return (
        f"Right or close: 0 of {len(told)}. These are the places where a first thought goes wrong: now you know them."
    )


def _fits(value: object, choices: tuple[str, ...]) -> bool:
    """Whether a value is one of the choices, or without choices a finite number; True and False are none."""
    if choices:
        return isinstance(value, str) and value in choices
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _refusal(guess: object, choices: tuple[str, ...]) -> str:
    if isinstance(guess, int) and abs(guess) > _LARGEST:
        got = "one so large"  # Python may refuse to write it out
    else:
        got = repr(guess) if isinstance(guess, str | int | float) else f"an object of type {type(guess).__name__}"
    got = got if len(got) <= 40 else f"{got[:40]}…"
    if choices:
        return f"a guess here is one of {_quoted(choices)}, not {got}; write one of them, with its quotes"
    return f"a guess here is a finite number, not {got}; write its digits alone, without quotes and without a unit"


def _times(guess: float, truth: float) -> str:
    """How many times as much the larger one is, from twice on; nothing where that has no meaning."""
    if min(guess, truth) <= 0:
        return ""
    factor = float(f"{max(guess, truth) / min(guess, truth):.2g}")
    if factor < 2:
        return ""
    if factor < 3:
        words = ("half of it", "twice as much") if factor == 2 else ("less than half", "more than twice as much")
        return f", {words[guess > truth]}"
    return f", {'' if guess > truth else 'the truth is '}{_number(factor)} times as much"


def _with_unit(value: float, unit: str) -> str:
    number = _number(value)
    if number == "1" and unit.endswith("s") and len(unit) > 2 and "/" not in unit:
        unit = unit[:-1]  # 1 step
    return f"{number} {unit}".rstrip()


def _number(value: float) -> str:
    """Three digits at least, and no zeros at the end: 0.125, 40, 1,250."""
    if not value:
        return "0"
    if not 1e-4 <= abs(value) < 1e15:
        return f"{value:.3g}"
    text = f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _quoted(choices: Sequence[str]) -> str:
    """Words as a reader must type them: "a", "b" or "c"."""
    *first, last = (f'"{choice}"' for choice in choices)
    return f"{', '.join(first)} or {last}"
