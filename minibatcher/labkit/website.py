"""What the website needs beyond Sphinx and myst-nb: an extension that chapters/conf.py names.

The pages are the notebooks as they lie in the repository; nothing is run. What differs on the site is added as a page
is read, so that JupyterLab shows none of it: the list of contents, and the folding of cells.
"""

from __future__ import annotations

import json
import re
import textwrap
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

from .front import picture, read_chapters

CONTENTS = "chapters/index"
FIRST = ("install",)  # pages of chapters/ that come before the chapters, in this order
AFTER = (
    "tour",
    "glossary",
    "cookbook",
    "production",
    "speed",
    "syllabus",
    "instructors",
    "class",
)  # and those that come after the labs
INVITATION = """
{picture}
A simulated run of the package's own schedulers.

**Begin with [{title}]({file}.ipynb).** Each page can be read here. The rocket at the top opens it on Colab, to be run
there; [the ways in](install.md) say how it runs on your machine.
"""
REDIRECT = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title><meta http-equiv="refresh" content="0; url={page}"></head>
<body><p><a href="{page}">{title}</a></p></body>
</html>
"""
_log = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx's entry."""
    app.add_config_value("book_repository", "", "env")
    app.add_transform(LinksToFiles)
    app.add_transform(HeadingsByBothNames)
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_math_block, None))
    app.connect("source-read", _prepare)
    app.connect("html-page-context", _point_to_source, priority=900)  # after the theme has made its buttons
    app.connect("html-page-context", _describe)
    app.connect("build-finished", _write_front_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def contents(documents: set[str]) -> dict[str, list[str]]:
    """Title of a part → its pages, for the list of contents; no page is left out."""
    pages = sorted(documents - {CONTENTS})
    first = [page for name in FIRST if (page := f"chapters/{name}") in documents]
    chapters = [page for page in pages if page.startswith("chapters/7.")]
    labs = [page for page in pages if page.startswith("labs/lab-")]
    labs += [page for page in pages if page.startswith("labs/") and page not in labs]
    after = [page for name in AFTER if (page := f"chapters/{name}") in documents]
    rest = [page for page in pages if page not in {*first, *chapters, *labs, *after}]
    return {"Start": first, "Chapters": chapters, "Labs": labs, "Reference": after + rest}


def heading_anchor(title: str) -> str:
    """What a link into a notebook puts after `#`, as Jupyter wants it."""
    return title.replace(" ", "-")


def fold(cell: dict[str, Any]) -> None:
    """Fold on the site what is folded in JupyterLab, with words that say what is behind."""
    metadata = cell["metadata"]
    hidden = metadata.get("jupyter", {})
    title = re.match(r"# @title (.+)", "".join(cell["source"]))
    code, answer = hidden.get("source_hidden"), hidden.get("outputs_hidden") and cell.get("outputs")
    if not code and not answer:
        return
    tag = "hide-cell" if code and answer else "hide-output" if answer else "hide-input"
    what = title[1].strip() if code and title else "the answer" if answer else "set-up"
    prompt = f"Guess first. Then open: {what}" if answer else f"Code: {what}"
    metadata["tags"] = [*metadata.get("tags", []), tag]
    metadata["mystnb"] = {"code_prompt_show": prompt, "code_prompt_hide": prompt}


def invite(cell: dict[str, Any], root: Path) -> None:
    """Put the moving picture and the way to the first chapter under the first paragraph of the front page.

    Only here: Colab shows no picture that lies beside a notebook.
    """
    first = read_chapters(root)[0]
    shown = picture(root).replace("chapters/", "", 1)
    title, paragraph, rest = "".join(cell["source"]).split("\n\n", 2)
    invitation = INVITATION.format(picture=shown, title=first.title, file=first.file).strip()
    cell["source"] = "\n\n".join([title, paragraph, invitation, rest])


class LinksToFiles(SphinxTransform):
    """A link to a file or folder of the project that is no page leads to where the project is published."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        for kind in (addnodes.download_reference, addnodes.pending_xref):
            for node in list(self.document.findall(kind)):
                if address := self._address(node):
                    node.replace_self(nodes.reference("", "", *node.children, refuri=address, internal=False))

    def _address(self, node: nodes.Element) -> str | None:
        root, target = Path(self.env.srcdir), node["reftarget"].split("#")[0]
        if node.get("refdomain") == "doc":  # MyST takes every notebook and every Markdown file for a page
            notebook = root / f"{target}.ipynb"
            path = notebook if notebook.exists() else notebook.with_suffix(".md")
            found = target not in self.env.found_docs and path.exists()
        else:
            path = (root / self.env.docname).parent / target
            found = target and path.exists()
        if not found:
            return None
        name = path.resolve().relative_to(root.resolve()).as_posix()
        return f"{self.config.book_repository}/{'tree' if path.is_dir() else 'blob'}/main/{quote(name)}"


class HeadingsByBothNames(SphinxTransform):
    """A link to a heading may spell it as Jupyter does or, as in CONTRIBUTING.md, as GitHub does."""

    default_priority = 870  # MyST looks for headings at 879

    def apply(self, **kwargs: Any) -> None:
        slugs = getattr(self.document, "myst_slugs", {})
        for slug, found in list(slugs.items()):
            slugs.setdefault(re.sub(r"[^\w-]", "", slug.lower()), found)


def _prepare(app: Sphinx, page: str, source: list[str]) -> None:
    if Path(app.env.doc2path(page)).suffix != ".ipynb":
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            fold(cell)
    if page == CONTENTS:
        invite(notebook["cells"][0], Path(app.srcdir))
        lists = [
            "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", *(f"/{name}" for name in pages), "```"])
            for title, pages in contents(app.env.found_docs).items()
            if pages
        ]
        notebook["cells"].append(
            {"cell_type": "markdown", "id": "contents", "metadata": {}, "source": "\n\n".join(lists)}
        )
    source[0] = json.dumps(notebook)


def _point_to_source(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """The button to the source leads to text: a chapter's Markdown, a lab's notebook as the host shows it."""
    for group in context.get("header_buttons", []):
        for button in [group, *group.get("buttons", [])]:
            if isinstance(address := button.get("url"), str) and address.endswith(".ipynb?plain=1"):
                address = address.removesuffix("?plain=1")
                is_master = Path(app.srcdir, f"{page}.md").exists()
                button["url"] = f"{address.removesuffix('.ipynb')}.md" if is_master else address


def _describe(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    """What a tab and a search engine show of a page: its title, once, and its first paragraph of some length."""
    if page == CONTENTS:
        context["docstitle"] = ""
    if tree is None:
        return
    prose = (node.astext() for node in tree.findall(nodes.paragraph) if isinstance(node.parent, nodes.section))
    if first := next((text for text in prose if len(text) > 60), ""):
        words = textwrap.shorten(first, 200, placeholder=" …")
        context["metatags"] += f'<meta name="description" content="{escape(words)}">\n'


def _mathml(self: Any, node: nodes.Element, block: bool) -> str:
    text = node.astext()
    braces = re.findall(r"[{}]", re.sub(r"\\.", "", text))
    try:
        if braces.count("{") != braces.count("}"):  # which docutils passes over
            raise MathError("a brace lacks its partner")
        return tex2mathml(text, as_block=block)
    except MathError as error:
        _log.warning("the formula %r is not understood: %s", node.astext(), error, location=node)
        return ""


def _visit_math(self: Any, node: nodes.Element) -> None:
    self.body.append(_mathml(self, node, block=False))
    raise nodes.SkipNode


def _visit_math_block(self: Any, node: nodes.Element) -> None:
    self.body.append(f'<div class="math">{_mathml(self, node, block=True)}</div>\n')
    raise nodes.SkipNode


def _write_front_page(app: Sphinx, error: Exception | None) -> None:
    """Opening the site's folder opens the contents."""
    if error is None and app.builder.format == "html":
        text = REDIRECT.format(title=app.config.html_title, page=f"{CONTENTS}.html")
        Path(app.outdir, "index.html").write_text(text, encoding="utf-8")
