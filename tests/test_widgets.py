"""Every widget is built on the ipywidgets that is installed: `make colab` runs this with the versions of Colab."""

from __future__ import annotations

import pytest
from fakes import fake_engine, fake_requests, fake_run

pytest.importorskip("ipywidgets", reason="the widgets are made with ipywidgets")
pytest.importorskip("anywidget", reason="and with anywidget")

from minibatcher.viz.live import LiveView
from minibatcher.viz.memory_view import memory_view
from minibatcher.viz.padding import padding_view
from minibatcher.viz.roofline_view import roofline_view
from minibatcher.viz.slots import animate


def pictures():
    run = fake_run("static", fake_requests(12))
    return {
        "one run": animate(run),
        "two runs": animate({"a": run, "b": run}),
        "padding": padding_view(),
        "roofline": roofline_view(),
        "memory": memory_view(run),
    }


@pytest.mark.parametrize("name", ["one run", "two runs", "padding", "roofline", "memory"])
def test_a_picture_is_a_widget_and_stands_alone_too(name):
    picture = pictures()[name]
    widget = picture.widget()
    assert "function render(" in widget._esm and "export default { render };" in widget._esm
    assert widget.data and widget.state == {}
    assert sum(part["length"] for part in widget.parts) == sum(array.size for array in picture.arrays.values())
    bundle = widget._repr_mimebundle_()
    bundle = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in bundle
    heard = []
    widget.observe(lambda change: heard.append(change["new"]), "state")
    widget.state = {"step": 3}
    assert heard == [{"step": 3}]

    alone = picture._repr_mimebundle_()
    assert set(alone) == {"text/html", "text/plain"} and alone["text/plain"] == picture.text
    assert 'alt="' in alone["text/html"] and "data:image/png;base64," in alone["text/html"]
    assert "http://" not in alone["text/html"] and "https://" not in alone["text/html"]  # needs no network


def test_the_live_view_is_built_and_runs():
    view = LiveView(fake_engine("chunked", num_blocks=200, block_size=16, max_model_len=400), fake_requests(6))
    assert [type(child).__name__ for child in view.box.children] == ["HTML", "SlotsWidget", "HBox"]
    view.start()
    assert view.wait(30) and view.run.error is None and "useful" in view.panel.value
