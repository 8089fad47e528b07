"""What a chapter shows: figures, with the sentence that stands for them where they are not seen, and package source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import InvalidParameter

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show(figure: Figure, alt: str | None = None) -> None:
    """Display `figure` as a picture with `alt` as its alternative text, and close it.

    Without `alt` the figure's own words stand for it: `figure.alt`, which every figure of minibatcher.viz has.
    Raises InvalidParameter where there are none.

    As HTML, because JupyterLab and its kin take no alternative text from the metadata of an `image/png` output. Where
    HTML is not shown, the text stands alone.
    """
    import matplotlib.pyplot as plt
    from IPython.display import display

    from ..viz.sheet import as_html

    alt = alt or getattr(figure, "alt", None)
    if not alt:
        raise InvalidParameter("this figure has no words for those who can't see it: show(figure, alt=...)")
    picture = as_html(figure, alt)
    plt.close(figure)
    display({"text/html": picture, "text/plain": alt}, raw=True)


def show_source(thing: object) -> None:
    """Display the installed source of a class, a function or a module, so that what a reader sees is what runs.

    Long lines scroll: notebooks would break them in the middle of a word.
    """
    _display_code(_source(thing), "python")


def show_diff(old: object, new: object, *, names: tuple[str, str] | None = None, context: int = 2) -> None:
    """Display what changed from one class, function or text to another: lines with - went, lines with + came.

    names: what stands above the two; None takes those of the classes or functions. context: unchanged lines shown
    around each change.
    """
    import difflib

    before, after = names or (getattr(old, "__name__", ""), getattr(new, "__name__", ""))
    old_lines, new_lines = _source(old).splitlines(), _source(new).splitlines()
    lines = difflib.unified_diff(old_lines, new_lines, before, after, n=context, lineterm="")
    _display_code("\n".join(lines), "diff")


def _source(thing: Any) -> str:
    import inspect

    return (thing if isinstance(thing, str) else inspect.getsource(thing)).rstrip()


def _display_code(text: str, language: str) -> None:
    from IPython.display import display
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    is_diff = language == "diff"
    # In a font of one width, or what is new does not stand under what is old.
    style = "white-space: pre; overflow-x: auto; font-size: 85%; font-family: var(--jp-code-font-family, monospace)"
    # A notebook page brings no colours for the classes of a diff: they stand in the line itself, and so does the paper.
    style += "; background: #f8f8f8; color: #222222; padding: 0.5em" if is_diff else ""
    page = highlight(text, get_lexer_by_name(language), HtmlFormatter(prestyles=style, noclasses=is_diff))
    display({"text/html": page, "text/plain": text}, raw=True)
