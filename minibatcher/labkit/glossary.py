"""The book's words, one for each concept, with the French term; and the letters of its formulas."""

from __future__ import annotations

import difflib
import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import InvalidParameter
from ..tomlfile import read_toml

LINE = 100  # characters, as in questions.reveal


@dataclass(frozen=True)
class Term:
    """One entry of glossary.toml.

    chapter: where it is introduced. also: other names that may be used. avoid: names that the book does not use for it.
    """

    term: str
    french: str
    chapter: str
    explanation: str
    also: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        return f"{self.term} ({', '.join(self.also)})" if self.also else self.term


@dataclass(frozen=True)
class Symbol:
    """A letter of the text's formulas. code: its name in the package's source; empty if it is only said in shapes."""

    symbol: str
    meaning: str
    code: str = ""


@cache
def load_terms() -> tuple[Term, ...]:
    """The terms, in the file's order."""
    lists = ("also", "avoid")
    return tuple(
        Term(**{**entry, **{key: tuple(entry[key]) for key in lists if key in entry}}) for entry in _read()["term"]
    )


@cache
def load_symbols() -> tuple[Symbol, ...]:
    """The letters, in the file's order."""
    return tuple(Symbol(**entry) for entry in _read()["symbol"])


def find_term(name: str) -> Term:
    """The term of this name, in English or French, or that which the book uses for it; upper and lower case are one.

    Raises InvalidParameter with the nearest names where there is none.
    """
    names = {
        spelling.casefold(): term
        for term in load_terms()
        for spelling in (term.term, *term.also, *term.avoid, term.french)
    }
    wanted = " ".join(str(name).split()).casefold()
    if wanted not in names:
        near = dict.fromkeys(names[match].term for match in difflib.get_close_matches(wanted, names, n=5))
        hint = f"near it: {', '.join(near)}; glossary() shows all" if near else "glossary() shows all terms"
        raise InvalidParameter(f"{name!r} is not in the glossary; {hint}")
    return names[wanted]


def glossary(name: str | None = None) -> None:
    """Print what one term means, or show the table of all. Raises InvalidParameter for a name that is not there."""
    if name is not None:
        print(_line(find_term(name)))
        return
    rows = [(term.heading, term.explanation, term.french, term.chapter, ", ".join(term.avoid)) for term in load_terms()]
    text = "\n".join(map(_line, load_terms()))
    _display(("term", "what it means", "in French", "chapter", "not used for it"), rows, text, french=2)


def notation() -> None:
    """Show the letters of formulas and shapes."""
    rows = [(symbol.symbol, symbol.code, symbol.meaning) for symbol in load_symbols()]
    text = "\n".join(f"{letter:6}{code:19}{meaning}" for letter, code, meaning in rows)
    _display(("letter", "in the code", "what it counts"), rows, text)


def _read() -> dict[str, Any]:
    return read_toml(Path(__file__).with_name("glossary.toml"))


def _line(term: Term) -> str:
    avoid = f" Not used for it: {', '.join(term.avoid)}." if term.avoid else ""
    line = f"{term.heading}: {term.explanation} French: {term.french}. Chapter {term.chapter}.{avoid}"
    return textwrap.fill(line, LINE, subsequent_indent="  ", break_on_hyphens=False)


def _display(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], text: str, french: int | None = None) -> None:
    """A table as HTML; `text` says the same where HTML is not shown. french: the column whose words are French."""
    from IPython.display import display

    left = 'style="text-align: left"'  # notebooks set tables to the right

    def cell(column: int, words: str) -> str:
        if column == 0:  # a screen reader says it before each cell of its row
            return f'<th scope="row" {left}>{html.escape(words)}</th>'
        language = ' lang="fr"' if column == french else ""
        return f"<td {left}{language}>{html.escape(words)}</td>"

    top = "".join(f'<th scope="col" {left}>{html.escape(words)}</th>' for words in head)
    body = "\n".join(f"<tr>{''.join(cell(column, words) for column, words in enumerate(row))}</tr>" for row in rows)
    page = f"<table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    display({"text/html": page, "text/plain": text}, raw=True)
