"""Pages in the system's Chromium, and a JupyterLab of its own: fixtures that tests/conftest.py hands to every test.

`open_page(path, ...)` opens a file or an address and, when the test ends, fails it if the page logged an error.
`lab` is a JupyterLab with an empty folder and empty settings; `lab.open(open_page, cells)` opens a notebook in it.
Screenshots go to the folder that MINIBATCHER_SCREENSHOTS names, else they are not kept.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
SETTINGS = {
    # Else cells outside the window are not in the page.
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"checkForUpdates": False, "fetchNews": "false", "doNotDisturbMode": True},
}


@pytest.fixture(scope="module")
def chromium() -> Iterator:
    """A headless browser. Of a module, not the session: Playwright's event loop would be in the way of other tests'."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("no Playwright here: pip install playwright, to see pages in a browser")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium here: install your system's chromium package, to see pages in a browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium) -> Iterator[Callable]:
    """Open an HTML file (a Path) or an address. A page that logs an error, or throws one, fails the test at its end."""
    errors: list[str] = []
    contexts = []

    def open_page(where: Path | str, *, width: int = 1280, height: int = 900, theme: str = "light", scale: int = 1):
        context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, device_scale_factor=scale
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(where.resolve().as_uri() if isinstance(where, Path) else where)
        return page

    open_page.errors = errors  # a test that provokes errors looks at them and clears them
    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


def screenshot(page, name: str) -> None:
    """Keep what the page (or an element of it) looks like, where somebody wants to see it."""
    folder = os.environ.get("MINIBATCHER_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png")


def num_colours(canvas) -> int:
    """Of all pixels of a canvas: 1 where nothing is drawn."""
    return canvas.evaluate(
        """c => new Set(new Uint32Array(
          c.getContext("2d").getImageData(0, 0, c.width, c.height).data.buffer)).size"""
    )


def check_crisp(canvas, scale: int) -> None:
    """A canvas has a pixel of its own for each of the screen's, and something is drawn on it."""
    assert canvas.evaluate("c => c.width") == pytest.approx(scale * canvas.bounding_box()["width"], abs=2)
    assert num_colours(canvas) > 20


def has_light_ink(page, root: str) -> bool:
    """Whether a picture writes in a light colour, as on a dark page."""
    return page.eval_on_selector(root, "root => getComputedStyle(root).color.match(/\\d+/g).map(Number)[0] > 128")


def drag_finger(page, *places: tuple[float, float]) -> None:
    """Put a finger down at the first place, move it over the others and lift it; one place is a tap."""
    session = page.context.new_cdp_session(page)
    session.send("Emulation.setTouchEmulationEnabled", {"enabled": True})
    kinds = ["touchStart", *["touchMove"] * (len(places) - 1)]
    for kind, (x, y) in zip(kinds, places):
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y}]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


@dataclass
class Lab:
    """A running JupyterLab."""

    address: str
    token: str
    folder: Path

    def open(self, open_page: Callable, cells: list[str], **options):
        """Write a notebook of code cells, open it and wait for its kernel. Returns the page."""
        import nbformat

        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = self.folder / f"notebook-{secrets.token_hex(4)}.ipynb"
        nbformat.write(notebook, path)
        page = open_page(f"{self.address}/lab/tree/{path.name}?token={self.token}&reset", **options)
        page.wait_for_function(KERNEL_IS_IDLE, timeout=120_000)
        return page


KERNEL_IS_IDLE = "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"


def run_all_cells(page) -> None:
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")


def run_cell(page, number: int) -> str:
    """Run one code cell (from 0) and return the text of its output."""
    page.evaluate(
        """async number => {
          const notebook = window.jupyterapp.shell.currentWidget.content;
          notebook.deselectAll();
          notebook.activeCellIndex = number;
          await window.jupyterapp.commands.execute('notebook:run-cell');
        }""",
        number,
    )
    return cell_text(page, number)


def cell_text(page, number: int) -> str:
    return page.locator(".jp-Notebook .jp-Cell").nth(number).locator(".jp-Cell-outputArea").inner_text()


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium) -> Iterator[Lab]:
    """JupyterLab on this machine alone, with nobody's settings: its configuration and data lie in empty folders."""
    if importlib.util.find_spec("jupyterlab") is None:
        pytest.skip("no JupyterLab here: pip install 'minibatcher[lab]', to test notebooks in a browser")
    home = tmp_path_factory.mktemp("lab")
    folder = home / "notebooks"
    folder.mkdir()
    for name, values in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values), encoding="utf-8")
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    environment = os.environ | {name: str(home / place) for name, place in places.items()} | {"PYTHONPATH": str(ROOT)}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    command = [
        *(sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"),
        *("--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"),
        *("--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None", "--LabApp.extension_manager=readonly"),
    ]
    log = home / "log"
    with log.open("w", encoding="utf-8") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(server, f"{address}/api/status?token={token}", log)
        yield Lab(address, token, folder)
    finally:
        server.terminate()  # it ends its kernels itself
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_for(server: subprocess.Popen, address: str, log: Path, seconds: float = 120) -> None:
    """Until the server answers at the address. Raises RuntimeError with its last words where it does not."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(address, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            if server.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(encoding="utf-8")[-2000:]
                raise RuntimeError(f"JupyterLab did not start:\n{tail}") from None
            time.sleep(0.1)
