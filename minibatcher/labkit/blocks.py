"""The computed parts of Markdown pages, between `<!-- begin NAME -->` and `<!-- end NAME -->`, and computed pictures.

`minibatcher labs build` writes them and `--check` compares them, so that no page tells a figure that was typed in.
A new part is a function from the book's folder to Markdown, with its line in BLOCKS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from . import agreement, cold_start, front, measured, production, speed, speed_inside
from .notebooks import BuildError, read_page

_BLOCK = re.compile(r"(<!-- begin ([\w-]+) -->\n)(.*?)(<!-- end \2 -->)", re.DOTALL)
_MARK = re.compile(r"<!--\s*(?:begin|end)\b.*?-->", re.IGNORECASE)

BLOCKS: dict[str, Callable[[Path], str]] = {
    "chapters": front.chapters,
    "citation": front.citation,
    "clone": front.clone,
    "comparison": measured.comparison,
    "contents": front.contents,
    "picture": front.picture,
    "production-agreement": agreement.agreement,
    "production-measured": production.measured,
    "speed-circumstances": speed.circumstances,
    "speed-figures": speed.figures,
    "speed-ledger": speed_inside.ledger,
    "speed-plain-ratios": speed.plain_ratios,
    "speed-profile": speed_inside.profile,
    "speed-ratios": speed.ratios,
    "speed-startup": speed_inside.start_up,
    "speed-versions": speed.versions,
    "speed-waiting": speed_inside.waiting,
    "start": front.start,
    "status": front.status,
    **cold_start.BLOCKS,
}


# Whole files that are computed, by their path from the book's folder.
FILES: dict[str, Callable[[], bytes]] = {front.PICTURE: front.picture_file}


def fill(text: str, root: Path) -> str:
    """The page with every part computed anew. Raises BuildError for one that can't be, and for a mark left over."""

    def computed(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        if name not in BLOCKS:
            raise BuildError(f"no computed part is named {name!r}; known: {', '.join(BLOCKS)}")
        try:
            return f"{begin}{BLOCKS[name](root)}{end}"
        except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            raise BuildError(
                f"the part {name!r} can't be computed, for pyproject.toml or a file in {measured.FOLDER} is not as it "
                f"should be: {type(error).__name__}: {error}"
            ) from error

    if mark := _MARK.search(_BLOCK.sub("", text)):
        raise BuildError(f"{mark[0]} marks nothing; the lines <!-- begin NAME --> and <!-- end NAME --> hold a part")
    return _BLOCK.sub(computed, text)


def pages(root: Path) -> Iterator[Path]:
    """The pages that may hold computed parts."""
    yield from (path for name in ("README.md", "CONTRIBUTING.md") if (path := root / name).exists())
    yield from sorted((root / "chapters").glob("*.md"))


def files(root: Path) -> Iterator[tuple[Path, bytes]]:
    """The computed files that a page shows, each with what it must hold."""
    texts = [read_page(path) for path in pages(root)]
    yield from ((root / name, FILES[name]()) for name in FILES if any(name in text for text in texts))


def write(root: Path) -> None:
    """Renew the computed parts of every page, and then the computed files that they show."""
    for path in pages(root):
        if (filled := _filled(path, root)) != read_page(path):
            path.write_bytes(filled.encode("utf-8"))
    for path, content in files(root):
        if not _holds(path, content):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def stale(root: Path) -> list[str]:
    """One sentence for each computed file that is out of date, each page with a part that is, each part of no page."""
    old = {path: "it is" for path, content in files(root) if not _holds(path, content)}
    old |= {path: "a computed part is" for path in pages(root) if _filled(path, root) != read_page(path)}
    used = {match[2] for path in pages(root) for match in _BLOCK.finditer(read_page(path))}
    lost = [name for name in BLOCKS if name not in used] if (root / "README.md").exists() else []
    return [
        *(
            f"{path.relative_to(root).as_posix()}: {what} out of date; run: make generated"
            for path, what in old.items()
        ),
        *(f"no page shows the computed part {name!r}; put the marks around it back" for name in lost),
    ]


def _filled(path: Path, root: Path) -> str:
    try:
        return fill(read_page(path), root)
    except BuildError as error:
        raise BuildError(f"{path.relative_to(root).as_posix()}: {error}") from error


def _holds(path: Path, content: bytes) -> bool:
    return path.exists() and path.read_bytes() == content
