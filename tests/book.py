"""What the executed chapters printed, for tests that compute the same again."""

import html
import json
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def notebook(chapter):
    """The committed notebook of a chapter, by its number ("7.2") or its whole name."""
    paths = [p for p in (ROOT / "chapters").glob("*.ipynb") if p.stem == chapter or p.stem.startswith(f"{chapter}-")]
    assert len(paths) == 1, f"{chapter} is the beginning of {len(paths)} notebooks' names"
    return json.loads(paths[0].read_text(encoding="utf-8"))


def headings(chapter):
    """The headings of a chapter, without their marks."""
    texts = ["".join(cell["source"]) for cell in notebook(chapter)["cells"] if cell["cell_type"] == "markdown"]
    return re.findall(r"^#+ (.+)$", "\n".join(texts), re.MULTILINE)


def code_cells(chapter):
    """The code cells in order, each with the heading that it stands under: (heading, cell)."""
    heading = ""
    for cell in notebook(chapter)["cells"]:
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"^#+ (.+)$", "".join(cell["source"]), re.MULTILINE) or [heading])[-1]
        else:
            yield heading, cell


def tagged(chapter, tag):
    """The code cells with this tag, each with the heading that it stands under: [(heading, cell)]."""
    return [(heading, cell) for heading, cell in code_cells(chapter) if tag in cell["metadata"].get("tags", [])]


def printed(chapter, heading):
    """What all cells under a heading printed and showed, as text."""
    found = [_text(out) for under, cell in code_cells(chapter) if under == heading for out in cell["outputs"]]
    assert found, f"nothing is printed under {heading!r} in {chapter}"
    return "\n".join(found)


def output(chapter, tag):
    """What the cells with this tag printed and showed, as text. Fails where there is nothing."""
    cells = tagged(chapter, tag)
    assert cells, f"no cell of {chapter} has the tag {tag}"
    text = "\n".join(filter(None, (_text(out) for _, cell in cells for out in cell["outputs"])))
    assert text.strip(), f"the cells of {chapter} with the tag {tag} hold no output"
    return text


def _text(out):
    if out["output_type"] == "stream":
        return "".join(out["text"])
    data = out.get("data", {})
    if "text/plain" in data:
        return "".join(data["text/plain"])
    return html.unescape(re.sub(r"<[^>]+>", " ", "".join(data.get("text/html", ""))))
