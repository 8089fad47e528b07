"""Measure the way in, from nothing: a fresh clone and environment in a temporary folder (a script, not a test).

    python tests/cold_start.py --only lab      # clone → make lab → JupyterLab answers → chapter 7.1, all cells run
    python tests/cold_start.py --only test     # clone → make test, green
    python tests/cold_start.py --only kernels  # what one kernel takes of memory and CPU, for each chapter and lab
    python tests/cold_start.py --only cuda     # what PyTorch's usual build for Linux downloads (asks uv)

Without --only, all four. The results are merged into chapters/measured/cold-start.json, from which `make generated`
writes tables. pip's cache is off; what pip takes from a folder of this machine counts as downloaded. Only what is
committed gets cloned. Measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import psutil
from browser import ARGUMENTS, KERNEL_IS_IDLE, SETTINGS, run_all_cells, wait_for

from minibatcher.tomlfile import read_toml

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "chapters" / "measured" / "cold-start.json"
CHAPTER = "chapters/7.1-static-and-dynamic.ipynb"
# Printed by pip: a wheel that it fetched, with its size, or one that it found in a folder.
FETCHED = re.compile(r"Downloading (\S+?)(?:\.metadata)? \(([\d.]+) ([kMG]?)B\)")
FOUND = re.compile(r"Processing (/\S+\.whl)")
# Megabytes of the files of each package, as installed.
SIZES = """
import importlib.metadata, json
sizes = {}
for package in importlib.metadata.distributions():
    files = (package.locate_file(file) for file in package.files or ())
    sizes[package.metadata["Name"]] = sum(f.stat().st_size for f in files if f.is_file()) / 1e6
print(json.dumps(sizes))
"""
# Run as a notebook's last cell: what its kernel, and the processes that it started, have taken.
TAKEN = """
import json, resource
own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps({"peak_mb": max(own.ru_maxrss, others.ru_maxrss) * 1024 / 1e6,
                  "cpu_s": sum(r.ru_utime + r.ru_stime for r in (own, others))}))
"""


class Failed(RuntimeError):
    """A phase that did not end well; the sentence says which, with the end of its output."""


def measured(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that the work took, and what it returned."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def run(command: list[str], *, cwd: Path, environment: dict[str, str]) -> list[tuple[float, str]]:
    """The lines that a command printed, each with the second since the command's start. Raises Failed if it fails."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    )
    lines = [(time.perf_counter() - begin, line.rstrip("\n")) for line in process.stdout]
    if process.wait():
        tail = "\n".join(line for _, line in lines[-20:])
        raise Failed(f"{' '.join(command)} ended with {process.returncode}:\n{tail}")
    return [*lines, (time.perf_counter() - begin, "")]


def fresh_environment(home: Path) -> dict[str, str]:
    """These variables, without what a newcomer does not have: a virtual environment, caches, settings of Jupyter."""
    dropped = ("PYTHON", "VIRTUAL_ENV", "MINIBATCHER", "JUPYTER", "MAKE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    own = str(Path(sys.prefix) / "bin")
    path = os.pathsep.join(folder for folder in kept["PATH"].split(os.pathsep) if folder != own)
    caches = {
        "XDG_CACHE_HOME": home / "cache",
        "MPLCONFIGDIR": home / "matplotlib",
        "TRITON_CACHE_DIR": home / "triton",
    }
    jupyter = {f"JUPYTER_{name}_DIR": home / name.lower() for name in ("CONFIG", "DATA", "RUNTIME")}
    settings = {"JUPYTERLAB_SETTINGS_DIR": home / "settings", "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces"}
    places = caches | jupyter | settings | {"IPYTHONDIR": home / "ipython"}
    return kept | {name: str(place) for name, place in places.items()} | {"PATH": path, "PIP_NO_CACHE_DIR": "1"}


def clone(folder: Path, environment: dict[str, str]) -> tuple[float, Path]:
    """Seconds, and the fresh clone."""
    place = folder / "minibatcher"
    # By an address, so that git copies the history, as over a network, and does not link to ours.
    seconds, _ = measured(
        lambda: run(["git", "clone", "--quiet", ROOT.as_uri(), str(place)], cwd=folder, environment=environment)
    )
    return seconds, place


def python() -> str:
    """The interpreter underneath this virtual environment, from which a newcomer would make one."""
    return getattr(sys, "_base_executable", sys.executable)


def install(place: Path, environment: dict[str, str]) -> dict[str, Any]:
    """The environment that `make lab` builds: its seconds, what was downloaded, and what lies on the disk."""
    lines = run(["make", f"PYTHON={python()}", ".venv/.installed-lab"], cwd=place, environment=environment)
    begin = next((second for second, line in lines if "-m pip install" in line), None)
    if begin is None:
        raise Failed("make printed no pip install, whose beginning ends the phase venv")
    downloaded: dict[str, float] = {}
    for _, line in lines:
        if match := FETCHED.search(line):
            unit = {"": 1e-6, "k": 1e-3, "M": 1, "G": 1e3}[match[3]]
            if not match[0].endswith(".metadata"):
                downloaded[match[1]] = float(match[2]) * unit
        elif match := FOUND.search(line):
            downloaded[Path(match[1]).name] = Path(match[1]).stat().st_size / 1e6
    program = str(place / ".venv" / "bin" / "python")
    sizes = json.loads(subprocess.run([program, "-c", SIZES], capture_output=True, text=True, check=True).stdout)
    top = sorted(sizes, key=sizes.get, reverse=True)[:10]
    whole = sum(f.lstat().st_size for f in (place / ".venv").rglob("*") if f.is_file() and not f.is_symlink()) / 1e6
    return {
        "seconds": {"venv": begin, "pip install": lines[-1][0] - begin},
        "downloaded_mb": round(sum(downloaded.values())),
        "packages": len(sizes),
        "disk_mb": round(whole),
        "largest_mb": {name: round(sizes[name], 1) for name in top},
        "torch": subprocess.run(
            [program, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
        ).stdout.strip(),
    }


def open_and_run(place: Path, environment: dict[str, str], settings: Path) -> dict[str, Any]:
    """Seconds until `make lab` answers, chapter 7.1 is open with a kernel, and all its cells have run."""
    from playwright.sync_api import sync_playwright

    for name, values in SETTINGS.items():
        path = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    flags = f"--no-browser --port={port} --IdentityProvider.token={token} --LabApp.expose_app_in_browser=True"
    address = f"http://127.0.0.1:{port}"
    log = settings / "log"
    with log.open("w", encoding="utf-8") as output:
        server = subprocess.Popen(
            ["make", f"PYTHON={python()}", "lab", f"LAB_FLAGS={flags}"],
            cwd=place, env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        up, _ = measured(lambda: wait_for(f"{address}/api/status?token={token}", server, log))
        with sync_playwright() as playwright:
            program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
            if program is None:
                raise Failed("no Chromium here: install your system's chromium package")
            page = playwright.chromium.launch(executable_path=program, args=ARGUMENTS).new_page()
            page.set_default_timeout(600_000)

            def show():
                page.goto(f"{address}/lab/tree/{CHAPTER}?token={token}")
                page.wait_for_function(KERNEL_IS_IDLE)

            opened, _ = measured(show)
            all_run, _ = measured(lambda: run_all_cells(page))
            check_all_ran(page)
            # The server and what started it, without the kernel that it has started.
            family = psutil.Process(server.pid).children(recursive=True)
            rss = sum(p.memory_info().rss for p in family if "ipykernel_launcher" not in p.cmdline()) / 1e6
        return {
            "seconds": {"server up": up, "chapter opened": opened, "all cells run": all_run},
            "server_mb": round(rss),
        }
    finally:
        for process in psutil.Process(server.pid).children(recursive=True):
            process.terminate()
        server.wait(30)


def check_all_ran(page) -> None:
    """Raise Failed unless each code cell of the open notebook has run in this kernel, without an error."""
    cells = page.evaluate(
        """() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells
             .filter(cell => cell.cell_type === 'code').map(cell => cell.toJSON())"""
    )
    order = [cell["execution_count"] for cell in cells]
    errors = [output["ename"] for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    if order != list(range(1, len(cells) + 1)) or errors:
        raise Failed(f"{CHAPTER}: cells ran in the order {order}, with errors {errors}")


def lab(folder: Path) -> dict[str, Any]:
    home = folder / "home"
    environment = fresh_environment(home)
    seconds, place = clone(folder, environment)
    installed = install(place, environment)
    settings = home / "settings"
    settings.mkdir(parents=True)
    used = open_and_run(place, environment, settings)
    phases = {"clone": seconds} | installed.pop("seconds") | used.pop("seconds")
    return {"seconds": {name: round(value, 1) for name, value in phases.items()}} | installed | used


def test(folder: Path) -> dict[str, Any]:
    environment = fresh_environment(folder / "home")
    _, place = clone(folder, environment)
    lines = run(["make", f"PYTHON={python()}", "test"], cwd=place, environment=environment)
    begin = next((second for second, line in lines if "ruff check" in line), None)
    verdict = next((line for _, line in reversed(lines) if re.search(r"\d+ passed", line)), None)
    if begin is None or verdict is None:
        raise Failed("make test printed no lint, or no verdict of pytest")
    return {
        "seconds": {"install": round(begin, 1), "lint, build check and tests": round(lines[-1][0] - begin, 1)},
        "verdict": re.sub(r"^=+ | =+$", "", re.sub(r"\x1b\[[\d;]*m", "", verdict)),
    }


def kernels(folder: Path) -> dict[str, Any]:
    """Peak megabytes and CPU seconds of a kernel that runs each chapter, and each lab with its solutions."""
    import nbformat
    from nbclient import NotebookClient

    shutil.copytree(ROOT, folder / "book", ignore=shutil.ignore_patterns(".*", "build"))
    taken = {}
    for name in ("chapters", "solutions"):
        for path in sorted((folder / "book" / name).glob("*.ipynb")):
            if not re.match(r"7\.\d|lab-|capstone", path.stem):
                continue
            notebook = nbformat.read(path, as_version=4)
            notebook.cells.append(nbformat.v4.new_code_cell(TAKEN))
            NotebookClient(notebook, timeout=600, kernel_name="python3", cwd=path.parent).execute()
            (output,) = notebook.cells[-1].outputs
            taken[path.stem] = {key: round(value, 1) for key, value in json.loads(output.text).items()}
            print(path.stem, taken[path.stem], flush=True)
    return {"notebooks": taken}


def cuda(folder: Path) -> dict[str, Any]:
    """Megabytes that Linux downloads for PyTorch's usual build and its CUDA packages, as the package index tells uv."""
    if shutil.which("uv") is None:
        raise Failed("uv, which reads the sizes from the package index, is not installed: pip install uv")
    lock = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    torch = re.search(r"^torch==\S+", lock, re.MULTILINE)[0]
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "sizes"\nversion = "0"\nrequires-python = "==3.11.*"\ndependencies = ["{torch}"]\n'
        """[tool.uv]\nenvironments = ["sys_platform == 'linux' and platform_machine == 'x86_64'"]\n""",
        encoding="utf-8",
    )
    run(["uv", "lock", "--no-config"], cwd=folder, environment=dict(os.environ))
    sizes = {}
    for package in read_toml(folder / "uv.lock")["package"]:
        if re.match(r"torch$|triton$|nvidia-|cuda-", package["name"]):
            wheels = [
                w for w in package["wheels"] if re.search(r"(cp311-cp311|py3-none)-(manylinux.*x86_64|any)", w["url"])
            ]
            sizes[package["name"]] = max(wheel["size"] for wheel in wheels) / 1e6
    return {"download_mb": round(sum(sizes.values())), "packages": len(sizes), "torch": torch}


def provenance() -> dict[str, Any]:
    """Where and on what something was measured."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return {
        "commit": commit.stdout.strip(),
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": round(psutil.getloadavg()[0], 1),
    }


def main() -> None:
    parts = {"lab": lab, "test": test, "kernels": kernels, "cuda": cuda}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=parts, help="measure this part alone")
    parser.add_argument("--network", default="", help="a word on the network, to stand beside the figures")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file that the results are merged into")
    options = parser.parse_args()
    for name in [options.only] if options.only else parts:
        where = provenance() | ({"network": options.network} if options.network else {})
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = parts[name](Path(folder)) | {"measured": where}
            except RuntimeError as error:  # Failed, or a server that did not start
                raise SystemExit(f"cold_start: {error}") from None
        results = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
        results[name] = result
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        print(json.dumps({name: results[name]}, indent=2))


if __name__ == "__main__":
    main()
