"""Computed parts of the front pages: what there is to learn, in which state it is, where it opens, how to cite it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .manifest import Exercise, load_manifest
from .notebooks import BuildError, pyproject, read_page, repository
from .syllabus import Row, load_syllabus

PICTURE = "chapters/figures/static-against-continuous.svg"
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
_MINUTES = re.compile(r"\*\*In this chapter\*\* \(about (\d+) minutes\)")
ABOUT = {
    "7.0": "prefill and decode, your machine's roofline, the KV cache and its memory",
    "7.1": "the padded batch that waits for its slowest member",
    "7.2": "requests enter and leave at every step; who may enter, and who goes first",
    "7.3": "long prompts that stall nobody, and the attention kernel that makes it possible",
    "7.4": "paged memory, prefix caching, preemption, cost, production servers",
}


@dataclass(frozen=True)
class Chapter:
    """A chapter of the book, as its source tells it. minutes: its author's estimate of the time to read and run it."""

    number: str
    title: str
    file: str  # without ending
    minutes: int

    @property
    def about(self) -> str:
        return ABOUT[self.number]

    @property
    def lab(self) -> str:
        return f"lab-{self.number}"


def read_chapters(root: Path) -> list[Chapter]:
    """The chapters under `root`, in order. Raises BuildError for one that lacks its title, time or a line in ABOUT."""
    found = []
    for path in sorted((root / "chapters").glob("7.*.md")):
        text, number = read_page(path), path.stem.split("-")[0]
        title, minutes = re.search(r"^# (.+)$", text, re.MULTILINE), _MINUTES.search(text)
        if not title or not minutes or number not in ABOUT:
            raise BuildError(
                f"chapters/{path.name} needs a title, a line «**In this chapter** (about … minutes)», and an entry in "
                "ABOUT of labkit/front.py"
            )
        found.append(Chapter(number, title[1], path.stem, int(minutes[1])))
    return found


def picture(root: Path) -> str:
    """For the README: its moving picture, with words for those who do not see it."""
    from ..viz import cover  # with the engine and matplotlib, which the other parts do not need

    return f"![{cover.alternative_text(cover.runs())}]({PICTURE})\n"


def picture_file() -> bytes:
    """What PICTURE holds."""
    from ..viz import cover

    return cover.picture()


def chapters(root: Path) -> str:
    """For the README: what each chapter is about, how long it takes, and a badge that opens it on Colab."""
    lines = ["| chapter | you learn about | minutes | |", "| --- | --- | --: | --- |"]
    for chapter in read_chapters(root):
        path = f"chapters/{chapter.file}.ipynb"
        lines.append(f"| [{chapter.title}]({path}) | {chapter.about} | {chapter.minutes} | {badge(root, path)} |")
    return "\n".join(lines) + "\n"


def contents(root: Path) -> str:
    """For chapters/index.md: the same chapters with their labs, by links from that folder."""
    lines = ["| chapter | about | time | |", "| --- | --- | --- | --- |"]
    for chapter in read_chapters(root):
        lines.append(
            f"| [{chapter.title}]({chapter.file}.ipynb) | {chapter.about} | {chapter.minutes} minutes "
            f"| [lab](../labs/{chapter.lab}.ipynb) |"
        )
    return "\n".join(lines) + "\n"


def status(root: Path) -> str:
    """For the README: the claims of each chapter that tests hold, and each lab's exercises, points and minutes."""
    lines = [
        "| chapter | claims | tests that hold them | lab | | exercises | points | minutes |",
        "| --- | --: | --: | --- | --- | --: | --: | --: |",
    ]
    all_claims, all_exercises = [], []
    for chapter in read_chapters(root):
        claims = [row for row in load_syllabus() if row.chapter == chapter.number and row.kind == "claim"]
        exercises = _exercises(chapter.lab)
        lines.append(_row([chapter.number, *_held(claims), *_lab(root, chapter.lab), *_counts(exercises)]))
        all_claims += claims
        all_exercises += exercises
    capstone = _exercises("capstone")
    lines.append(_row(["all of them", "", "", *_lab(root, "capstone"), *_counts(capstone)]))
    lines.append(_row(["in all", *_held(all_claims), "", "", *_counts([*all_exercises, *capstone])]))
    return "\n".join(lines) + "\n"


def badge(root: Path, path: str) -> str:
    """A picture that opens the notebook on Colab, which takes notebooks of GitHub; nothing for a copy elsewhere."""
    address = repository(root)
    if not address.startswith("https://github.com/"):
        return ""
    place = address.removeprefix("https://github.com/")
    name = path.rsplit("/", 1)[-1].removesuffix(".ipynb")
    return f"[![Open {name} in Colab]({BADGE})](https://colab.research.google.com/github/{place}/blob/main/{path})"


def clone(root: Path) -> str:
    """The command that fetches the book."""
    address = repository(root)
    return f"```console\ngit clone {address}\ncd {address.rsplit('/', 1)[1]}\n```\n"


def start(root: Path) -> str:
    """What the two commands need, and the badge that opens the contents on Colab."""
    python = pyproject(root)["project"]["requires-python"].removeprefix(">=")
    needs = f"Both need Python {python} or later, make and git."
    opened = badge(root, "chapters/index.ipynb")
    return (
        f"{needs}\n\n{opened} opens the contents on Colab, without installing anything here.\n"
        if opened
        else f"{needs}\n"
    )


def citation(root: Path) -> str:
    """BibTeX and a line in APA style, of the version and the year that pyproject.toml names."""
    project, year = pyproject(root)["project"], pyproject(root)["tool"]["minibatcher"]["released"][:4]
    version, address = project["version"], repository(root)
    title = "minibatcher: How an LLM server batches requests"
    return f"""```bibtex
@software{{minibatcher,
  author  = {{{{The minibatcher authors}}}},
  title   = {{{title}}},
  year    = {{{year}}},
  version = {{{version}}},
  url     = {{{address}}}
}}
```

The minibatcher authors. ({year}). *{title}* (Version {version}) [Computer software]. {address}
"""


def _exercises(lab: str) -> list[Exercise]:
    return [exercise for exercise in load_manifest().values() if exercise.lab == lab]


def _held(claims: list[Row]) -> list[str]:
    return [str(len(claims)), str(len({test for row in claims for test in row.tests}))]


def _lab(root: Path, name: str) -> list[str]:
    path = f"labs/{name}.ipynb"
    return [f"[{name}]({path})", badge(root, path)]


def _counts(exercises: list[Exercise]) -> list[str]:
    return [str(n) for n in (len(exercises), sum(e.points for e in exercises), sum(e.minutes for e in exercises))]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
