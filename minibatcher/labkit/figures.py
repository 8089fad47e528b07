"""What a chapter shows: figures, with the sentence that stands for them where they are not seen, and package source."""

from __future__ import annotations

import base64
import io
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
    import html

    import matplotlib.pyplot as plt
    from IPython.display import display

    alt = alt or getattr(figure, "alt", None)
    if not alt:
        raise InvalidParameter("this figure has no words for those who can't see it: show(figure, alt=...)")
    buffer = io.BytesIO()
    # Without the version of matplotlib in it, so that equal pictures are equal files.
    figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    picture = f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt)}">'
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
