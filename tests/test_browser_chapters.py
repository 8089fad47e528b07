"""The chapters in JupyterLab: every cell runs, every picture is drawn, the page logs no error.

Each takes as long as the chapter itself, so one stands for all, unless MINIBATCHER_SCREENSHOTS names a folder: then all
are run, and what they look like is kept there.
"""

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
from browser import KERNEL_IS_IDLE, run_all_cells

from minibatcher.labkit.build import sources
from minibatcher.labkit.manifest import load_manifest
from minibatcher.labkit.notebooks import dumps, read_source

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = [path for path in sources(ROOT, "chapters") if path.stem.startswith(("7.", "tour"))]
SCREENSHOTS = os.environ.get("MINIBATCHER_SCREENSHOTS")
# What the notebook's model holds: a count for each code cell, the errors, and which pictures move.
LOOK = """() => {
  const cells = [...window.jupyterapp.shell.currentWidget.content.model.cells].filter(cell => cell.type === 'code');
  const outputs = cells.flatMap(cell => cell.sharedModel.outputs);
  return {
    counts: cells.map(cell => cell.executionCount),
    errors: outputs.filter(o => o.output_type === 'error').map(o => `${o.ename}: ${o.evalue}`),
    pictures: document.querySelectorAll('.jp-OutputArea-output img').length,
    stills: [...document.querySelectorAll('[id^=minibatcher-]')].filter(e => !e.querySelector('canvas, svg')).length,
    hidden: document.querySelectorAll('.jp-OutputPlaceholder').length,
    moving: document.querySelectorAll('[id^=minibatcher-] canvas, [id^=minibatcher-] svg').length,
  };
}"""
DRAWN = "() => [...document.querySelectorAll('[id^=minibatcher-]')].every(e => e.querySelector('canvas, svg'))"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_all_cells_run_and_all_pictures_are_drawn(path, lab, open_page):
    if not SCREENSHOTS and not path.stem.startswith("7.1"):
        pytest.skip("one chapter stands for all; MINIBATCHER_SCREENSHOTS=folder runs every one")
    notebook = read_source(path, load_manifest())
    (lab.folder / f"{path.stem}.ipynb").write_text(dumps(notebook), encoding="utf-8")
    shutil.copytree(ROOT / "chapters" / "figures", lab.folder / "figures", dirs_exist_ok=True)
    page = open_page(f"{lab.address}/lab/tree/{path.stem}.ipynb?token={lab.token}&reset", height=1000)
    page.set_default_timeout(400_000)
    page.wait_for_function(KERNEL_IS_IDLE, timeout=120_000)
    assert (page.evaluate(LOOK)["hidden"] > 0) == any("outputs_hidden" in str(cell.metadata) for cell in notebook.cells)
    run_all_cells(page)
    page.wait_for_function(DRAWN, timeout=30_000)
    found = page.evaluate(LOOK)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert found["errors"] == []
    assert found["hidden"] == 0  # what would have told the answer to a guess comes out when it is run
    assert found["counts"] == list(range(1, len(code) + 1))
    assert found["stills"] == 0 and (found["moving"] > 0 or path.stem == "tour")  # each chapter has one that moves
    assert found["pictures"] >= sum("show(" in cell.source for cell in code)
    if SCREENSHOTS:
        keep(page, path.stem)


def keep(page, name):
    """The whole notebook in pictures of a screen each."""
    folder = Path(SCREENSHOTS)
    folder.mkdir(parents=True, exist_ok=True)
    page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
    box = page.locator(".jp-WindowedPanel-outer").first
    height = box.evaluate("e => e.scrollHeight")
    visible = box.evaluate("e => e.clientHeight")
    for number, top in enumerate(range(0, height, visible - 40)):
        box.evaluate("(e, top) => { e.scrollTop = top; }", top)
        page.wait_for_timeout(150)
        page.screenshot(path=folder / f"{name}-{number:02d}.png")
