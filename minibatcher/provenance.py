"""What a result depends on: model, device, precision, software. Goes into every timeline and results file."""

from __future__ import annotations

import os
import platform
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


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
