"""Every exercise of the labs, one by one: the starter fails, right answers pass, and wrong ones are told why.

Right and wrong answers beyond those of minibatcher/labkit/keys stand in lab_answers/, one module a lab.
"""

import ast
import linecache
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("jupytext")
pytest.importorskip("torch")

from minibatcher.labkit import CheckFailed, check, checks, judge
from minibatcher.labkit.judging import Seen, Unfit, difference, list_of, number, pair_of, text, truth, whole_number
from minibatcher.labkit.manifest import ManifestError, load_manifest
from minibatcher.labkit.notebooks import GIVEN, read_source, role_of, student_copy

ROOT = Path(__file__).resolve().parents[1]
EXERCISES = load_manifest()
SEEDS = [1, 2, 3]
# Rows of the syllabus that some exercise must practise.
# fmt: off
PRACTISED = [
    "0.1", "0.2", "0.4", "0.5", "0.6", "1.1", "1.2", "1.3", "1.6", "1.7", "2.1", "2.4", "2.5", "2.8",
    "2.10", "2.11", "3.2", "3.3", "3.4", "4.1", "4.3", "4.5", "4.7",
]
# fmt: on


def further(exercise_id, kind):
    """RIGHT or WRONG answers of lab_answers/."""
    module = import_module(f"lab_answers.{re.sub('[-.]', '_', EXERCISES[exercise_id].lab)}")
    return getattr(module, kind).get(exercise_id, [])


def cases(kind):
    """(exercise, one of its answers), each named by its number."""
    return [
        pytest.param(exercise_id, answer, id=f"{exercise_id}-{nth}")
        for exercise_id in EXERCISES
        for nth, answer in enumerate(kind(exercise_id))
    ]


def mistakes(exercise_id):
    return checks.key_of(EXERCISES[exercise_id]).mistakes


def written(exercise_id, *, student):
    """What the answer cell of a lab defines, and that its check cell says; given cells run before it."""
    exercise = EXERCISES[exercise_id]
    nb = read_source(ROOT / "solutions" / f"{exercise.lab}.md", EXERCISES)
    nb = student_copy(nb) if student else nb
    mine = [cell for cell in nb.cells if cell.metadata.get("minibatcher", {}).get("exercise") == exercise_id]
    assert [role_of(cell) for cell in mine] == ["answer", "check"]
    assert mine[0].source.startswith(f"# Exercise {exercise_id}\n")
    given = [cell for cell in nb.cells if GIVEN in cell.metadata.get("tags", [])]
    namespace = {"__name__": "__main__", "check": check}
    for cell in [*given, mine[0]]:
        name = f"<{cell.id}-{student}>"  # Triton reads a kernel's source, as it can in a notebook
        linecache.cache[name] = (len(cell.source), None, cell.source.splitlines(keepends=True), name)
        exec(compile(cell.source, name, "exec"), namespace)
    return namespace, mine[1].source


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_the_starter_fails_and_the_solution_passes(exercise_id, capsys):
    namespace, check_cell = written(exercise_id, student=True)
    with pytest.raises(CheckFailed, match=f"✗ {exercise_id}: not written yet"):
        exec(check_cell, namespace)
    namespace, check_cell = written(exercise_id, student=False)
    exec(check_cell, namespace)
    assert capsys.readouterr().out.startswith(f"✓ {exercise_id}: ")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_the_key_passes(exercise_id, seed):
    result = judge(exercise_id, checks.key_of(EXERCISES[exercise_id]).answer, seed=seed)
    assert result.ok and re.search(rf" \(\d+ inputs, seed {seed}\)$", result.message), result.message


@pytest.mark.parametrize(("exercise_id", "answer"), cases(lambda i: further(i, "RIGHT")))
@pytest.mark.parametrize("seed", SEEDS)
def test_a_right_answer_built_otherwise_passes(exercise_id, answer, seed):
    result = judge(exercise_id, answer, seed=seed)
    assert result.ok, result.message


@pytest.mark.parametrize(("exercise_id", "mistake"), cases(mistakes))
@pytest.mark.parametrize("seed", SEEDS)
def test_each_known_mistake_gets_its_message(exercise_id, mistake, seed):
    result = judge(exercise_id, mistake.answer, seed=seed)
    assert not result.ok
    assert result.message.endswith(f"{mistake.message} (seed {seed})"), result.message
    assert result.message.count(" (seed ") == 1


@pytest.mark.parametrize(("exercise_id", "wrong"), cases(lambda i: further(i, "WRONG")))
def test_any_other_wrong_answer_is_told_what_differed(exercise_id, wrong):
    answer, part = wrong
    result = judge(exercise_id, answer, seed=1)
    assert not result.ok and part in result.message, result.message


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_each_exercise_has_enough_answers_to_hold_it(exercise_id):
    assert len(further(exercise_id, "RIGHT")) >= 2
    assert len(mistakes(exercise_id)) + len(further(exercise_id, "WRONG")) >= 5
    messages = [mistake.message for mistake in mistakes(exercise_id)]
    assert len(set(messages)) == len(messages)
    assert all(re.search(r"[.?]$", message) for message in messages)


def test_tasks_and_keys_are_those_of_the_manifest():
    for room in ("tasks", "keys"):
        there = [
            name
            for path in sorted((ROOT / "minibatcher" / "labkit" / room).glob("[a-z]*.py"))
            for name in getattr(import_module(f"minibatcher.labkit.{room}.{path.stem}"), room.upper())
        ]
        assert sorted(there) == sorted(EXERCISES)


def test_every_row_that_a_lab_should_practise_is_practised():
    practised = {row for exercise in EXERCISES.values() for row in exercise.rows}
    assert [row for row in PRACTISED if row not in practised] == []


def imports(path):
    """(where in the package, what) of each import from the package, anywhere in a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("minibatcher")):
            yield f"{'.' * node.level}{node.module or ''}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("minibatcher"))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "minibatcher" / "labkit" / "tasks").glob("lab_*.py")), ids=lambda path: path.stem
)
def test_a_task_needs_nothing_of_the_package_but_judging(path):
    assert set(imports(path)) == {"..judging"}


# What a message says


@pytest.mark.parametrize(
    ("right", "mine", "said"),
    [
        ([1, 2], [1, 2], None),
        ((1, [2, 3]), [1, (2, 3)], None),
        (1, 1.0, None),  # a whole number by another name, as from a mean
        (0.1 + 0.2, 0.3, None),
        (0.3, 0.4, "x: expected 0.3, got 0.4"),
        (1.0, True, "x: expected 1, got True"),
        (1, True, "x: expected 1, got True"),
        (0, "0", "x: expected 0, got '0'"),
        (None, 0, "x: expected None, got 0"),
        (float("nan"), 1.0, "x: expected nan, got 1"),
        ([1, 2], [2, 1], "x: expected [1, 2], got [2, 1]"),
        ([[1], [2, 3]], [[1], [2]], "x: expected [[1], [2, 3]], got [[1], [2]]"),
        ({"a": 1.0, "b": [2]}, {"b": [2], "a": 1.0 + 1e-9}, None),
        ({"a": 1}, {"a": 1, "b": 2}, "x: expected {'a': 1}, got {'a': 1, 'b': 2}"),
        (list(range(20)), [*range(19), 0], "x[19]: expected 19, got 0"),
        ([[0] * 9] * 9, [[0] * 9] * 8 + [[0] * 8 + [5]], "x[8][8]: expected 0, got 5"),
        (list(range(9)), list(range(8)), f"x: expected {list(range(9))}, got {list(range(8))}"),
    ],
)
def test_a_difference_is_found_and_placed(right, mine, said):
    assert difference([Seen("x", right)], [Seen("x", mine)], 1e-6) == said
    if said:
        thoughtful = difference([Seen("x", right, "Think.")], [Seen("x", mine)], 1e-6)
        assert thoughtful == f"{said}. Think."


def test_a_difference_of_what_was_seen_at_all():
    one, two = Seen("step 1: a", 1), Seen("step 2: b", 2)
    assert difference([one, two], [one], 1e-6) == "step 2: b: missing: 2"
    assert difference([one, two], [one], 1e-6, whole=False) is None
    assert difference([one], [one, two], 1e-6) == "step 2: b: too much: 2"
    assert difference([one], [two], 1e-6) == "step 1: a: expected 1, got step 2: b: 2"


@pytest.mark.parametrize(
    ("read", "value", "result"),
    [
        (whole_number, True, 1),
        (number, 3, 3.0),
        (truth, False, False),
        (text, "é", "é"),
        (list_of(whole_number), (1, 2), [1, 2]),
        (list_of(list_of(whole_number)), iter([range(2), []]), [[0, 1], []]),
        (pair_of("a", "b"), [1, 2], {"a": 1, "b": 2}),
        (pair_of("a", "b", read=list_of(number)), ([1], ()), {"a": [1.0], "b": []}),
    ],
)
def test_readers_take_what_is_alike(read, value, result):
    assert read(value) == result


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (whole_number, 1.0, r"expected a whole number, got 1\.0 \(float\)"),
        (number, "3", r"expected a number, got '3' \(str\)"),
        (number, True, "expected a number, got True"),
        (truth, 1, r"expected True or False, got 1 \(int\)"),
        (text, None, "expected a text, got None"),
        (list_of(whole_number), "12", "expected a list, got '12'"),
        (list_of(whole_number), {1: 2}, "expected a list, got {1: 2}"),
        (list_of(whole_number), 5, r"expected a list, got 5 \(int\)"),
        (list_of(whole_number), [1, None], "expected a whole number, got None"),
        (pair_of("a", "b"), (1,), r"expected 2 values, \(a, b\), got \(1,\)"),
        (pair_of("a", "b"), None, r"expected 2 values, \(a, b\), got None"),
    ],
)
def test_readers_say_what_they_expected(read, value, message):
    with pytest.raises(Unfit, match=message):
        read(value)


def test_readers_name_what_an_object_raised():
    class Bad:
        def __iter__(self):
            raise ValueError("out of order")

    with pytest.raises(Unfit, match=r"\(Bad\) that can't be read, it raised ValueError: out of order"):
        list_of(number)(Bad())


@pytest.mark.parametrize("room, find", [("tasks", checks.task_of), ("keys", checks.key_of)])
def test_an_exercise_with_a_part_missing_is_told_which(room, find):
    new = replace(EXERCISES["7.0-two-phases"], id="7.0-new")
    with pytest.raises(ManifestError, match=rf"'7.0-new' has no entry in labkit/{room}/lab_7_0.py"):
        find(new)
