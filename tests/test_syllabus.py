"""Every row of the syllabus is taught in a section that exists, and held by tests that exist."""

import ast
import re
from pathlib import Path

import pytest
from book import headings, output, tagged

from minibatcher.labkit.syllabus import load_syllabus

ROOT = Path(__file__).resolve().parents[1]
ROWS = load_syllabus()
NUMBER_OF_ROWS = {"0": 6, "1": 7, "2": 13, "3": 6, "4": 7, "M": 6}
KINDS = {"claim", "implemented", "shown", "measuring", "pointer"}


def names_of_tests(path):
    """The names of a file's test functions."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_all_rows_are_there():
    wanted = [f"{part}.{i}" for part, count in NUMBER_OF_ROWS.items() for i in range(1, count + 1)]
    assert [row.id for row in ROWS] == wanted
    assert {row.kind for row in ROWS} == KINDS
    assert all(row.id[0] == "M" or row.chapter == f"7.{row.id[0]}" for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_its_section_exists(row):
    assert row.section in headings(row.chapter)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_its_tests_exist(row):
    assert row.tests or row.kind == "pointer"
    for test in row.tests:
        path, _, name = test.partition("::")
        assert name in names_of_tests(path), f"{row.id}: there is no test {test}"


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind == "claim"], ids=lambda row: row.id)
def test_a_claim_is_printed_in_its_section_and_looked_for_by_a_test(row):
    tag = f"claim-{row.id}"
    assert re.search(r"\d", output(row.chapter, tag))
    assert row.section in {heading for heading, _ in tagged(row.chapter, tag)}
    sources = [(ROOT / test.partition("::")[0]).read_text(encoding="utf-8") for test in row.tests]
    assert any(f'"{tag}"' in source for source in sources), f"no test of {row.id} reads what its cell printed"


@pytest.mark.parametrize("chapter", sorted({row.chapter for row in ROWS}))
def test_every_tag_belongs_to_a_row(chapter):
    from book import notebook

    tags = {tag for cell in notebook(chapter)["cells"] for tag in cell["metadata"].get("tags", [])}
    known = {f"claim-{row.id}" for row in ROWS if row.chapter == chapter}
    assert {tag for tag in tags if tag.startswith("claim-")} <= known
