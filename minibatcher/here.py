"""The set-up of a chapter: install what is missing, look at the machine, choose settings that suit it.

No import beyond the standard library at load: this runs before anything else is known to be installed.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

from .errors import MissingDependency

T = TypeVar("T")

# Where one of these is missing the reader decides: the right build of PyTorch depends on the machine, and another
# ipywidgets than the notebook's own front end knows breaks every widget (Colab has 7.7.1).
NEVER_INSTALLED = {
    "torch": "the right build depends on your machine: see pytorch.org, or pip install torch",
    "ipywidgets": "the notebook's front end must know its version: pip install ipywidgets",
}
# Large, and most of the book does without: a reader who opens the first chapter should not wait for it.
LATER = {"triton": "only the kernels of chapter 7.3 and of its lab need it: %pip install triton"}
FOR_NOTEBOOKS = ("anywidget", "ipywidgets", "pygments")  # of the extra `lab`, what the chapters' cells import
RESTART = "restart the kernel (on Colab: Runtime → Restart session), then run the notebook from the top"


@dataclass(frozen=True)
class Here:
    """The machine that the notebook runs on. device: "cpu" or "cuda". dtype: torch's name of what the model runs in."""

    device: str
    name: str
    dtype: str = "float32"

    def choose(self, cpu: T, *, gpu: T) -> T:
        """One of two settings, by the machine; on a GPU it is said that the larger one was taken."""
        if self.device == "cpu":
            return cpu
        print(f"On the GPU: {gpu!r}, where a CPU takes {cpu!r}.")
        return gpu


def prepare(say: Callable[[str], None] = print) -> Here:
    """Install what the chapters need and is not there, check it, and say in a line what they run on.

    Nothing that is installed changes its version. PyTorch and ipywidgets are never installed; Triton, where it is
    missing, is named and left to the reader. Raises MissingDependency with a sentence that says what to do.
    """
    missing = missing_now()
    for requirement in missing:
        if (name := project_name(requirement)) in NEVER_INSTALLED:
            raise MissingDependency(f"{name} is missing, and is not installed from here: {NEVER_INSTALLED[name]}")
    if missing:
        say(f"Installing {', '.join(map(project_name, missing))} …")
        install(missing)
        importlib.invalidate_caches()  # or Python may not see what came after it was started
        left = missing_now()
        if left:
            raise MissingDependency(f"pip reported success, but {', '.join(left)} can't be found: {RESTART}")
    if old := too_old():
        raise MissingDependency(f"{'; '.join(old)}: pip install --upgrade it, then {RESTART}.")
    if stale := stale_modules():
        raise MissingDependency(f"{'; '.join(stale)}. So {RESTART}.")
    for requirement in missing_requirements():
        name = project_name(requirement)
        say(f"Without {name}: {LATER[name]}")
    return look_around(say)


def missing_now() -> list[str]:
    """What is not installed and can't wait."""
    return [line for line in missing_requirements() if project_name(line) not in LATER]


def look_around(say: Callable[[str], None] = print) -> Here:
    """Which device the chapters use, said in a line."""
    import torch

    from . import __version__

    software = f"minibatcher {__version__} on PyTorch {torch.__version__}"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_properties(0).name
        say(f"{software}, {name}.\nChapters choose larger settings where a GPU allows them, and say so.")
        return Here("cuda", name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    say(f"{software}, a CPU with {cores} cores.\nWith a GPU, chapters would choose larger settings.")
    return Here("cpu", f"CPU, {cores} cores")


def missing_requirements(requirements: Iterable[str] | None = None) -> list[str]:
    """Of minibatcher's requirements (and those of its notebooks), what is not installed: "tokenizers>=0.20", …"""
    return [line for line in _needed_here(requirements) if _version(project_name(line)) is None]


def too_old(requirements: Iterable[str] | None = None) -> list[str]:
    """Sentences on what is installed in an earlier version than minibatcher needs. Nothing is upgraded from here."""
    sentences = []
    for line in _needed_here(requirements):
        there, bound = _version(project_name(line)), re.search(r">=\s*([\d.]+)", line)
        if there and bound and _numbers(there) < _numbers(bound[1]):
            sentences.append(f"{project_name(line)} {there} is installed, minibatcher needs {bound[1]} or later")
    return sentences


def install(requirements: Iterable[str]) -> None:
    """pip install, with every installed package held at its version. Raises MissingDependency with pip's last words."""
    held: dict[str, str] = {}
    for found in metadata.distributions():
        if name := found.metadata["Name"]:
            held.setdefault(project_name(name), found.version)  # of two on the path, Python takes the first
    with tempfile.TemporaryDirectory() as folder:
        constraints = os.path.join(folder, "constraints.txt")
        with open(constraints, "w", encoding="utf-8") as file:
            # A local version such as 2.13.0+cpu is on no index; an installed package satisfies its public part too.
            file.write("\n".join(f"{name}=={version.partition('+')[0]}" for name, version in sorted(held.items())))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "-c", constraints, *requirements]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        raise MissingDependency(f"pip could not install {', '.join(requirements)}:\n{done.stderr.strip()[-1000:]}")


def stale_modules(modules: dict[str, Any] | None = None) -> list[str]:
    """Modules in memory that are not of the version on disk: one was installed after the other had been imported."""
    sentences = []
    for name in ("minibatcher", "torch", "numpy", "ipywidgets", "anywidget"):
        loaded = getattr((sys.modules if modules is None else modules).get(name), "__version__", None)
        on_disk = _version(name)
        if loaded and on_disk and loaded.partition("+")[0] != on_disk.partition("+")[0]:
            sentences.append(f"{name} {loaded} is loaded, while {on_disk} is installed")
    return sentences


def project_name(requirement: str) -> str:
    """ "triton>=3.4; sys_platform == 'linux'" → "triton"."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _needed_here(requirements: Iterable[str] | None) -> list[str]:
    if requirements is None:
        try:
            requirements = metadata.requires("minibatcher") or ()
        except metadata.PackageNotFoundError:  # run from its folder, by who has installed the rest by hand
            requirements = ()
    return [plain for line in requirements if (plain := _needed(line))]


def _numbers(version: str) -> list[int]:
    """ "2.13.0+cpu" → [2, 13, 0]"""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def _needed(line: str) -> str | None:
    """The requirement without its marker, or None where the marker leaves it out here."""
    requirement, _, marker = (part.strip() for part in line.partition(";"))
    if "extra" in marker:
        return requirement if project_name(line) in FOR_NOTEBOOKS and _is_lab(marker) else None
    if "sys_platform" in marker and repr(sys.platform) not in marker.replace('"', "'"):
        return None
    match = re.search(r"python_version\s*<\s*[\"']3\.(\d+)", marker)
    return None if match and sys.version_info[1] >= int(match[1]) else requirement


def _is_lab(marker: str) -> bool:
    return bool(re.search(r"extra\s*==\s*[\"']lab[\"']", marker))


def _version(project: str) -> str | None:
    try:
        return metadata.version(project)
    except metadata.PackageNotFoundError:
        return None
