"""What a result depends on: model, device, precision, software. Goes into every timeline and results file."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import torch

from . import __version__
from .attention import triton_support
from .attention.choose import AttentionBackend
from .model.loader import LoadedModel


def software() -> dict[str, str]:
    return {
        "minibatcher": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_support.version() or "not installed",
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """Name of the device that runs the model, with what it has of threads or memory."""
    if device.type == "cuda":
        props = torch.cuda.get_device_properties(device)
        return {
            "device": props.name,
            "memory_bytes": props.total_memory,
            "compute_capability": f"{props.major}.{props.minor}",
            "cuda": torch.version.cuda,
        }
    return {
        "device": _cpu_name(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
    }


def provenance(model: LoadedModel, attention: AttentionBackend) -> dict[str, Any]:
    """Header fields for a timeline."""
    return {
        "model": model.name,
        "model_fingerprint": model.fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": attention.name,
        "attention_why": attention.why,
        "hardware": hardware(model.device),
        "software": software(),
    }


def circumstances() -> dict[str, Any]:
    """When and amid what a measurement begins, for results that are kept.

    date: UTC. git_commit: see there. load_average: processes that wanted a CPU in the last minute, of all programs on
    this machine; None where the system does not tell. num_cpus: how many there are for them.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "num_cpus": os.cpu_count(),
    }


def git_commit() -> str | None:
    """Of the checkout that this file is in, with a + where files differ from it; None without one."""
    folder = Path(__file__).parent

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, encoding="utf-8", timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
