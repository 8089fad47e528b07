"""What is taught where: the rows of the syllabus, each with its chapter, its section and the tests that hold it."""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..tomlfile import read_toml


@dataclass(frozen=True)
class Row:
    """One entry of syllabus.toml. section: a heading of the chapter. tests: "tests/test_x.py::test_name"."""

    id: str
    what: str
    kind: str
    chapter: str
    section: str
    tests: tuple[str, ...]


@cache
def load_syllabus() -> tuple[Row, ...]:
    """The rows, in the file's order."""
    entries = read_toml(Path(__file__).with_name("syllabus.toml"))["row"]
    return tuple(Row(**entry | {"tests": tuple(entry["tests"])}) for entry in entries)


def syllabus() -> None:
    """Display all rows as a table, each with the section that teaches it and the tests that hold it."""
    from IPython.display import display

    head = ("row", "what", "kind", "chapter and section", "held by")
    rows = [(r.id, r.what, r.kind, f"{r.chapter} {r.section}", ", ".join(r.tests)) for r in load_syllabus()]
    line = lambda cells, tag: "".join(f"<{tag} style='text-align: left'>{html.escape(c)}</{tag}>" for c in cells)  # noqa: E731
    tests = lambda cell: f"<td style='text-align: left; overflow-wrap: anywhere'>{html.escape(cell)}</td>"  # noqa: E731
    body = "\n".join(f"<tr>{line(row[:-1], 'td')}{tests(row[-1].replace('tests/', ''))}</tr>" for row in rows)
    text = "\n".join(" | ".join(row) for row in (head, *rows))
    display({"text/html": f"<table><tr>{line(head, 'th')}</tr>\n{body}</table>", "text/plain": text}, raw=True)
