"""The computed parts of Markdown pages, between `<!-- begin NAME -->` and `<!-- end NAME -->`, and computed pictures.

`minibatcher labs build` writes them and `--check` compares them, so that no page tells a figure that was typed in.
A new part is a function from the book's folder to Markdown, with its line in BLOCKS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from . import cold_start, front, measured
from .notebooks import BuildError

_BLOCK = re.compile(r"(<!-- begin ([\w-]+) -->\n)(.*?)(<!-- end \2 -->)", re.DOTALL)

BLOCKS: dict[str, Callable[[Path], str]] = {
    "chapters": front.chapters,
    "citation": front.citation,
    "clone": front.clone,
    "comparison": measured.comparison,
    "contents": front.contents,
    "picture": front.picture,
    "start": front.start,
    "status": front.status,
    **cold_start.BLOCKS,
}


# Whole files that are computed, by their path from the book's folder.
FILES: dict[str, Callable[[], bytes]] = {front.PICTURE: front.picture_file}


def fill(text: str, root: Path) -> str:
    """The page with every part computed anew. Raises BuildError for a part that nobody computes."""

    def computed(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        if name not in BLOCKS:
            raise BuildError(f"no computed part is named {name!r}; known: {', '.join(BLOCKS)}")
        return f"{begin}{BLOCKS[name](root)}{end}"

    return _BLOCK.sub(computed, text)


def pages(root: Path) -> Iterator[Path]:
    """The pages that may hold computed parts."""
    yield from (path for name in ("README.md", "CONTRIBUTING.md") if (path := root / name).exists())
    yield from sorted((root / "chapters").glob("*.md"))


def files(root: Path) -> Iterator[tuple[Path, bytes]]:
    """The computed files that a page shows, each with what it must hold."""
    texts = [path.read_text(encoding="utf-8") for path in pages(root)]
    yield from ((root / name, FILES[name]()) for name in FILES if any(name in text for text in texts))


def write(root: Path) -> None:
    """Renew the computed parts of every page, and then the computed files that they show."""
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        if (filled := fill(text, root)) != text:
            path.write_bytes(filled.encode("utf-8"))
    for path, content in files(root):
        if not _holds(path, content):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def stale(root: Path) -> list[str]:
    """One sentence for each computed file that is out of date, and for each page with a part that is."""
    texts = {path: path.read_text(encoding="utf-8") for path in pages(root)}
    old = {path: "it is" for path, content in files(root) if not _holds(path, content)}
    old |= {path: "a computed part is" for path, text in texts.items() if fill(text, root) != text}
    return [
        f"{path.relative_to(root).as_posix()}: {what} out of date; run: make generated" for path, what in old.items()
    ]


def _holds(path: Path, content: bytes) -> bool:
    return path.exists() and path.read_bytes() == content
