"""Labs: what a check does with whatever an answer does, what the manifest refuses, what the build makes and sees.

The exercises themselves, one by one, are in test_lab_answers.py.
"""

import contextlib
import copy
import functools
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from minibatcher.cli import main
from minibatcher.errors import UnknownName
from minibatcher.labkit import CheckFailed, audit, build, check, checks, hint, judge, reveal
from minibatcher.labkit.judging import Key, Mistake
from minibatcher.labkit.manifest import MANIFEST, ManifestError, load_manifest, read_manifest
from minibatcher.labkit.notebooks import BuildError, read_source, role_of, solution_lines, stub, student_copy
from minibatcher.labkit.questions import load_questions
from minibatcher.labkit.time_limit import TimeLimitReached, time_limit

ROOT = Path(__file__).resolve().parents[1]
EXERCISES = load_manifest()


def whole_list_batch(prompt_lengths, batch_size):
    return len(prompt_lengths) * max(prompt_lengths), sum(prompt_lengths)


def drains_the_callers_list(prompt_lengths, batch_size):
    computed, useful, queue = 0, sum(prompt_lengths), prompt_lengths
    while queue:
        batch, queue[:] = queue[:batch_size], queue[batch_size:]
        computed += len(batch) * max(batch)
    return computed, useful


def with_numpy(prompt_lengths, batch_size):
    import numpy as np

    parts = np.split(np.array(prompt_lengths), range(batch_size, len(prompt_lengths), batch_size))
    return [sum(part.max() * len(part) for part in parts), np.sum(prompt_lengths)]


def one_token_off_in_long_lists(prompt_lengths, batch_size):
    computed, useful = with_numpy(prompt_lengths, batch_size)
    return computed + (len(prompt_lengths) > 30), useful


@pytest.mark.parametrize("answer", [drains_the_callers_list, with_numpy])
def test_any_way_of_writing_a_right_answer_passes(answer):
    assert judge("7.1-padding", answer).ok


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            whole_list_batch,
            ", computed tokens: expected 19, got 21. You pad all prompts to the longest of the whole list",
        ),
        (one_token_off_in_long_lists, ", computed tokens: expected "),
        (lambda lengths, size: None, "expected 2 values, (computed tokens, useful tokens), got None"),
        (lambda lengths, size: (19.0, 15), "expected a whole number, got 19.0 (float)"),
        (lambda lengths, size: ("19", 15), "expected a whole number, got '19' (str)"),
        (lambda lengths: (19, 15), "raised TypeError"),
        (lambda lengths, size: lengths[99], "with prompt_lengths=[3, 7, 5], batch_size=2 raised IndexError"),
    ],
)
def test_a_wrong_answer_is_told_what_differed(answer, message):
    result = judge("7.1-padding", answer, seed=4)
    assert not result.ok and message in result.message


def test_an_object_that_equals_everything_does_not_pass():
    class Yes(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    assert not judge("7.1-fastest-finisher", lambda lengths, size: Yes(1)).ok


def broken(method, error=None):
    """An object of which one method raises."""

    def fails(self, *arguments):
        raise error or RuntimeError("out of order")

    return type("Broken", (), {method: fails})()


def raising(error):
    def answer(lengths, size):
        raise error

    return answer


def recursion(lengths, size):
    return recursion(lengths, size)


WITH = "with output_lengths=[2, 5, 3], batch_size=2"
NO_STR = type("NoStr", (Exception,), {"__str__": lambda self: 1 / 0})
NO_NAME = type("Meta", (type,), {"__name__": property(lambda cls: 1 / 0)})("NoName", (Exception,), {})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda lengths, size: sys.exit(0), f"{WITH} called exit; return the answer instead"),
        (raising(SystemExit("x\ny")), f"{WITH} called exit; return the answer instead"),
        (raising(GeneratorExit()), f"{WITH} raised GeneratorExit (seed "),
        (raising(BaseException("a\nb\x1b[2J")), f"{WITH} raised BaseException: a b [2J"),
        (raising(pytest.skip.Exception("no")), f"{WITH} raised Skipped: no"),
        (recursion, f"{WITH} raised RecursionError: maximum recursion depth exceeded"),
        (raising(NO_STR()), f"{WITH} raised NoStr, which has no readable message"),
        (raising(NO_NAME()), f"{WITH} failed with something that can't be shown"),
        (raising(ValueError("m" * 10**6 + "\nend")), f"{WITH} raised ValueError: mmm"),
        (lambda lengths, size: 10**5000, f"{WITH}: expected 3, got a number of about 5001 digits"),
        (lambda lengths, size: -(10**5000), f"{WITH}: expected 3, got a number of about 5001 digits"),
        (lambda lengths, size: [10**5000], f"{WITH}: got an object (list) that can't be read, it raised ValueError"),
        (lambda lengths, size: "x" * 10**7, f"{WITH}: expected a whole number, got 'xxx"),
        (lambda lengths, size: "x\r\n\u2028" * 10**4, f"{WITH}: expected a whole number, got 'x"),
        (
            lambda lengths, size: broken("__repr__"),
            f"{WITH}: got an object (Broken) that can't be read, it raised RuntimeError: out of order",
        ),
        (lambda lengths, size: broken("__index__"), "it raised RuntimeError: out of order"),
        (lambda lengths, size: broken("__index__", SystemExit()), "(Broken) that can't be read, it raised SystemExit"),
        (lambda lengths, size: broken("__index__", TypeError("z" * 10**6)), "expected a whole number, got <"),
    ],
)
def test_whatever_an_answer_does_is_a_failed_check_of_two_short_lines(answer, message):
    with pytest.raises(CheckFailed) as failure:
        check("7.1-fastest-finisher", answer)
    lines = str(failure.value).splitlines(keepends=True)
    assert len(lines) == 2 and lines[0].startswith("✗ 7.1-fastest-finisher: ") and message in lines[0]
    assert len(lines[0]) < 450


def test_numbers_of_a_pair_are_shortened_too():
    message = judge("7.1-padding", lambda lengths, size: (19, 10**5000)).message
    assert ", useful tokens: expected 15, got a number of about 5001 digits (seed " in message
    for method in ("__iter__", "__len__"):
        result = judge("7.1-padding", lambda lengths, size, method=method: broken(method))
        assert not result.ok and "\n" not in result.message


def test_a_readers_interrupt_is_not_taken_for_an_answer():
    with pytest.raises(KeyboardInterrupt):
        judge("7.1-padding", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        judge("7.1-fastest-finisher", lambda lengths, size: broken("__index__", KeyboardInterrupt()))


def test_a_flood_of_prints_is_cut_and_does_not_change_the_result(capsys):
    def chatty(lengths, size):
        print("début", flush=True)
        print("x" * 3000)
        print("y" * 3000, file=sys.stderr)
        return with_numpy(lengths, size)

    before = sys.stdout
    assert check("7.1-padding", chatty).ok and sys.stdout is before
    shown = capsys.readouterr()
    assert shown.out.startswith("début\nxxx") and "\n… the rest of what your function prints is left out\n" in shown.out
    assert shown.out.splitlines()[-1].startswith("✓ 7.1-padding: right")
    assert len(shown.out) < 2300 and 2000 < len(shown.err) < 2100


def test_an_answer_may_change_its_inputs_in_depth(monkeypatch):
    exercise = EXERCISES["7.1-fastest-finisher"]
    task = replace(checks.task_of(exercise), cases=lambda rng: [([[1, 2], [3]], 2)])
    key = Key(lambda lengths, size: sum(map(sum, lengths)), (Mistake(lambda lengths, size: 2, "Only the first."),))
    monkeypatch.setattr(checks, "task_of", lambda _: task)
    monkeypatch.setattr(checks, "key_of", lambda _: key)

    def right(lengths, size):
        return sum(row.pop() for row in lengths for _ in row[:])

    def empties(lengths, size):
        count = len(lengths[0])
        lengths[0].clear()
        return count

    assert judge("7.1-fastest-finisher", right).ok
    message = judge("7.1-fastest-finisher", empties, seed=3).message
    assert message == "with output_lengths=[[1, 2], [3]], batch_size=2: expected 6, got 2. Only the first. (seed 3)"


# The time limit

needs_timers = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")


@pytest.fixture
def short_limit(monkeypatch):
    """A fifth of a second for every exercise; messages keep the manifest's ten."""
    monkeypatch.setattr(checks, "time_limit", lambda seconds: time_limit(seconds / 50))


def endless(lengths, size):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def leaves_its_loop_by_a_bare_except(lengths, size):
    while True:
        try:
            sum(lengths[:size])
        except:  # noqa: E722
            break
    return 4


def loops_through_bare_excepts(lengths, size):
    while True:
        try:
            while True:
                try:
                    lengths.pop()
                except:  # noqa: E722
                    lengths = []
        except:  # noqa: E722
            pass


def never_leaves_a_try_but_for_a_moment(lengths, size):
    while True:
        try:
            while True:
                pass
        except:  # noqa: E722
            pass


def tries_again_at_every_depth(lengths, size):
    try:
        return tries_again_at_every_depth(lengths, size)
    except:  # noqa: E722
        return tries_again_at_every_depth(lengths, size)


def tidies_up_for_ever(lengths, size):
    try:
        endless(lengths, size)
    finally:
        endless(lengths, size)


def raises_another(lengths, size):
    try:
        endless(lengths, size)
    except BaseException:
        raise SystemExit(0) from None


def prints_for_ever(lengths, size):
    while True:
        print("again and again")


class EndlessNumber:
    def __index__(self):
        return leaves_its_loop_by_a_bare_except([1], 1)


@needs_timers
@pytest.mark.parametrize(
    "answer",
    [
        endless,
        leaves_its_loop_by_a_bare_except,
        loops_through_bare_excepts,
        never_leaves_a_try_but_for_a_moment,
        tries_again_at_every_depth,
        tidies_up_for_ever,
        raises_another,
        prints_for_ever,
        functools.partial(lambda sleep, lengths, size: sleep(100), time.sleep),
        lambda lengths, size: EndlessNumber(),
    ],
)
def test_an_endless_answer_is_stopped_whatever_it_catches(answer, short_limit):
    handler, started = signal.getsignal(signal.SIGALRM), time.monotonic()
    result = judge("7.1-fastest-finisher", answer)
    assert time.monotonic() - started < 3
    assert not result.ok and result.message.startswith(f"stopped after 10 seconds {WITH}; is there a loop")
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is handler


@needs_timers
def test_a_wrong_answer_that_loops_later_is_told_what_differed(short_limit):
    calls = []

    def answer(lengths, size):
        calls.append(size)
        return 6 if len(calls) == 1 else leaves_its_loop_by_a_bare_except(lengths, size)

    # 6 is what a known mistake gives for the first case; whether it does for the others can't be seen in time.
    result = judge("7.1-fastest-finisher", answer, seed=2)
    assert not result.ok and result.message == f"{WITH}: expected 3, got 6 (seed 2)"


@needs_timers
def test_code_that_is_not_the_answers_is_never_interrupted(short_limit):
    with time_limit(0.05) as limited:
        assert limited(divmod, 17, 5) == (3, 2)
        time.sleep(0.2)
        with pytest.raises(TimeLimitReached):
            limited(divmod, 17, 5)


def test_without_timers_a_late_answer_fails_once_it_ends(short_limit):
    def late(lengths, size):
        time.sleep(0.3)
        return 3

    results = []
    thread = threading.Thread(target=lambda: results.append(judge("7.1-fastest-finisher", late)))
    thread.start()
    thread.join()
    assert results[0].message.startswith(f"stopped after 10 seconds {WITH}")


@needs_timers
def test_a_timer_that_was_set_before_is_set_again(short_limit):
    before = signal.signal(signal.SIGALRM, lambda signum, frame: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 60, 7)
        assert judge("7.1-padding", with_numpy).ok
        left, period = signal.getitimer(signal.ITIMER_REAL)
        assert 50 < left <= 60 and period == 7
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_inputs_differ_from_call_to_call_and_repeat_for_a_seed():
    def inputs(seed):
        seen = []
        right = checks.key_of(EXERCISES["7.1-padding"]).answer
        judge("7.1-padding", lambda lengths, size: seen.append((lengths, size)) or right(lengths, size), seed=seed)
        return seen

    assert len(inputs(5)) > 50
    assert inputs(5) == inputs(5) != inputs(6)
    assert inputs(None) != inputs(None)


def test_a_failed_check_shows_no_traceback_and_offers_the_next_hint(monkeypatch, capsys):
    monkeypatch.setattr(checks, "_hints_shown", {})
    hints = EXERCISES["7.1-padding"].hints
    with pytest.raises(CheckFailed) as failure:
        check("7.1-padding", whole_list_batch)
    lines = failure.value._render_traceback_()
    assert lines[0].startswith(
        "✗ 7.1-padding: with prompt_lengths=[3, 7, 5], batch_size=2, computed tokens: expected 19, got 21"
    )
    assert "shows hint 1 of 3" in lines[-1] and max(map(len, lines)) <= checks.LINE
    assert " ".join(" ".join(lines).split()) == " ".join(str(failure.value).split())
    for number, text in enumerate(hints, start=1):
        hint("7.1-padding")
        assert " ".join(capsys.readouterr().out.split()) == f"Hint {number} of 3: {text}"
    hint("7.1-padding")
    assert capsys.readouterr().out.count("Hint") == 3
    with pytest.raises(CheckFailed, match="All 3 hints are out"):
        check("7.1-padding", whole_list_batch)


def test_what_a_lab_prints_is_broken_between_words(monkeypatch, capsys):
    """JupyterLab breaks a line that is too long for the page wherever it ends."""
    monkeypatch.setattr(checks, "_hints_shown", {})
    for exercise in EXERCISES.values():
        for text in exercise.hints:
            hint(exercise.id)
            shown = capsys.readouterr().out
            assert max(map(len, shown.splitlines())) <= checks.LINE
            assert " ".join(shown.split()).endswith(" ".join(text.split()))


def test_unknown_names_are_answered_with_the_known_ones():
    for call in (lambda: check("7.1-paddding", len), lambda: hint("7.9-x"), lambda: reveal("7.1-q99")):
        with pytest.raises(UnknownName, match=r"known: 7\.[01]-"):
            call()


def test_answers_to_questions_are_not_in_the_chapters(capsys):
    files = [path for suffix in ("md", "ipynb") for path in (ROOT / "chapters").glob(f"*.{suffix}")]
    chapters = [path.read_text(encoding="utf-8") for path in files]
    text = " ".join(" ".join(chapters).split())
    assert load_questions()
    for question_id, answer in load_questions().items():
        assert f'reveal("{question_id}")' in text
        assert answer[:40] not in text
        reveal(question_id)
        assert " ".join(capsys.readouterr().out.split()) == answer


# The manifest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "What padding costs"', "", "exercise '7.1-padding' lacks title"),
        ("points = 2", "points = 0", "points must be a whole number from 1 to 20, not 0"),
        ("points = 2", "points = true", "points must be a whole number"),
        ("minutes = 10", "minutes = 10\nhours = 2", "unknown key 'hours'"),
        ("needs_gpu = false", 'needs_gpu = "no"', "needs_gpu must be true or false"),
        ('id = "7.1-padding"', 'id = "padding"', "an id is a section and a word"),
        ('id = "7.1-padding"', 'id = "7.1-fastest-finisher"', "listed twice"),
        ("hints = [", 'hints = [ "a fourth",', "needs three different hints"),
        ("[[exercise]]", "[[exercises]]", "unknown table 'exercises'"),
        ("points = 2", "points = ", "can't read the manifest"),
    ],
)
def test_a_faulty_manifest_is_refused_with_a_sentence(tmp_path, old, new, message):
    text = MANIFEST.read_text(encoding="utf-8")
    assert old in text
    faulty = tmp_path / "exercises.toml"
    faulty.write_text(text.replace(old, new, text.count(old) if "[[" in old else 1), encoding="utf-8")
    with pytest.raises(ManifestError, match=message):
        read_manifest(faulty)


# The build


def test_all_notebooks_are_up_to_date():
    assert build.build(ROOT, check=True) == []


def git(folder, *arguments):
    who = ("-c", "user.name=A Reader", "-c", "user.email=reader@example.org")
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout


@functools.cache
def readers_notebooks():
    """Notebooks of the tree in which a reader has worked, as `build --check` tells them."""
    said = []
    build.build(ROOT, check=True, say=said.append)
    return [line.split(" has local changes")[0] for line in said if " has local changes" in line]


@pytest.fixture
def book(tmp_path):
    """A copy of the book that a test may damage, outside any repository, and without what a reader did to it."""
    root = tmp_path / "book"
    root.mkdir()
    shutil.copy(ROOT / "pyproject.toml", root)  # the set-up cells name where the book is published
    for folder in ("chapters", "labs", "solutions"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns(".*"))
    for name in readers_notebooks():
        (root / name).write_bytes(git(ROOT, "show", f"HEAD:./{name}"))
    return root


@pytest.fixture
def clone(book):
    """The same as a committed working tree."""
    if shutil.which("git") is None:
        pytest.skip("needs Git")
    git(book, "init", "--quiet")
    git(book, "add", ".")
    git(book, "commit", "--quiet", "--message", "The book")
    return book


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8", newline="\n")


def edit_notebook(path, change):
    nb = json.loads(path.read_text(encoding="utf-8"))
    change(nb)
    text = json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8", newline="\n")


def executed_cell(nb):
    return next(cell for cell in nb["cells"] if cell["cell_type"] == "code" and cell["outputs"])


def an_error(nb):
    executed_cell(nb)["outputs"].append({"output_type": "error", "ename": "E", "evalue": "no", "traceback": []})


def an_address(nb):
    text = "<object object at 0x7f3a5c0d2e10>\n"
    executed_cell(nb)["outputs"].append({"output_type": "stream", "name": "stdout", "text": [text]})


LAB = "lab-7.1"
DAMAGES = {
    "source edited": (
        lambda root: edit(root / f"solutions/{LAB}.md", "A worked case", "A worked example"),
        [f"solutions/{LAB}.ipynb is stale", f"labs/{LAB}.ipynb is stale", f"run: minibatcher labs build {LAB}"],
    ),
    "chapter source edited": (
        lambda root: edit(root / "chapters/index.md", "# ", "# The "),
        ["chapters/index.ipynb is stale", "run: minibatcher labs build index"],
    ),
    "notebook edited": (
        lambda root: edit(root / f"labs/{LAB}.ipynb", "A worked case", "A worked example"),
        [f"labs/{LAB}.ipynb is stale"],
    ),
    "notebook saved by another program": (
        lambda root: edit(root / f"solutions/{LAB}.ipynb", '\n "nbformat": 4', '\n\n "nbformat": 4'),
        [f"solutions/{LAB}.ipynb was written by another program"],
    ),
    "notebook half written": (
        lambda root: (root / f"labs/{LAB}.ipynb").write_text('{"cells": [', encoding="utf-8"),
        [f"labs/{LAB}.ipynb is not a notebook"],
    ),
    "notebook deleted": (
        lambda root: (root / f"labs/{LAB}.ipynb").unlink(),
        [f"labs/{LAB}.ipynb is missing"],
    ),
    "a cell that was not run": (
        lambda root: edit_notebook(
            root / "chapters/index.ipynb",
            lambda nb: next(c for c in nb["cells"] if c["cell_type"] == "code").update(
                execution_count=None, outputs=[]
            ),
        ),
        ["chapters/index.ipynb: cell index-", "execution count None, should have 1"],
    ),
    "an error among the outputs": (
        lambda root: edit_notebook(root / f"solutions/{LAB}.ipynb", an_error),
        ["holds the error E: no"],
    ),
    "an address among the outputs": (
        lambda root: edit_notebook(root / f"solutions/{LAB}.ipynb", an_address),
        ["shows a memory address"],
    ),
    "an output deleted": (
        lambda root: edit_notebook(root / f"solutions/{LAB}.ipynb", lambda nb: executed_cell(nb).update(outputs=[])),
        [
            f"solutions/{LAB}.ipynb: its outputs are not those that the build saved",
            f"run: minibatcher labs build {LAB}",
        ],
    ),
    "a notebook without a source": (
        lambda root: shutil.copy(root / f"labs/{LAB}.ipynb", root / "labs/lab-9.ipynb"),
        ["labs/lab-9.ipynb has no source solutions/lab-9.md"],
    ),
    "a solution in the prose of a lab": (
        lambda root: edit(root / f"labs/{LAB}.ipynb", "A worked case", "computed += len(batch) * max(batch)"),
        [f"labs/{LAB}.ipynb leaks the solution of '7.1-padding': 'computed += len(batch) * max(batch)' stands in it"],
    ),
    "a solved lab": (
        lambda root: shutil.copy(root / f"solutions/{LAB}.ipynb", root / f"labs/{LAB}.ipynb"),
        [f"labs/{LAB}.ipynb leaks the solution of '7.1-padding'", "holds a solution marker", "was executed"],
    ),
    "no solution region": (
        lambda root: edit(root / f"solutions/{LAB}.md", "    ### BEGIN SOLUTION\n    computed", "    computed"),
        ["the answer cell of '7.1-padding' has no solution region"],
    ),
    "no check cell": (
        lambda root: edit(root / f"solutions/{LAB}.md", ":check: 7.1-padding", ":tags: [x]"),
        ["exercise '7.1-padding' needs one answer cell and one check cell after it, has answer"],
    ),
    "a check cell that does not check": (
        lambda root: edit(root / f"solutions/{LAB}.md", 'check("7.1-padding", padded_tokens)', "padded_tokens([3], 1)"),
        ["the check cell of '7.1-padding' has no line check(\"7.1-padding\", padded_tokens)"],
    ),
    "a check of another function": (
        lambda root: edit(root / f"solutions/{LAB}.md", '"7.1-padding", padded_tokens', '"7.1-padding", max'),
        ["the check cell of '7.1-padding' has no line check(\"7.1-padding\", padded_tokens)"],
    ),
    "an answer under another name": (
        lambda root: edit(root / f"solutions/{LAB}.md", "def padded_tokens(", "def tokens("),
        ["the answer cell of '7.1-padding' defines no function or class padded_tokens"],
    ),
    "a given cell with the package": (
        lambda root: edit(
            root / f"solutions/{LAB}.md",
            "{{exercise 7.1-padding}}",
            "```{code-cell} ipython3\n:tags: [given]\n\nimport minibatcher.cost\n```\n\n{{exercise 7.1-padding}}",
        ),
        ["imports minibatcher; answers are run without it"],
    ),
    "no heading": (
        lambda root: edit(root / f"solutions/{LAB}.md", "{{exercise 7.1-padding}}", "Exercise one"),
        ["exercise '7.1-padding' needs its heading once"],
    ),
    "a marker that nbval would ignore": (
        lambda root: edit(root / f"solutions/{LAB}.md", "from minibatcher", "# NBVAL_SKIP please\nfrom minibatcher"),
        ["NBVAL_SKIP must stand alone on its line"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_check_is_green_on_the_tree_and_red_after(damage, book):
    harm, messages = DAMAGES[damage]
    assert build.build(book, check=True) == []
    harm(book)
    problems = "\n".join(build.build(book, check=True))
    for message in messages:
        assert message in problems


def test_the_check_writes_nothing(book):
    before = {path: path.read_bytes() for path in book.rglob("*.*")}
    edit(book / f"solutions/{LAB}.md", "A worked case", "A worked example")
    assert main(["labs", "build", "--check", "--root", str(book)]) == 1
    changed = [path.name for path in book.rglob("*.*") if before.get(path) != path.read_bytes()]
    assert changed == [f"{LAB}.md"]


def test_an_exercise_in_the_manifest_needs_a_master_and_the_other_way_round(book):
    more = EXERCISES | {"7.1-new": replace(EXERCISES["7.1-padding"], id="7.1-new")}
    assert "'7.1-new' is in exercises.toml but in no master" in build.build(book, check=True, exercises=more)[0]
    fewer = {"7.1-padding": EXERCISES["7.1-padding"]}
    with pytest.raises(BuildError, match=r"', which is not in exercises\.toml"):
        build.build(book, check=True, exercises=fewer)
    beyond = EXERCISES | {"7.1-padding": replace(EXERCISES["7.1-padding"], rows=("9.9",))}
    assert "'7.1-padding' practises row '9.9', which is not in" in build.build(book, check=True, exercises=beyond)[0]
    moved = EXERCISES | {"7.1-padding": replace(EXERCISES["7.1-padding"], lab="lab-7.2")}
    assert "belongs to 'lab-7.2' in exercises.toml" in build.build(book, check=True, exercises=moved)[0]


def test_one_lab_is_built_while_another_is_half_written(book):
    edit(book / f"solutions/{LAB}.md", "how many of them are useful", "how many are useful")
    header = (book / f"solutions/{LAB}.md").read_text(encoding="utf-8").partition("# ")[0]
    (book / "solutions/lab-7.9.md").write_text(f"{header}\n{{{{exercise 7.9-new}}}}\n", encoding="utf-8")
    other = replace(EXERCISES["7.1-padding"], id="7.2-new", lab="lab-7.2", rows=("9.9",))
    assert build.build(book, only=[LAB], exercises=EXERCISES | {other.id: other}) == []
    with pytest.raises(BuildError, match=r"'7\.9-new', which is not in exercises\.toml"):
        build.build(book, check=True)


def test_each_line_of_a_solution_is_seen_wherever_it_leaks():
    masters = {path: read_source(path, EXERCISES) for path in sorted((ROOT / "solutions").glob("lab-*.md"))}
    rng = random.Random(8)
    for path, master in masters.items():
        lines = [line for cell in master.cells if role_of(cell) == "answer" for line in solution_lines(cell.source)]
        telling = [line for line in lines if len("".join(line.split())) >= 16]
        assert telling, f"{path.name} gives nothing to look for"
        lab = student_copy(master)
        assert audit.leaks(lab, masters.values(), path.stem) == []
        for line in telling:
            leaking = copy.deepcopy(lab)
            cell = rng.choice(leaking.cells)
            spaces = rng.choice(["", " ", "\t"])  # written otherwise, it is the same line
            cell.source += f"\n# {spaces}{line.replace(' ', rng.choice([' ', '  ']))}"
            assert any(repr(line) in problem for problem in audit.leaks(leaking, masters.values(), path.stem)), line


def test_a_leaking_lab_is_not_built(book):
    (book / f"labs/{LAB}.ipynb").unlink()
    edit(book / f"solutions/{LAB}.md", "A worked case", "Use `computed += len(batch)*max(batch)`. A worked case")
    problems = build.build(book, only=[LAB])
    assert "leaks the solution of '7.1-padding'" in problems[0]
    assert not (book / f"labs/{LAB}.ipynb").exists()


def test_a_cell_that_fails_is_not_built(book):
    before = (book / "chapters/index.ipynb").read_bytes()
    source = book / "chapters/index.md"
    source.write_text(source.read_text(encoding="utf-8") + "\n```{code-cell} ipython3\n1 / 0\n```\n", encoding="utf-8")
    problems = build.build(book, only=["index"])
    assert problems == ["chapters/index.md: a cell failed: ZeroDivisionError: division by zero"]
    assert (book / "chapters/index.ipynb").read_bytes() == before


def test_a_cell_that_writes_to_stderr_is_not_built_and_is_named(book):
    before = (book / "chapters/index.ipynb").read_bytes()
    cell = "\n```{{code-cell}} ipython3\n{}import sys\n\nprint('a warning', file=sys.stderr)\n```\n"
    source = book / "chapters/index.md"
    text = source.read_text(encoding="utf-8")
    for tags in ("", ":tags: [unsaved]\n\n"):
        source.write_text(text + cell.format(tags), encoding="utf-8")
        (problem,) = build.build(book, only=["index"])
        assert problem.startswith("chapters/index.md: cell index-") and "(import sys) writes to stderr" in problem
        assert "'a warning'" in problem
    assert (book / "chapters/index.ipynb").read_bytes() == before


def solve(nb):
    """What a student does: the answer is in the cell, and JupyterLab has saved outputs, counts and its own metadata."""
    (cell,) = [cell for cell in nb["cells"] if cell["id"] == "7-1-padding-answer"]
    cell.update(source=["def padded_tokens(prompt_lengths, batch_size):\n", "    return 19, 15"], execution_count=7)
    nb["metadata"]["language_info"]["version"] = "3.12.1"


def autosave(nb):
    """What JupyterLab does to a chapter that was run: other outputs and counts, other metadata."""
    for cell in nb["cells"]:
        if cell["cell_type"] == "code":
            cell.update(execution_count=3, outputs=[{"output_type": "stream", "name": "stderr", "text": ["hm"]}])
    nb["metadata"]["language_info"]["version"] = "3.12.1"


def test_a_solved_lab_is_never_overwritten_without_force(book):
    lab = book / f"labs/{LAB}.ipynb"
    fresh = lab.read_bytes()
    edit_notebook(lab, solve)
    solved, said = lab.read_bytes(), []
    (book / f"solutions/{LAB}.ipynb").unlink()
    assert build.build(book, only=[LAB], say=said.append) == []
    assert lab.read_bytes() == solved and (book / f"solutions/{LAB}.ipynb").exists()  # it went on with the others
    (sentence,) = [line for line in said if line.startswith("labs/")]
    assert "was edited and stays as it is" in sentence and f"minibatcher labs build --force {LAB}" in sentence
    assert main(["labs", "build", "--root", str(book), "--force", LAB]) == 0
    assert lab.read_bytes() == fresh


@pytest.mark.parametrize("text", ['{"cells": [', "<<<<<<< HEAD\n"])
def test_a_lab_that_cannot_be_read_is_kept_too(text, book):
    lab = book / f"labs/{LAB}.ipynb"
    lab.write_text(text, encoding="utf-8")
    assert build.build(book, only=[LAB]) == []
    assert lab.read_text(encoding="utf-8") == text
    assert f"--force {LAB}" in "\n".join(build.build(book, check=True))


def test_a_new_source_replaces_a_lab_that_nobody_edited(book):
    edit(book / f"solutions/{LAB}.md", "how many of them are useful.", "how many are useful.")
    assert build.build(book, only=[LAB]) == []
    assert build.build(book, check=True) == []
    assert b"how many are useful." in (book / f"labs/{LAB}.ipynb").read_bytes()


def test_a_chapter_is_kept_if_its_code_was_changed_and_renewed_if_it_only_ran(book):
    index = book / "chapters/index.ipynb"
    edit_notebook(index, autosave)
    assert build.build(book, only=["index"]) == [] == build.build(book, check=True)
    edit(index, "max_tokens=60", "max_tokens=61")
    changed, said = index.read_bytes(), []
    assert build.build(book, only=["index"], say=said.append) == []
    assert index.read_bytes() == changed and "chapters/index.ipynb was edited" in "\n".join(said)


def test_prose_and_the_set_up_are_renewed_without_running_anything(book, monkeypatch):
    monkeypatch.setattr(build, "execute", lambda *arguments: pytest.fail("ran something"))
    edit(book / f"solutions/{LAB}.md", "A worked case", "A worked example")
    edit(book / "pyproject.toml", "minibatcher/minibatcher", "somebody/else")
    assert len(build.build(book, check=True)) > 10
    assert build.build(book, keep_outputs=True) == [] == build.build(book, check=True)
    solution, lab = ((book / folder / f"{LAB}.ipynb").read_text(encoding="utf-8") for folder in ("solutions", "labs"))
    assert "A worked example" in solution and "somebody/else" in solution and "somebody/else" in lab


def test_outputs_of_other_code_are_not_kept(book):
    index = book / "chapters/index.ipynb"
    edit(book / "chapters/index.md", "max_tokens=60", "max_tokens=61")
    before = index.read_bytes()
    (problem,) = build.build(book, keep_outputs=True, only=["index"])
    assert (
        "chapters/index.md: its code or a tag has changed, so it must be run" in problem
        and index.read_bytes() == before
    )
    edit(book / "chapters/index.md", "max_tokens=61", "max_tokens=60")
    edit(book / "chapters/index.md", "ipython3\nfrom", "ipython3\n:tags: [unsaved]\n\nfrom")
    (problem,) = build.build(book, keep_outputs=True, only=["index"])
    assert "or a tag has changed" in problem and index.read_bytes() == before
    edit(book / "chapters/index.md", "ipython3\n:tags: [unsaved]\n\nfrom", "ipython3\nfrom")
    edit_notebook(index, autosave)
    (problem,) = build.build(book, keep_outputs=True, only=["index"])
    assert "no outputs that the build saved" in problem
    index.unlink()
    assert "no outputs that the build saved" in build.build(book, keep_outputs=True, only=["index"])[0]


@pytest.mark.parametrize(("name", "work"), [(f"labs/{LAB}.ipynb", solve), ("chapters/index.ipynb", autosave)])
def test_the_check_lets_a_reader_work_but_not_commit_it(name, work, clone, capsys):
    edit_notebook(clone / name, work)
    assert main(["labs", "build", "--check", "--root", str(clone)]) == 0
    assert capsys.readouterr().err == f"{name} has local changes; not compared\n"
    git(clone, "add", ".")  # staged is not committed
    assert build.build(clone, check=True) == []
    git(clone, "commit", "--quiet", "--message", "My answers")
    assert name in "\n".join(build.build(clone, check=True))


def test_the_check_compares_what_git_does_not_know(clone, monkeypatch):
    lab = f"labs/{LAB}.ipynb"
    git(clone, "rm", "--quiet", "--cached", lab)
    git(clone, "commit", "--quiet", "--message", "Untracked")
    edit_notebook(clone / lab, solve)
    assert lab in "\n".join(build.build(clone, check=True))
    edit_notebook(clone / "chapters/index.ipynb", autosave)
    assert "index" not in "\n".join(build.build(clone, check=True))
    monkeypatch.setenv("PATH", "")  # no Git: everything is compared
    assert "chapters/index.ipynb" in "\n".join(build.build(clone, check=True))


def test_a_tracked_notebook_that_is_missing_fails_the_check(clone):
    (clone / f"labs/{LAB}.ipynb").unlink()
    assert f"labs/{LAB}.ipynb is missing" in build.build(clone, check=True)[0]


def test_pictures_and_source_are_shown_as_notebooks_can_read_them(monkeypatch):
    import IPython.display
    from matplotlib.figure import Figure

    from minibatcher.labkit import show, show_diff, show_source

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda bundle, **options: shown.append(bundle))
    show(Figure(figsize=(1, 1)), alt='8 rows, "static" & <padded>')
    assert ' alt="8 rows, &quot;static&quot; &amp; &lt;padded&gt;">' in shown[0]["text/html"]
    assert shown[0]["text/html"].startswith('<img src="data:image/png;base64,iVBOR')
    assert shown[0]["text/plain"] == '8 rows, "static" & <padded>'
    show_source(git)
    assert "overflow-x: auto" in shown[1]["text/html"] and shown[1]["text/plain"].startswith("def git(folder")
    show_diff("a = 1\nb = 2", "a = 1\nb = 3 < 4", names=("before", "after"))
    assert shown[2]["text/plain"] == "--- before\n+++ after\n@@ -1,2 +1,2 @@\n a = 1\n-b = 2\n+b = 3 < 4"
    assert "+b = 3 &lt; 4" in shown[2]["text/html"] and "color" in shown[2]["text/html"]
    show_diff(git, git)
    assert shown[3]["text/plain"] == ""


def test_building_again_gives_the_same_bytes(book):
    before = {path: path.read_bytes() for path in book.rglob(f"{LAB}.ipynb")}
    assert build.build(book, only=[LAB]) == []
    assert len(before) == 2
    assert {path: path.read_bytes() for path in before} == before


def test_mistakes_on_the_command_line_get_a_sentence(tmp_path, capsys):
    assert main(["labs", "build", "--root", str(tmp_path)]) == 2
    assert "no sources under" in capsys.readouterr().err
    assert main(["labs", "build", "--root", str(ROOT), "no-such"]) == 2
    assert "no source named 'no-such'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("### BEGIN SOLUTION\nx = 1", "'### BEGIN SOLUTION' without '### END SOLUTION'"),
        ("x = 1\n### END SOLUTION", "'### END SOLUTION' without its partner"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION", "without its partner"),
    ],
)
def test_solution_markers_must_match(source, message):
    with pytest.raises(BuildError, match=message):
        stub(source, "7.1-x")


def test_stubs_keep_the_indentation_and_all_that_is_given():
    source = (
        "def f():\n    a = 1\n    ### BEGIN SOLUTION\n    if a:\n        return 2\n    ### END SOLUTION\n    return a\n"
    )
    stubbed = stub(source, "7.1-x").split("\n")
    assert stubbed == [
        "def f():",
        "    a = 1",
        '    raise NotImplementedError("your answer to exercise 7.1-x")',
        "    return a",
        "",
    ]


def test_notebooks_are_valid_sources_for_nbgrader():
    for path in (ROOT / "labs").glob("*.ipynb"):
        nb = json.loads(path.read_text(encoding="utf-8"))
        graded = [cell["metadata"]["nbgrader"] for cell in nb["cells"] if "nbgrader" in cell["metadata"]]
        assert graded and all(meta["schema_version"] == 3 for meta in graded)
        ids = [meta["grade_id"] for meta in graded]
        assert len(set(ids)) == len(ids) and all(name.replace("-", "").isalnum() for name in ids)
        for meta in graded:
            assert {"grade", "solution", "locked", "task", "cell_type"} <= set(meta)
            assert meta["grade"] != meta["solution"] and meta["locked"] == meta["grade"]
            assert ("points" in meta) == meta["grade"]
        checks_of = [cell for cell in nb["cells"] if cell["metadata"].get("minibatcher", {}).get("role") == "check"]
        for cell in checks_of:
            meta = cell["metadata"]["nbgrader"]
            assert meta["grade_id"] == cell["id"]
            assert meta["points"] == EXERCISES[cell["metadata"]["minibatcher"]["exercise"]].points
        assert len(graded) == 2 * len(checks_of) == 2 * sum(e.lab == path.stem for e in EXERCISES.values())


def test_notebooks_hold_nothing_of_the_machine_that_built_them():
    for folder in ("chapters", "labs", "solutions"):
        for path in (ROOT / folder).glob("*.ipynb"):
            data = path.read_bytes()
            nb = json.loads(data)
            if path.relative_to(ROOT).as_posix() in readers_notebooks():
                continue
            digests = nb["metadata"].pop("minibatcher")
            assert set(digests) == ({"sources"} if folder == "labs" else {"outputs", "sources"})
            assert nb["metadata"] == {
                "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                "language_info": {"name": "python"},
            }
            assert b"\r" not in data and str(ROOT).encode() not in data
            for metadata in (cell["metadata"] for cell in nb["cells"]):
                # `jupyter` and `cellView` fold what is no part of the story, or would answer a question.
                assert set(metadata) <= {"minibatcher", "nbgrader", "tags", "jupyter", "cellView"}
                assert set(metadata.get("jupyter", {})) <= {"source_hidden", "outputs_hidden"}
