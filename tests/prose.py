"""What must hold for the book's prose: each rule takes a page, and returns a sentence for each thing that is wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin

MAX_SENTENCE, MAX_PARAGRAPH = 40, 120  # words
SMALLEST_INPUT = 13  # smaller numbers are written as words

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_EQUATION = re.compile(r"(?<![\d.,])(\d[\d,]*(?:\s[×+−-]\s\d[\d,]*)+)\s=\s(\d[\d,]*)(?!\d|\s[×+−-]\s)")
_SMALL = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_NUMBER_WORD = re.compile(
    rf"\b(?:(?:{_TENS})(?:-\w+)?|(?:thir|four|fif|six|seven|eigh|nine)teen|dozen|hundred|thousand|million|billion"
    rf"|(?:{_SMALL})(?:fold|\s(?:times|percent|per\scent)))\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"»”*)]*\s+(?=[\"«“*(`]*[A-Z0-9])")
_REFERS = re.compile(
    r"\b(?:picture|figure|plot|graph|diagram|row|column|box|line|curve|bar|dot|stripe|axis|panel|colour|shade)(?:e?s)?\b",
    re.IGNORECASE,
)


@dataclass
class Block:
    """A heading, a paragraph (of a list or not), a table row or a code cell."""

    kind: str  # heading, paragraph, list_item, row or code
    text: str  # of prose: without its marks, inline code as `…`, math as $…$, links as their words
    line: int  # of the source, from 1
    links: list[str] = field(default_factory=list)
    images: list[tuple[str, str]] = field(default_factory=list)  # address, alternative text
    html: str = ""


@dataclass
class Page:
    """A Markdown page; `name` stands in what the rules say, and links start at the folder `home`."""

    name: str
    text: str
    home: Path = Path()

    @classmethod
    def read(cls, path: Path, root: Path) -> Page:
        return cls(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"), path.parent)

    @cached_property
    def blocks(self) -> list[Block]:
        """In the order of the page; a front matter and code that is no cell are left out."""
        matter = re.match(r"---\n.*?\n---\n", self.text, re.DOTALL)
        text = "\n" * matter[0].count("\n") + self.text[matter.end() :] if matter else self.text
        parser = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin, allow_space=False, allow_digits=False)
        return list(_blocks(parser.parse(text)))

    @property
    def prose(self) -> list[Block]:
        return [block for block in self.blocks if block.kind != "code"]

    @property
    def headings(self) -> list[str]:
        return [block.text for block in self.blocks if block.kind == "heading"]

    @property
    def sections(self) -> list[list[Block]]:
        """What stands from one heading to the next; a section's first block is its heading, if it has one."""
        found: list[list[Block]] = [[]]
        for block in self.blocks:
            if block.kind == "heading":
                found.append([])
            found[-1].append(block)
        return [section for section in found if section]

    @property
    def cells(self) -> list[list[Block]]:
        """The cells of the notebook: a code cell, or all the prose up to the next one."""
        found: list[list[Block]] = []
        for block in self.blocks:
            if block.kind == "code" or not found or found[-1][0].kind == "code":
                found.append([])
            found[-1].append(block)
        return found

    @property
    def figures(self) -> list[int]:
        """Which cells show a figure."""
        return [
            i for i, (first, *_) in enumerate(self.cells) if first.kind == "code" and re.search(r"\bshow\(", first.text)
        ]

    def at(self, block: Block, offset: int, sentence: str) -> str:
        """A complaint, with the place of the character in the block."""
        line = block.line + block.text.count("\n", 0, offset)
        return f"{self.name}:{line}: {sentence}"


def typed_numbers(page: Page, allowed: dict[str, Any], used: set[str] | None = None) -> list[str]:
    """Numbers in the prose that no cell prints. Allowed are

    - those that match a `pattern` or stand in a `fact` of prose_numbers.toml (`used` takes which of them were needed);
    - an equation that is true: it is recomputed here;
    - in a section, what its code cells take: a literal from 13 on. Never with % or ×: a share or a ratio is a result;
    - what stands in a computed part (labkit/blocks.py), which the build writes and compares.

    Numbers written as words count from thirteen on, and smaller ones before "times", "per cent" and "fold".
    """
    problems = []
    computed = {
        page.text.count("\n", 0, match.start()) + i
        for match in re.finditer(r"<!-- begin ([\w-]+) -->\n.*?<!-- end \1 -->", page.text, re.DOTALL)
        for i in range(1, match[0].count("\n") + 2)
    }
    for section in page.sections:
        inputs = {
            number.replace("_", "")
            for block in section
            if block.kind == "code"
            for number in re.findall(r"(?<![\w.])\d[\d_]*(?![\w.])", block.text)
        }
        for block in section:
            if block.kind == "code" or block.line in computed:
                continue
            spans = list(_allowed_spans(page.name, section, block, allowed, used))
            for match in _EQUATION.finditer(block.text):
                left, right = (re.sub(r"[,\s]", "", side) for side in match.groups())
                if eval(left.replace("×", "*").replace("−", "-")) == int(right):
                    spans.append(match.span())
                else:
                    problems.append(page.at(block, match.start(), f"{_flat(match[0])!r} is not true; correct it"))
            for match in [*_NUMBER.finditer(block.text), *_NUMBER_WORD.finditer(block.text)]:
                if any(start <= match.start() and match.end() <= end for start, end in spans):
                    continue
                digits = match[0].replace(",", "")
                is_result = re.match(r"\s?[%×]", block.text[match.end() :])
                if digits in inputs and int(digits) >= SMALLEST_INPUT and not is_result:
                    continue
                problems.append(
                    page.at(
                        block,
                        match.start(),
                        f"typed number {match[0]!r} in {_sentence_at(block.text, match.start())!r}; let a cell print "
                        "it, write a small count as a word, or give a fact and its source in tests/prose_numbers.toml",
                    )
                )
    return problems


def long_sentences(page: Page) -> list[str]:
    """Sentences and paragraphs that are too long to be read once."""
    problems = []
    for block in page.prose:
        count = _words(block.text)
        if block.kind == "paragraph" and count > MAX_PARAGRAPH:
            problems.append(page.at(block, 0, f"a paragraph of {count} words, more than {MAX_PARAGRAPH}; split it"))
        if block.kind == "row":
            continue
        for start, sentence in _sentences(block.text):
            if (count := _words(sentence)) > MAX_SENTENCE:
                problems.append(
                    page.at(block, start, f"{count} words, more than {MAX_SENTENCE}; split it: {_flat(sentence)!r}")
                )
    return problems


def repeated_headings(page: Page) -> list[str]:
    repeated = [heading for heading, times in Counter(page.headings).items() if times > 1]
    return [f"{page.name}: the heading {heading!r} stands more than once; rename one" for heading in repeated]


def unexplained_figure(page: Page, cell: int) -> list[str]:
    """What is wrong if neither the prose before the figure of this cell nor that after it says what to see in it."""
    for direction in (range(cell - 1, -1, -1), range(cell + 1, len(page.cells))):
        prose = next((page.cells[i] for i in direction if page.cells[i][0].kind != "code"), [])
        near = prose if direction.step > 0 else prose[::-1]
        near = list(takewhile(lambda block: block.kind != "heading", near))
        nearest = next((block for block in near if block.kind in ("paragraph", "list_item")), None)
        if nearest and _REFERS.search(nearest.text):
            return []
    line = page.cells[cell][0].line
    return [f"{page.name}:{line}: no prose beside this figure says what to see in it (a picture, row, box, line, …)"]


def broken_links(page: Page, root: Path, anchors_of: Any) -> list[str]:
    """Links and pictures whose file or heading is missing, and pictures without words.

    anchors_of: gives the anchors (a set) of a file with headings, None of any other.
    """
    problems = []
    for block in page.prose:
        where = f"{page.name}:{block.line}:"
        for address, words in block.images:
            if not words.strip():
                problems.append(f"{where} the picture {address} has no alternative text; say what it shows")
        if re.search(r"<(?:img|a)\b", block.html):
            problems.append(f"{where} write the picture or link as Markdown, so that it can be checked")
        for address in [*block.links, *(address for address, _ in block.images)]:
            if re.match(r"[a-z][a-z0-9+.-]*:", address):
                if not address.startswith(("https:", "mailto:")):
                    problems.append(f"{where} the link {address} is neither a relative one nor https")
                continue
            path, _, anchor = unquote(address).partition("#")
            target = (page.home / path).resolve() if path else None
            if target and not (target.is_relative_to(root.resolve()) and target.exists()):
                problems.append(f"{where} the link {address} leads to no file of the project")
            elif anchor and anchor not in ((anchors_of(target) if target else anchors_of(page)) or ()):
                problems.append(f"{where} the link {address} leads to no heading")
    return problems


def anchors(headings: list[str], *, jupyter: bool) -> set[str]:
    """What a link may put after `#`: Jupyter keeps the heading and puts - for a space; GitHub also folds it."""
    plain = [heading.replace("`", "") for heading in headings]
    if jupyter:
        return {heading.replace(" ", "-") for heading in plain}
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in plain}


def american_spellings(page: Page, british: dict[str, str]) -> list[str]:
    """Words that are spelled the American way. british: the British spelling by the American one, in small letters."""
    return [
        page.at(block, match.start(), f"{match[0]!r} is American; write {british[match[0].lower()]!r}")
        for block in page.prose
        for match in re.finditer(r"(?<![`\w])[A-Za-z]+(?![`\w])", block.text)
        if match[0].lower() in british
    ]


def _allowed_spans(
    name: str, section: list[Block], block: Block, allowed: dict[str, Any], used: set[str] | None
) -> Iterator[tuple[int, int]]:
    heading = section[0].text if section[0].kind == "heading" else ""
    for entry in allowed["pattern"]:
        if entry.get("section", heading) == heading:
            for match in re.finditer(entry["regex"], block.text):
                yield match.span()
                if used is not None:
                    used.add(entry["regex"])
    for entry in allowed["fact"]:
        if entry["file"] == name:
            for match in re.finditer(re.escape(entry["text"]).replace(r"\ ", r"\s+"), block.text):
                yield match.span()
                if used is not None:
                    used.add(entry["text"])


def _blocks(tokens: list[Token]) -> Iterator[Block]:
    inside: list[str] = []
    row: Block | None = None
    for token in tokens:
        if token.type == "fence" and token.info.startswith("{code-cell}"):
            code = re.sub(r"^:\w+:.*$", "", token.content, flags=re.MULTILINE).strip("\n")
            if code:  # an empty one is the set-up, which the build fills
                yield Block("code", code, token.map[0] + 1)
        elif token.type == "html_block":
            yield Block("paragraph", "", token.map[0] + 1, html=token.content)
        elif token.type == "tr_open":
            row = Block("row", "", token.map[0] + 1)
        elif token.type == "tr_close":
            yield row
            row = None
        elif token.type == "inline":
            block = _prose(token, next((kind for kind in ("heading", "list_item") if kind in inside), "paragraph"))
            if row is not None:
                row.text += (" | " if row.text else "") + block.text
                row.links += block.links
                row.images += block.images
                row.html += block.html
            else:
                yield block
        elif token.nesting == 1:
            inside.append(token.type.removesuffix("_open"))
        elif token.nesting == -1:
            inside.remove(token.type.removesuffix("_close"))


def _prose(token: Token, kind: str) -> Block:
    block = Block(kind, "", token.map[0] + 1)
    for child in token.children:
        if child.type == "text":
            block.text += child.content
        elif child.type in ("softbreak", "hardbreak"):
            block.text += "\n"
        elif child.type == "code_inline":
            block.text += "`…`"
        elif child.type.startswith("math"):
            block.text += "$…$"
        elif child.type == "link_open":
            block.links.append(child.attrs["href"])
        elif child.type == "image":
            block.images.append((child.attrs["src"], child.content))
            block.text += child.content
        elif child.type == "html_inline":
            block.html += child.content
    return block


def _sentences(text: str) -> Iterator[tuple[int, str]]:
    start = 0
    for end in _SENTENCE_END.finditer(text):
        yield start, text[start : end.end()]
        start = end.end()
    yield start, text[start:]


def _sentence_at(text: str, offset: int) -> str:
    return _flat([sentence for start, sentence in _sentences(text) if start <= offset][-1])


def _words(text: str) -> int:
    return len(re.findall(r"\S*[\w…]\S*", text))


def _flat(text: str) -> str:
    return " ".join(text.split())
