"""The computed parts of Markdown pages: what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.

`minibatcher labs build` writes them and `--check` compares them, so that no page tells a figure that was typed in.
A new part is a function from the book's folder to Markdown, with its line in BLOCKS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from .manifest import load_manifest
from .notebooks import BuildError

_BLOCK = re.compile(r"(<!-- begin ([\w-]+) -->\n)(.*?)(<!-- end \2 -->)", re.DOTALL)
_MINUTES = re.compile(r"\*\*In this chapter\*\* \(about (\d+) minutes\)")


def chapters(root: Path) -> str:
    """A table of the chapters, each with its time, its lab, and the lab's exercises, points and time."""
    lines = ["| chapter | minutes | lab | exercises | points | minutes |", "| --- | --: | --- | --: | --: | --: |"]
    for path in sorted((root / "chapters").glob("7.*.md")):
        text = path.read_text(encoding="utf-8")
        found = re.search(r"^# (.+)$", text, re.MULTILINE), _MINUTES.search(text)
        title, minutes = (match[1] for match in found if match)
        lab = f"lab-{path.stem.split('-')[0]}"
        exercises = [e for e in load_manifest().values() if e.lab == lab]
        points, lab_minutes = sum(e.points for e in exercises), sum(e.minutes for e in exercises)
        lines.append(
            f"| [{title}](chapters/{path.stem}.ipynb) | {minutes} | [{lab}](labs/{lab}.ipynb) "
            f"| {len(exercises)} | {points} | {lab_minutes} |"
        )
    return "\n".join(lines) + "\n"


BLOCKS: dict[str, Callable[[Path], str]] = {"chapters": chapters}


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


def write(root: Path) -> None:
    """Renew the computed parts of every page."""
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        if (filled := fill(text, root)) != text:
            path.write_bytes(filled.encode("utf-8"))


def stale(root: Path) -> list[str]:
    """One sentence for each page whose computed parts are out of date."""
    texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in pages(root)}
    return [
        f"{name}: a computed part is out of date; run: make generated"
        for name, text in texts.items()
        if fill(text, root) != text
    ]
