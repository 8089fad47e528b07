"""Answers to the chapters' questions, kept out of the text so that a reader meets them only when asking."""

from __future__ import annotations

import textwrap
from functools import cache
from pathlib import Path

from ..errors import UnknownName
from ..tomlfile import read_toml


@cache
def load_questions() -> dict[str, str]:
    """Answers by question id."""
    entries = read_toml(Path(__file__).with_name("questions.toml"))["question"]
    return {entry["id"]: " ".join(entry["answer"].split()) for entry in entries}


def reveal(question_id: str) -> None:
    """Print the answer to a question. Raises UnknownName."""
    questions = load_questions()
    if question_id not in questions:
        raise UnknownName("question", question_id, list(questions))
    print(textwrap.fill(questions[question_id], 100))
