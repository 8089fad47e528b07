"""The book's prose: numbers come from cells, links lead somewhere, sentences are short, each chapter is complete."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("markdown_it")
pytest.importorskip("mdit_py_plugins")

import prose
from prose import Page

from minibatcher.labkit.questions import load_questions
from minibatcher.tomlfile import read_toml

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.stem: Page.read(path, ROOT) for name in ("chapters", "solutions") for path in (ROOT / name).glob("*.md")}
CHAPTERS = {name: page for name, page in PAGES.items() if re.match(r"7\.\d", name)}
FRONT = [Page.read(ROOT / name, ROOT) for name in ("README.md", "CONTRIBUTING.md")]
NUMBERS = read_toml(ROOT / "tests" / "prose_numbers.toml")

# What a page lacks today, and why, by the name of the check. Strict: once it is there, the line here goes.
KNOWN: dict[str, str] = {}


def cases(names):
    """Parameters with their marks from KNOWN."""
    mark = lambda name: [pytest.mark.xfail(reason=KNOWN[name], strict=True)] if name in KNOWN else []  # noqa: E731
    return [pytest.param(name, marks=mark(name), id=name) for name in names]


def notebook(path):
    """The prose of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return Page(path.relative_to(ROOT).as_posix(), text, path.parent)


# Their links start in another folder than those of their sources.
LABS = [notebook(path) for path in sorted((ROOT / "labs").glob("*.ipynb"))]


def anchors_of(target):
    """Of a page, or of a file if that has headings."""
    if isinstance(target, Page):
        return prose.anchors(target.headings, jupyter=target.name.startswith(("chapters/", "solutions/", "labs/")))
    if target.suffix == ".ipynb":
        return anchors_of(notebook(target))
    return anchors_of(Page.read(target, ROOT)) if target.suffix == ".md" else None


def british():
    """The British spelling by the American one, from codespell, but for words that are both."""
    codespell = pytest.importorskip("codespell_lib")
    lines = (Path(codespell.__file__).parent / "data" / "dictionary_en-GB_to_en-US.txt").read_text(encoding="utf-8")
    both = {"check", "license", "meter", "meters", "practice", "practices", "program", "programs", "stories", "story"}
    pairs = (line.rstrip(",").split("->") for line in lines.splitlines() if "->" in line)
    return {american: word for word, american in pairs if american not in both}


def missing_parts(name, page):
    """The parts of PARTS that the chapter lacks."""
    number, code = name.split("-")[0], [block.text for block in page.blocks if block.kind == "code"]
    asked = [
        (match[1], before[-1].text)
        for before, (cell, *_) in pairwise(page.cells)
        if cell.kind == "code" and (match := re.match(r'reveal\("([^"]+)"\)', cell.text))
    ]
    begins = [
        i for i, block in enumerate(page.blocks) if re.match(r"In this chapter \(about \d+ minutes\)", block.text)
    ]
    promised = [block.kind for i in begins for block in page.blocks[i + 1 : i + 3]]
    sources = [section for section in page.sections if section[0].text == "Sources"]
    there = {
        "picture": any(i < 2 for i in page.figures) or any(block.images for cell in page.cells[:2] for block in cell),
        "objectives": promised == ["list_item"] * 2,
        "guess": any(
            f"{guess}.reveal(" in later
            for i, cell in enumerate(code)
            for guess in re.findall(r"^(\w+) = predict\([^\n]*\bNone\b", cell, re.MULTILINE)
            for later in code[i + 1 : i + 3]
        ),
        "where it loses": any(
            section[0].text.startswith("Where ") and re.search(r"\bloses?\b", " ".join(block.text for block in section))
            for section in page.sections
        ),
        "questions": bool(asked)
        and sorted(question for question, _ in asked)
        == sorted(q for q in load_questions() if q.startswith(f"{number}-"))
        and all(words.rstrip().endswith("?") for _, words in asked),
        "lab": any(f"../labs/lab-{number}.ipynb" in block.links for block in page.prose),
        "sources": any(block.kind == "list_item" for section in sources for block in section),
    }
    return {part for part in PARTS if not there[part]}


PARTS = {
    "picture": "shows a picture within its first two cells",
    "objectives": "says, after **In this chapter** (about … minutes), in a list what the reader will be able to do",
    "guess": "asks for a guess, `name = predict(…, None)`, one or two cells before `name.reveal(…)`",
    "where it loses": "has a section «Where …» that says where its subject loses",
    "questions": "asks each of its questions in labkit/questions.toml, and no other, right before reveal(…)",
    "lab": "links to its lab",
    "sources": "has a section «Sources» with a list",
}


FIGURES = [f"{name} figure {i}" for name, page in PAGES.items() for i in range(1, len(page.figures) + 1)]
CHAPTER_PARTS = [f"{name}: {part}" for name in sorted(CHAPTERS) for part in PARTS]


def test_what_is_known_to_lack_exists():
    assert set(KNOWN) <= {*PAGES, *FIGURES, *CHAPTER_PARTS}


def test_there_are_pages():
    assert CHAPTERS and {page.name.split("/")[0] for page in PAGES.values()} == {"chapters", "solutions"}
    assert all(len(page.prose) > 2 for page in PAGES.values())


@pytest.mark.parametrize("name", cases(sorted(PAGES)))
def test_numbers_are_printed_by_cells(name):
    assert prose.typed_numbers(PAGES[name], NUMBERS) == []


def test_every_fact_is_needed_and_says_why():
    used: set[str] = set()
    for page in PAGES.values():
        prose.typed_numbers(page, NUMBERS, used)
    assert [fact["text"] for fact in NUMBERS["fact"] if fact["text"] not in used] == []
    assert all(entry["reason"].strip() for kind in NUMBERS.values() for entry in kind)
    assert not [entry for entry in NUMBERS["fact"] if not re.search(r"[^\W\d]|\|", entry["text"])]  # not a bare number


def test_the_worked_cases_of_the_lab_are_right():
    answers: dict = {}
    for block in PAGES["lab-7.1"].blocks:
        if block.kind == "code" and "def " in block.text:
            exec(block.text, answers)
    assert answers["padded_tokens"]([3, 7, 5], 2) == (19, 15)
    assert answers["wasted_row_steps"]([2, 5, 3], 2) == 3


@pytest.mark.parametrize("name", cases(sorted(PAGES)))
def test_sentences_are_short_and_headings_differ(name):
    assert prose.long_sentences(PAGES[name]) + prose.repeated_headings(PAGES[name]) == []


@pytest.mark.parametrize("case", cases(FIGURES))
def test_prose_beside_a_figure_says_what_to_see(case):
    name, number = case.split(" figure ")
    assert prose.unexplained_figure(PAGES[name], PAGES[name].figures[int(number) - 1]) == []


@pytest.mark.parametrize("page", [*PAGES.values(), *FRONT, *LABS], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert prose.broken_links(page, ROOT, anchors_of) == []


@pytest.mark.parametrize("case", cases(CHAPTER_PARTS))
def test_a_chapter_is_complete(case):
    name, part = case.split(": ")
    assert part not in missing_parts(name, CHAPTERS[name]), f"{name} lacks a part: a chapter {PARTS[part]}"


@pytest.mark.parametrize("name", sorted(CHAPTERS))
def test_the_contents_say_the_same_minutes(name):
    (said,) = re.findall(r"In this chapter \(about (\d+ minutes)\)", "\n".join(b.text for b in CHAPTERS[name].prose))
    rows = [b for b in PAGES["index"].prose if b.kind == "row" and f"{name}.ipynb" in b.links]
    assert [re.findall(r"\d+ minutes", row.text) for row in rows] == [[said]]


def codespell(*paths):
    """What codespell finds, but for our own words (tests/prose_words.txt) and the glossary's French."""
    if find_spec("codespell_lib") is None:
        pytest.skip("codespell is not installed")
    known = ["--ignore-words", str(ROOT / "tests" / "prose_words.txt"), "--ignore-regex", "^french = .*"]
    command = [sys.executable, "-m", "codespell_lib", *known, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    return done.stdout + done.stderr


def test_words_are_spelled_as_codespell_knows_them(tmp_path):
    sources = [path for kind in ("py", "md", "toml") for path in ROOT.glob(f"minibatcher/**/*.{kind}")]
    assert codespell(*(page.name for page in [*PAGES.values(), *FRONT]), *sources) == ""
    (tmp_path / "page.md").write_text("Then teh rest waits.", encoding="utf-8")
    assert "teh ==> the" in codespell(tmp_path / "page.md")


@pytest.mark.parametrize("page", [*PAGES.values(), *FRONT], ids=lambda page: page.name)
def test_spelling_is_british(page):
    assert prose.american_spellings(page, british()) == []


PLAIN = "# A\n\nTake a batch of 32 rows.\n\n```{code-cell} ipython3\nrun(rows=32)\n```\n"


@pytest.mark.parametrize(
    "text, numbers",
    [
        (PLAIN, []),
        (PLAIN.replace("of 32", "of 33"), ["33"]),
        (PLAIN.replace("batch of 32 rows", "share of 32 %"), ["32"]),
        (PLAIN.replace("Take a batch of 32 rows", "It is 32 × as fast"), ["32"]),
        (PLAIN.replace("32", "7"), ["7"]),
        (PLAIN.replace("# A", "# A\n\nA batch of 32 rows.\n\n# B"), ["32"]),  # an input of another section
        ("It wins by 1,024 tokens and 0.5 s.", ["1,024", "0.5"]),
        ("| a | b |\n| --- | --- |\n| c | 40 |", ["40"]),
        ("It is\nthree times as fast, ten per cent cheaper, twofold better, for forty rows.", 4),
        ("Two of the twelve rows, in `x[3]`, $y_4$ and [here](a5.md), on an H100 in chapter 7.2.", []),
        ("It takes 7.1 s, from 3 to 7.2 ms.", ["7.1", "3", "7.2"]),
        ("Yu et al., 2022", ["2022"]),
        ("## Sources\n\nYu et al., 2022", []),
        ("It takes 40 s.\n\n<!-- begin a -->\n| a |\n| --- |\n| 41 |\n<!-- end a -->\n\nOr 42 s.", ["40", "42"]),
        ("A token needs 2 × 5,120 × 40 × 2 = 819,200 bytes, and 5 −\n2 = 3.", []),
        ("A token needs 2 × 5,120 × 40 × 2 = 819,201 bytes.", 6),
    ],
)
def test_rule_typed_numbers(text, numbers):
    problems = prose.typed_numbers(Page("x.md", text), NUMBERS)
    if isinstance(numbers, int):
        assert len(problems) == numbers
    else:
        assert [re.search(r"typed number '([^']+)'", problem)[1] for problem in problems] == numbers


def test_rule_reports_file_line_and_sentence():
    page = Page("x.md", "---\na: 1\n---\n\n# A\n\nOne row waits. The\nother one waits for 3 steps. It ends.")
    (problem,) = prose.typed_numbers(page, NUMBERS)
    assert problem.startswith("x.md:8: typed number '3' in 'The other one waits for 3 steps.'; ")


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("Word " + "word " * 38 + "end. Word " + "word " * 38 + "end.", 0),
        ("word " * 40 + "end.", 1),
        ("A " + "word " * 20 + "x. y " * 12 + "word " * 9, 1),  # a full stop before a small letter ends no sentence
        ("- " + "word " * 41, 1),
        ("| a |\n| --- |\n| " + "word " * 41 + "|", 0),
        ("One row waits here. " * 30, 0),
        ("One row waits here. " * 31, 1),
    ],
)
def test_rule_long_sentences(text, wrong):
    assert len(prose.long_sentences(Page("x.md", text))) == wrong


def test_rule_repeated_headings():
    assert prose.repeated_headings(Page("x.md", "# A\n\n## B\n\n### A")) == [
        "x.md: the heading 'A' stands more than once; rename one"
    ]


@pytest.mark.parametrize(
    "before, after, fine",
    [
        ("See the picture.", "So it is.", True),
        ("So it is.", "A grey box waits.", True),
        ("So it is.", "So it is.", False),
        ("See the picture.\n\nSo it is.", "So it is.\n\nSee the picture.", False),
        ("So it is.", "## Next\n\nSee the picture.", False),
    ],
)
def test_rule_unexplained_figure(before, after, fine):
    page = Page("x.md", f"{before}\n\n```{{code-cell}} ipython3\nshow(x)\n```\n\n{after}")
    assert page.figures == [1]
    assert (prose.unexplained_figure(page, 1) == []) is fine


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("[a](README.md) [b](chapters/index.ipynb#How-to-read-it) [c](README.md#two-commands) [d](#Own-words)", None),
        ("[a](READYOU.md)", "no file"),
        ("[a](../../etc)", "no file"),
        ("[a](chapters/index.ipynb#how-to-read-it)", "no heading"),
        ("[a](README.md#Two-commands)", "no heading"),
        ("[a](LICENSE#one)", "no heading"),
        ("[a](#own-words)", "no heading"),
        ("| a |\n| --- |\n| [a](READYOU.md) |", "no file"),
        ("![words](chapters/figures/static-against-continuous.svg)", None),
        ("![](chapters/figures/static-against-continuous.svg)", "alternative text"),
        ("![words](chapters/figures/none.png)", "no file"),
        ("A picture: <img src='x.png'>", "as Markdown"),
        ("<img src='x.png'>", "as Markdown"),
        ("[a](http://example.org)", "nor https"),
        ("[a](https://example.org)", None),
    ],
)
def test_rule_broken_links(text, wrong):
    page = Page("chapters/x.md", f"# Own words\n\n{text}", ROOT)
    problems = prose.broken_links(page, ROOT, anchors_of)
    assert len(problems) == (0 if wrong is None else 1)
    assert wrong is None or wrong in problems[0]


def test_rule_american_spellings():
    page = Page("x.md", "The color of a gray row; `color`, colour and program.")
    assert [problem.split("'")[1] for problem in prose.american_spellings(page, british())] == ["color", "gray"]


@pytest.mark.parametrize(
    "part, old, new",
    [
        ("picture", "show(plot_slots(timeline)", "print(plot_slots(timeline)"),
        ("objectives", "(about 45 minutes)", ""),
        ("objectives", "you will\n\n- ", "you will\n\nPlease read.\n\n- "),
        ("guess", "predict(", "ask("),
        ("guess", "_guess.reveal(", "_guess.print("),
        ("where it loses", "## Where static", "## When static"),
        ("where it loses", "loses", "is beaten"),
        ("questions", 'reveal("7.1-q2")', 'print("7.1-q2")'),
        ("questions", "stays?", "stays."),
        ("questions", "7.1-q3", "7.2-q3"),
        ("lab", "../labs/lab-7.1.ipynb", "../labs/lab-7.2.ipynb"),
        ("sources", "## Sources", "## Books"),
    ],
)
def test_rule_missing_parts(part, old, new):
    name = "7.1-static-and-dynamic"
    page = CHAPTERS[name]
    assert old in page.text
    assert part in missing_parts(name, Page(page.name, page.text.replace(old, new), page.home))
