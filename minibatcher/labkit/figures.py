"""What a chapter shows: figures, with the sentence that stands for them where they are not seen, and package source."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show(figure: Figure, alt: str) -> None:
    """Display `figure` as a picture with `alt` as its alternative text, and close it.

    The text goes where notebook tools look for it: the picture's metadata, and the plain-text form.
    """
    import matplotlib.pyplot as plt
    from IPython.display import display

    buffer = io.BytesIO()
    # Without the version of matplotlib in it, so that equal pictures are equal files.
    figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    bundle = {"image/png": base64.b64encode(buffer.getvalue()).decode("ascii"), "text/plain": alt}
    display(bundle, metadata={"image/png": {"alt": alt}}, raw=True)


def show_source(thing: object) -> None:
    """Display the installed source of a class, a function or a module, so that what a reader sees is what runs."""
    import inspect

    from IPython.display import display

    source = inspect.getsource(thing).rstrip()
    display({"text/markdown": f"```python\n{source}\n```", "text/plain": source}, raw=True)
