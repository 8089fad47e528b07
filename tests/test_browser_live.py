"""The live view in JupyterLab, on the real model: it grows, other cells answer, buttons work, and it ends as a film."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from browser import cell_text, run_cell, screenshot

SETUP = """
import threading
from minibatcher import Engine, SamplingParams
from minibatcher.request import Request
from minibatcher.viz.live import LiveView
engine = Engine.from_model("bard", strategy="continuous", max_num_seqs=4, max_model_len=1024)
requests = [Request(f"r{i}", list(range(3, 9 + i)), SamplingParams(max_tokens=n, ignore_eos=True))
            for i, n in enumerate([900, 30, 60, 20, 90, 900, 40] + 14 * [900])]
view = LiveView(engine, requests)
"""
LOOK = "view.look(lambda timeline: len(timeline.steps)), view.run.running"
SECOND_VIEW = """async () => {
  window.jupyterapp.shell.activateById(window.notebook ||= window.jupyterapp.shell.currentWidget.id);
  window.jupyterapp.shell.currentWidget.content.activeCellIndex = 1;
  await window.jupyterapp.commands.execute('notebook:create-output-view');
}"""
ALL_GROW = """n => { const films = [...document.querySelectorAll('.mb-slots')];
  return films.length === n && films.every(film => Number(film.dataset.extent) >= 60); }"""
CLOSE_VIEWS = """() => {
  for (const widget of [...window.jupyterapp.shell.widgets('main')]) if (widget.id !== window.notebook) widget.close();
  window.jupyterapp.shell.activateById(window.notebook);
}"""
AT_LEAST = "n => Number(document.querySelector('.mb-slots')?.dataset.extent) >= n"


@pytest.mark.parametrize("theme", ["light"])
def test_it_grows_beside_other_cells_and_stops(lab, open_page, theme):
    page = lab.open(open_page, [SETUP, "view", LOOK, "view.stop(); print(sorted(view.timeline.header.items()))"])
    run_cell(page, 0)
    run_cell(page, 1)
    page.wait_for_function(AT_LEAST, arg=30)
    first = run_cell(page, 2)  # the kernel answers while the engine serves
    assert first.endswith("True)") or "True" in first
    assert "busy: a step was running" in cell_text(page, 1) and "measured" in cell_text(page, 1)
    page.wait_for_function(AT_LEAST, arg=60)
    for views in (2, 3):  # a second view of the output catches up, and a third one too
        page.evaluate(SECOND_VIEW)
        page.wait_for_function(ALL_GROW, arg=views)
    page.evaluate(CLOSE_VIEWS)
    screenshot(page, "live-running")

    output = page.locator(".jp-Notebook .jp-Cell").nth(1)
    output.get_by_placeholder("request id").fill("r0")
    output.get_by_role("button", name="Abort it").click()
    output.get_by_text("r0 aborted").wait_for()
    output.get_by_role("button", name="Stop").click()
    # The film of the whole run takes its place: no buttons, no kernel needed.
    output.get_by_role("button", name="Abort it").wait_for(state="detached")
    output.locator("canvas").first.wait_for()
    steps = int(float(page.evaluate("() => document.querySelector('.mb-slots').dataset.extent")))
    told = run_cell(page, 3)
    assert "'interrupted', True" in told
    last = run_cell(page, 2)
    assert f"({steps}, False)" in last
    screenshot(page, "live-ended")
