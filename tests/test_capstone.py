"""The capstone: whose parts a server is made of, and a tournament in which nothing is believed but the plans."""

import json
import random

import pytest

from minibatcher.labkit import judge, stand_ins
from minibatcher.labkit.judging import Seen, record
from minibatcher.labkit.keys import capstone as key
from minibatcher.labkit.manifest import load_manifest
from minibatcher.labkit.parts import PARTS, leaderboard, my_parts
from minibatcher.labkit.tasks.capstone import TASKS

PLANNER = """def plan_step(pending, budget):
    plan = {}
    for name in sorted(pending, key=lambda name: pending[name] > ONE):
        if min(pending[name], budget):
            plan[name] = min(pending[name], budget)
            budget -= plan[name]
    return plan
"""
MARK = "# Exercise 7.3-chunk-planner\n"
POLICY = TASKS["capstone-policy"]


def lab(folder, *sources, given="ONE = 1"):
    cells = [{"cell_type": "code", "source": [given], "metadata": {"tags": ["given"]}}]
    cells += [{"cell_type": "code", "source": source, "metadata": {}} for source in sources]
    (folder / "lab-7.3.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")


def planner(folder):
    parts = my_parts(folder, seed=1)
    return next(part for part in parts.found if part.name == "plan_step")


def test_a_part_that_passes_its_check_is_the_readers_own(tmp_path, capsys):
    lab(tmp_path, "1 / 0", MARK + PLANNER)
    part = planner(tmp_path)
    assert part.whose == "yours" and part.answer({"a": 3, "b": 1}, 3) == {"b": 1, "a": 2}
    assert "plan_step" in capsys.readouterr().out


def test_a_stub_that_is_commented_out_is_no_stub(tmp_path):
    lab(tmp_path, MARK + PLANNER + "    # raise NotImplementedError('your answer')")
    assert planner(tmp_path).whose == "yours"


def test_what_an_answer_prints_does_not_tear_the_table(tmp_path, capsys):
    lab(tmp_path, MARK + "print('torn')\n" + PLANNER.replace("plan = {}", "plan = {}; print('mine')"))
    assert planner(tmp_path).whose == "yours"
    printed = capsys.readouterr().out
    assert "mine" not in printed and "torn" not in printed and printed.startswith("part ")


def test_the_last_written_cell_counts(tmp_path):
    lab(tmp_path, MARK + "plan_step = dict", MARK + PLANNER, MARK + "def plan_step(): raise NotImplementedError('x')")
    assert planner(tmp_path).whose == "yours"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (MARK + "def plan_step(pending, budget):\n    return {}", "fails its check; see lab-7.3.ipynb"),
        (
            MARK + "def plan_step(pending, budget):\n    return helper(pending)",
            "NameError: name 'helper' is not defined; define it in its cell",
        ),
        (MARK + "def plan_step(p, b):\n    raise NotImplementedError('your answer')", "not written yet"),
        (MARK + "def other():\n    pass", "its cell defines no plan_step"),
        (MARK + "def plan_step(", "its cell raised SyntaxError: "),
        (PLANNER, "has no cell that begins with"),
    ],
)
def test_the_reference_stands_in_and_the_table_says_why(tmp_path, source, why):
    lab(tmp_path, source)
    part = planner(tmp_path)
    assert part.whose == "reference" and why in part.why
    assert part.answer({"a": 3, "b": 1}, 3) == {"b": 1, "a": 2}


def test_without_any_lab_all_parts_are_the_references(tmp_path, capsys):
    parts = my_parts(tmp_path, seed=1)
    assert {part.whose for part in parts.found} == {"reference"}
    assert "lab-7.3.ipynb is not beside this notebook" in capsys.readouterr().out
    with pytest.raises(AttributeError, match="no part is named 'engine'; there are"):
        _ = parts.engine


@pytest.mark.parametrize("exercise_id", [i for i in PARTS if i in load_manifest()])
def test_the_stand_ins_pass_the_checks_of_their_labs(exercise_id):
    answer = getattr(stand_ins, load_manifest()[exercise_id].name, None)
    if answer is not None:
        result = judge(exercise_id, answer, seed=1)
        assert result.ok, result


@pytest.mark.parametrize("seed", range(20))
def test_the_reference_policy_has_room_to_spare(seed):
    for case in POLICY.cases(random.Random(seed))[1:]:
        naive = max(key._goodput(case, policy) for policy in key.NAIVE.values())
        assert key._goodput(case, key.best_known) > naive + 3


FORGED = [
    [],
    [Seen("requests in time", 10**6)],
    [Seen("step 1: plan", {"chat0": True})],
    [Seen("step 1: plan", {"chat0": 10**9})],
    [Seen("step 1: plan", {"doc1": 1})],  # not there yet
    [Seen("step 1: plan", [["chat0", 20]])],
    [Seen("step 1: plan", {"chat0": 20})] * 500,
]


@pytest.mark.parametrize("seen", FORGED)
def test_a_forged_record_wins_nothing(seen):
    case = POLICY.cases(random.Random(1))[0]
    assert key.POLICY.assess(case, seen)


def test_plans_are_counted_and_not_what_a_record_says():
    case = POLICY.cases(random.Random(1))[1]
    seen = record(POLICY, case, key.best_known).seen
    assert key.POLICY.assess(case, seen) is None
    assert key.POLICY.assess(case, record(POLICY, case, key.static).seen)
    assert "expected a plan, got none" in key.POLICY.assess(case, seen[:-1])


def test_the_board_ranks_all_entrants(capsys):
    leaderboard(lambda *_: {}, size=30)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("reference") and len(lines) == 5
    assert any(line.startswith("yours") and "got nobody" in line for line in lines)
