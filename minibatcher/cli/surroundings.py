"""What a report of a bug needs beside the versions: where things lie, and what else may have an influence."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from ..errors import DeviceError

NOTEBOOKS = ("ipython", "ipykernel", "ipywidgets", "anywidget", "jupyterlab", "jupytext", "nbval")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TRITON_INTERPRET", "CC")


def surroundings() -> dict[str, Any]:
    """As plain data. A path in the user's home begins with ~, so that no name goes out with a report."""
    import torch

    from ..host_memory import host_memory
    from ..kernels.report import driver_version, git_commit

    try:
        memory = host_memory()[0]
    except DeviceError:
        memory = None
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "python": short(sys.executable),
        "environment": environment(),
        "package": short(Path(__file__).resolve().parents[1]),
        "commit": git_commit(),
        "torch_built_for_cuda": torch.version.cuda,
        "driver": driver_version(),
        "c_compiler": short(compiler()),
        "notebooks": {name: version(name) for name in NOTEBOOKS},
        "variables": {name: short(value) for name, value in os.environ.items() if is_ours(name)},
    }


def told(facts: dict[str, Any]) -> list[str]:
    """The same in sentences."""
    memory = f" and {facts['memory_bytes'] / 2**30:.0f} GiB of memory" if facts["memory_bytes"] else ""
    commit = f", of commit {facts['commit'][:12]}{'+' * facts['commit'].endswith('+')}" if facts["commit"] else ""
    there = [f"{name} {number}" for name, number in facts["notebooks"].items() if number]
    variables = [f"{name}={value}" for name, value in facts["variables"].items()]
    built = facts["torch_built_for_cuda"]
    return [
        f"System: {facts['system']}, {facts['cores']} cores{memory}.",
        f"Python: {facts['python']} ({facts['environment']}). minibatcher: {facts['package']}{commit}.",
        f"PyTorch is built {f'for CUDA {built}' if built else 'without CUDA'}; NVIDIA's driver: "
        f"{facts['driver'] or 'none found'}.",
        f"C compiler: {facts['c_compiler'] or 'none found'} (Triton needs one on a GPU, and none in its interpreter).",
        f"Notebooks: {', '.join(there) or 'nothing installed'}.",
        f"Environment variables: {', '.join(variables) or 'none that matter'}.",
    ]


def environment() -> str:
    """What kind of Python this is."""
    if "google.colab" in sys.modules or os.environ.get("COLAB_RELEASE_TAG"):
        return "Colab"
    if os.environ.get("CONDA_PREFIX") and Path(sys.prefix) == Path(os.environ["CONDA_PREFIX"]):
        return "a conda environment"
    return "a virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"


def compiler() -> str | None:
    """The C compiler that Triton would take."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def is_ours(name: str) -> bool:
    return name in VARIABLES or name.startswith("MINIBATCHER_")


def short(path: Any) -> str | None:
    """With ~ for the home folder."""
    if path is None:
        return None
    home = str(Path.home())
    return "~" + str(path)[len(home) :] if str(path).startswith(home + os.sep) else str(path)


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
