"""Add, abort, step and fail in any order, over every combination: nothing is lost, nothing leaks, nobody starves."""

from __future__ import annotations

from itertools import groupby

import pytest
from pressure_machine import COMBINATIONS, run_machine

from minibatcher.scheduling import ADMISSIONS, ORDERINGS

EXAMPLES = 8  # of each combination
GROUPS = {
    key: list(rows) for key, rows in groupby(COMBINATIONS, lambda c: (c.strategy, c.engine_class.__name__, c.admission))
}


def test_two_thousand_examples_are_run():
    assert EXAMPLES * len(COMBINATIONS) >= 2_000
    each = len(ADMISSIONS) * len(ORDERINGS)
    assert len(set(COMBINATIONS)) == len(COMBINATIONS) == sum(map(len, GROUPS.values())) == 3 * each + 4 * each * 2 * 3


@pytest.mark.parametrize("group", list(GROUPS.values()), ids=["-".join(key) for key in GROUPS])
def test_any_order_of_events(group):
    for combination in group:
        run_machine(combination, EXAMPLES)
