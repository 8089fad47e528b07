"""A picture that moves: in a notebook with a kernel, in a saved notebook or a web page without one, and standing still.

A picture is one ES module in this folder and its data. `host.js` brings the two together; see there for what a module
must export.
"""

from __future__ import annotations

import base64
import html
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..errors import MissingDependency
from .sheet import as_html

_numbers = itertools.count(1)  # ids on a page; counted, so that equal runs make equal notebooks
_DTYPES = {"int32", "float32", "float64", "uint8"}
SHARED = {  # module → the files shared_*.js that it needs
    "memory": ("page", "theme", "film"),
    "padding": ("page",),
    "roofline": ("page", "theme"),
    "slots": ("page", "theme", "film"),
}


class Interactive:
    """What a cell shows: the moving picture, or `still` where scripts do not run, or `text` where HTML is not shown.

    module: name of the ES module in this folder. data: anything that JSON holds. arrays: int32, float32, float64 or
    uint8, sent as bytes. still: a figure with the same facts. alt: a sentence or two for who can't see it. text: the
    facts as a table in letters.
    """

    def __init__(
        self,
        module: str,
        data: dict[str, Any],
        arrays: Mapping[str, np.ndarray],
        *,
        still: Figure,
        alt: str,
        text: str,
    ) -> None:
        self.module, self.data, self.arrays = module, data, dict(arrays)
        self.still, self.alt, self.text = still, alt, text

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        # One HTML output, not HTML beside a PNG: of those an untrusted notebook would show nothing at all.
        return {"text/html": self.html(), "text/plain": self.text}

    def html(self) -> str:
        """A piece of HTML that needs no kernel and no network: the still picture, which a script replaces."""
        layout, packed = pack(self.arrays)
        root = f"minibatcher-{self.module}-{next(_numbers)}"
        still = as_html(self.still, self.alt, ' style="max-width: 100%"')
        arguments = ", ".join(
            [
                json.dumps(root),
                _script_json(self.data),
                _script_json(layout),
                json.dumps(base64.b64encode(packed).decode("ascii")),
            ]
        )
        return (
            f'<div id="{root}">{still}<p>A still: run this cell, and it moves.</p></div>\n'
            f'<script type="module">\n{module_source(self.module)}\nmountInline({arguments});\n</script>'
        )

    def page(self, title: str, below: str = "") -> str:
        """A whole HTML document: one file that a reader can mail. below: HTML that follows the picture."""
        body = f"{self.html()}\n{below}"
        return PAGE.format(title=html.escape(title), body=body, text=html.escape(self.text))

    def save(self, path: str | Path, title: str = "minibatcher", below: str = "") -> None:
        """Write `page` to a file."""
        Path(path).write_text(self.page(title, below), encoding="utf-8")

    def widget(self):
        """The same as an anywidget on a live kernel: its `state` follows what the reader does (step, sliders).

        Raises MissingDependency without anywidget.
        """
        return widget_class(self.module)(self)


PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; font-family: system-ui, sans-serif; }}
body {{ max-width: 1200px; margin: 1rem auto; padding: 0 1rem; }}
pre {{ overflow-x: auto; font-size: 80%; }}
</style></head>
<body>
<h1>{title}</h1>
{body}
<details><summary>The same as text</summary><pre>{text}</pre></details>
</body>
</html>
"""


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[list[dict[str, Any]], bytes]:
    """Arrays end to end as little-endian bytes, each aligned to 8; and where each lies, in elements and bytes."""
    layout, parts, size = [], [], 0
    for name, array in arrays.items():
        if array.dtype.name not in _DTYPES:
            raise TypeError(f"array {name!r} has dtype {array.dtype}; a browser takes {', '.join(sorted(_DTYPES))}")
        data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        layout.append({"name": name, "dtype": array.dtype.name, "offset": size, "length": array.size})
        parts.append(data + bytes(-len(data) % 8))
        size += len(parts[-1])
    return layout, b"".join(parts)


def module_source(module: str) -> str:
    """The module, its parts (MODULE_*.js and SHARED) and its host as one text, without `export`, to stand in a page."""
    folder = Path(__file__).parent
    shared = [folder / f"shared_{name}.js" for name in SHARED[module]]
    files = [*shared, *sorted(folder.glob(f"{module}_*.js")), folder / f"{module}.js", folder / "host.js"]
    return "\n".join(file.read_text(encoding="utf-8") for file in files).replace("export function", "function")


_classes: dict[str, type] = {}


def widget_class(module: str) -> type:
    """The anywidget class of a module, made once. Raises MissingDependency."""
    if module in _classes:
        return _classes[module]
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise MissingDependency(
            "a picture that talks to the kernel needs anywidget: pip install 'minibatcher[lab]'; without it, the "
            "picture itself shows and moves all the same"
        ) from error

    class Widget(anywidget.AnyWidget):
        _esm = module_source(module) + "\nexport default { render };\n"
        data = traitlets.Dict().tag(sync=True)
        parts = traitlets.List().tag(sync=True)  # not `layout`: that is every widget's size on the page
        packed = traitlets.Bytes().tag(sync=True)
        state = traitlets.Dict().tag(sync=True)

        def __init__(self, picture: Interactive) -> None:
            parts, packed = pack(picture.arrays)
            super().__init__(data=picture.data, parts=parts, packed=packed, state={})

        def tell(self, message: dict[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
            """Send the picture something new; from any thread."""
            layout, packed = pack(arrays or {})
            self.send({**message, "layout": layout}, buffers=[packed])

    Widget.__name__ = f"{module.capitalize()}Widget"
    _classes[module] = Widget
    return Widget


def _script_json(value: Any) -> str:
    """JSON that may stand inside a script: nothing in it can end the script or begin a comment."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
