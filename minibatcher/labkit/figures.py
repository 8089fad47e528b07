"""What a chapter shows: figures, with the sentence that stands for them where they are not seen, and package source."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    import inspect

    from IPython.display import display
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    source = inspect.getsource(thing).rstrip()
    style = "white-space: pre; overflow-x: auto; font-size: 85%"
    page = highlight(source, PythonLexer(), HtmlFormatter(prestyles=style))
    display({"text/html": page, "text/plain": source}, raw=True)
