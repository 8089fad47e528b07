"""What the guided tour of the code (chapters/tour.md) says of the installed files, and what it invites to break."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

from ..errors import InvalidParameter
from .figures import show_diff

PACKAGE = Path(__file__).resolve().parents[1]
LINE = 100  # characters


def stop(*names: str) -> None:
    """Print each file of a stop (a path in the package) with its length in lines and what it imports from here."""
    wide = max(map(len, names))
    for name in names:
        needed = ", ".join(file.removesuffix("__init__.py") or "minibatcher" for file in imported(name)) or "nothing"
        head = f"{name:{wide}}  {len(_text(name).splitlines()):4} lines, imports "
        print(textwrap.fill(head + needed, LINE, subsequent_indent=" " * len(head), break_on_hyphens=False))


def imported(name: str) -> list[str]:
    """The files of the package that a file imports when it is loaded, in alphabetical order."""
    return sorted({file for file in _imports(name) if file})


def change(name: str, old: str, new: str, test: str) -> None:
    """Display a change of one line of a file, and print the command that shows what it breaks.

    test: `file.py::function` under tests/. Raises InvalidParameter unless `old` stands in the file once.
    """
    before, after = changed(name, old, new)
    show_diff(before, after, names=(name, name), context=1)
    print(f'python -m pytest "tests/{test}"')


def changed(name: str, old: str, new: str) -> tuple[str, str]:
    """The text of a file before and after a change. Raises InvalidParameter unless `old` stands in it once."""
    text = _text(name)
    if text.count(old) != 1:
        raise InvalidParameter(
            f"{old!r} stands in {name} {text.count(old)} times; choose a text that stands in it once"
        )
    return text, text.replace(old, new)


def _imports(name: str) -> Iterator[str | None]:
    for node in ast.parse(_text(name)).body:
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        folder = (PACKAGE / name).parents[node.level - 1]
        base = folder.joinpath(*(node.module or "").split("."))
        for alias in node.names:  # `from . import sdpa` means the file, `from .sdpa import f` a name in it
            yield _file_of(base / alias.name) or _file_of(base)


def _file_of(module: Path) -> str | None:
    for path in (module.with_suffix(".py"), module / "__init__.py"):
        if path.exists():
            return path.relative_to(PACKAGE).as_posix()
    return None


def _text(name: str) -> str:
    path = PACKAGE / name
    if not path.is_file():
        raise InvalidParameter(f"there is no file {name!r} in the package")
    return path.read_text(encoding="utf-8")
