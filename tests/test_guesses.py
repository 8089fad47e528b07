"""Predict, then run: what a chapter prints for a guess, for none, and for what is no guess; and how chapters use it."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibatcher.errors import InvalidParameter
from minibatcher.labkit import guesses, predict
from minibatcher.labkit.guesses import Guess, NotAGuess
from minibatcher.labkit.notebooks import read_source

CHAPTERS = Path(__file__).resolve().parents[1] / "chapters"


@pytest.fixture(autouse=True)
def fresh_kernel(monkeypatch):
    # By its path: in the package, `guesses` is the function.
    monkeypatch.setattr(import_module("minibatcher.labkit.guesses"), "_asked", {})


def printed(capsys, call, *arguments, **options):
    call(*arguments, **options)
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def revealed(capsys, guess, truth, **options):
    asked = predict("q", guess, **options)
    capsys.readouterr()
    return printed(capsys, asked.reveal, truth)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "a number"),
        ({"unit": "%"}, "a number (in %)"),
        ({"choices": ("static", "continuous")}, '"static" or "continuous"'),
        ({"choices": ["a", "b", "c"]}, '"a", "b" or "c"'),
    ],
)
def test_without_a_guess_a_line_asks_for_one(options, wanted, capsys):
    expected = f"Guess first: write {wanted} in place of None and run this cell. Then run the next one.\n"
    assert printed(capsys, predict, "q", None, **options) == expected


def test_a_guess_is_noted_with_its_unit(capsys):
    assert printed(capsys, predict, "q", 40, unit="%") == "Noted, your guess is 40 %. Now run the next cell.\n"
    assert printed(capsys, predict, "q", 0.0, unit="steps").startswith("Noted, your guess is 0 steps.")


@pytest.mark.parametrize(
    ("truth", "options", "shown"),
    [(97.0, {"unit": "%"}, "97 %"), (1_250, {}, "1,250"), ("b", {"choices": ("a", "b")}, "b")],
)
def test_without_a_guess_the_truth_stands_alone_and_a_guess_is_invited(truth, options, shown, capsys):
    expected = f"It is {shown}. (You made no guess: write one into the cell above and run both again.)\n"
    assert revealed(capsys, None, truth, **options) == expected


@pytest.mark.parametrize(
    ("guess", "truth", "unit", "sentence"),
    [
        (40, 97.0, "%", "You said 40 %, it is 97 %: too low by 57 percentage points, less than half."),
        (98, 99.0, "%", "You said 98 %, it is 99 %: close, too low by 1 percentage point."),
        (60, 75, "%", "You said 60 %, it is 75 %: too low by 15 percentage points."),
        (3, 2.2, "%", "You said 3 %, it is 2.2 %: close, too high by 0.8 percentage points."),
        (1, 2.2, "%", "You said 1 %, it is 2.2 %: too low by 1.2 percentage points, less than half."),
        (81, 100, "steps", "You said 81 steps, it is 100 steps: close, too low by 19 steps."),
        (70, 100, "steps", "You said 70 steps, it is 100 steps: too low by 30 steps."),
        (99, 98.98, "%", "You said 99 %, it is 99 %: exactly right."),
        (0, 97, "%", "You said 0 %, it is 97 %: too low by 97 percentage points."),
        (2, 80, "steps", "You said 2 steps, it is 80 steps: too low by 78 steps, the truth is 40 times as much."),
        (80, 2, "steps", "You said 80 steps, it is 2 steps: too high by 78 steps, 40 times as much."),
        (4, 2, "s", "You said 4 s, it is 2 s: too high by 2 s, twice as much."),
        (5, 2, "ms", "You said 5 ms, it is 2 ms: too high by 3 ms, more than twice as much."),
        (1, 2, "", "You said 1, it is 2: too low by 1, half of it."),
        (1, 1.0, "steps", "You said 1 step, it is 1 step: exactly right."),
        (110, 100, "tokens/s", "You said 110 tokens/s, it is 100 tokens/s: close, too high by 10 tokens/s."),
        (126, 100, "tokens/s", "You said 126 tokens/s, it is 100 tokens/s: too high by 26 tokens/s."),
        (
            1,
            4,
            "tokens/s",
            "You said 1 tokens/s, it is 4 tokens/s: too low by 3 tokens/s, the truth is 4 times as much.",
        ),
        (1, 4, "ms", "You said 1 ms, it is 4 ms: too low by 3 ms, the truth is 4 times as much."),
        (1, 4, "s", "You said 1 s, it is 4 s: too low by 3 s, the truth is 4 times as much."),
        (3, 0, "rows", "You said 3 rows, it is 0 rows: too high by 3 rows."),
        (-5, 5, "%", "You said -5 %, it is 5 %: too low by 10 percentage points."),
        (12_345, 12_346, "", "You said 12,345, it is 12,346: close, too low by 1."),
        (0.125, 0.5, "s", "You said 0.125 s, it is 0.5 s: too low by 0.375 s, the truth is 4 times as much."),
    ],
)
def test_the_gap_is_told_in_words_that_fit(guess, truth, unit, sentence, capsys):
    assert revealed(capsys, guess, truth, unit=unit) == sentence + "\n"


@pytest.mark.parametrize(
    ("guess", "choices", "verdict"),
    [
        ("b", ("a", "b"), "You said b, it is b: exactly right."),
        ("a", ("a", "b"), "You said a, it is b: the other one."),
        ("c", ("a", "b", "c"), "You said c, it is b: not that one."),
    ],
)
def test_a_choice_is_right_or_not(guess, choices, verdict, capsys):
    assert revealed(capsys, guess, "b", choices=choices) == verdict + "\n"


numbers = st.one_of(st.integers(-(10**6), 10**6), st.floats(-1e100, 1e100))


@given(numbers, numbers)
def test_any_two_numbers_have_a_gap_that_agrees_with_them(guess, truth):
    asked = Guess("q", guess, "tokens")
    asked.truth = truth
    assert asked.right == (asked.gap == "exactly right")
    if not asked.right:
        assert ("too low" in asked.gap) == (guess < truth) and ("too high" in asked.gap) == (guess > truth)
    assert asked.close == (asked.right or asked.gap.startswith("close"))
    assert float(asked.shown(truth).split()[0].replace(",", "")) == pytest.approx(truth, rel=0.006, abs=1e-300)


HUGE = pytest.param(10**5000, id="huge")


@pytest.mark.parametrize("guess", ["40", "40 %", True, False, float("nan"), float("inf"), HUGE, [40], 4j, len])
def test_what_is_no_number_is_refused_with_a_sentence(guess, capsys):
    with pytest.raises(NotAGuess) as refusal:
        predict("q", guess, unit="%")
    sentence = str(refusal.value)
    assert sentence.startswith("a guess here is a finite number, not ") and "write its digits alone" in sentence
    assert "\n" not in sentence and " at 0x" not in sentence and len(sentence) < 160
    assert refusal.value._render_traceback_() == [sentence]  # in a notebook it stands alone
    assert printed(capsys, guesses).startswith("No question has been asked yet")


@pytest.mark.parametrize("guess", ["dynamic", "Static", 1, True, ["static"]])
def test_what_is_none_of_the_choices_is_refused(guess):
    with pytest.raises(NotAGuess, match=r'is one of "static" or "continuous", not .*; write one of them'):
        predict("q", guess, choices=("static", "continuous"))


@pytest.mark.parametrize("options", [{"choices": "ab"}, {"choices": ()}, {"choices": ("a", "a")}])
def test_a_choice_needs_two_words(options):
    with pytest.raises(InvalidParameter, match="'q' needs two different choices"):
        predict("q", None, **options)


def test_a_choice_has_no_unit():
    with pytest.raises(InvalidParameter, match="no unit"):
        predict("q", None, choices=("a", "b"), unit="%")


@pytest.mark.parametrize(
    ("options", "truth"), [({}, "97"), ({}, float("nan")), ({}, None), ({"choices": ("a", "b")}, "c")]
)
def test_a_truth_that_answers_another_question_is_refused(options, truth):
    asked = predict("q", None, **options)
    with pytest.raises(InvalidParameter, match="the true value of 'q' must be "):
        asked.reveal(truth)
    assert asked.truth is None


def test_all_guesses_stand_in_a_table_in_the_order_of_the_questions(capsys):
    predict("share", 40, unit="%").reveal(97)
    predict("who", None, choices=("static", "continuous")).reveal("continuous")
    predict("steps", 199, unit="steps").reveal(200)
    predict("waste", "padding", choices=("padding", "waiting")).reveal("waiting")
    predict("later", 3)
    capsys.readouterr()
    assert printed(capsys, guesses).splitlines() == [
        "question      yours        true  how far off",
        "share          40 %        97 %  too low by 57 percentage points, less than half",
        "who               –  continuous  no guess",
        "steps     199 steps   200 steps  close, too low by 1 step",
        "waste       padding     waiting  the other one",
        "later             3           –  not revealed yet",
        "Right or close: 1 of 3. Look once more at the others: they teach the most.",
    ]


def test_running_a_cell_again_replaces_its_entry(capsys):
    predict("first", 1).reveal(5)
    predict("second", 7).reveal(7)
    again = predict("first", 5)
    capsys.readouterr()
    lines = printed(capsys, guesses).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["first", "second"]
    assert "not revealed yet" in lines[1]  # the old answer is not that of the new guess
    again.reveal(5)
    capsys.readouterr()
    assert "exactly right" in printed(capsys, guesses).splitlines()[1]


@pytest.mark.parametrize(
    ("pairs", "line"),
    [
        ([], "No guess to compare yet."),
        ([(None, 3)], "No guess to compare yet."),
        ([(3, 3), (100, 101), (None, 9)], "Right or close: 2 of 2. You see "),
        ([(1, 3)], "Right or close: 0 of 1. These are "),
        ([(3, 3), (5, 101), (8, 8)], "Right or close: 2 of 3. Look once more "),
    ],
)
def test_the_last_line_counts_honestly(pairs, line, capsys):
    predict("not revealed", 1)
    for number, (guess, truth) in enumerate(pairs):
        predict(f"q{number}", guess).reveal(truth)
    capsys.readouterr()
    assert printed(capsys, guesses).splitlines()[-1].startswith(line)


def test_guesses_need_no_torch_and_no_notebook():
    code = (
        "import sys; from minibatcher.labkit import guesses, predict; predict('q', 1).reveal(2); guesses();"
        "assert not {'torch', 'IPython'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=CHAPTERS.parent, capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert "You said 1, it is 2" in result.stdout


@pytest.mark.parametrize("path", sorted(CHAPTERS.glob("*.md")), ids=lambda path: path.stem)
def test_a_chapter_asks_before_it_tells_and_gives_nothing_away(path):
    cells = [cell for cell in read_source(path, {}).cells if cell.cell_type == "code"]
    assert not any("my_guess" in cell.source for cell in cells)
    asked = {
        match[1]: (number, match[2])
        for number, cell in enumerate(cells)
        for match in re.finditer(r'^(\w+) = predict\(\s*"[^"]+", (\w+)', cell.source, re.MULTILINE)
    }
    assert len(asked) == sum(cell.source.count("predict(") for cell in cells), "a variable of its own for each question"
    for variable, (number, guess) in asked.items():
        assert guess == "None", f"{variable}: the guess is the reader's"
        told = [place for place, cell in enumerate(cells) if f"{variable}.reveal(" in cell.source]
        assert told in ([number + 1], [number + 2]), (
            f"{variable} is revealed once, right after the run that it is about"
        )
        assert "unsaved" in cells[told[0]].metadata.get("tags", []), f"{variable}: saved, its answer would be seen"
    shown = [place for place, cell in enumerate(cells) if cell.source == "guesses()"]
    assert len(shown) == bool(asked) and all(shown[0] > number for number, _ in asked.values())
