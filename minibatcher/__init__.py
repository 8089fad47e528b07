"""minibatcher: how an LLM server batches requests, as a small engine that you can read.

The torch-free rooms (requests, workloads, schedulers, KV bookkeeping, timelines, metrics) import without torch; an
engine on a real model needs it.
"""

import os
from importlib import import_module

# OpenMP threads that spin while they wait make a step several times slower beside any other busy process. The runtime
# reads this once, when torch is loaded; whoever has set it keeps their own.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "llm",
    "Completion": "llm",
    "Engine": "engine",
    "EngineOptions": "build",
    "build_engine": "build",
    "load_model": "model.loader",
    "Request": "request",
    "SamplingParams": "request",
    "FinishReason": "request",
    "Limits": "limits",
    "TenantLimit": "limits",
    "SchedulerConfig": "scheduling",
    "STRATEGIES": "scheduling",
    "Timeline": "timeline",
    "Workload": "workload",
    "WorkloadRequest": "workload",
    "load_workload": "workload",
    "run_comparison": "compare",
    "comparison": "report",
    "MinibatcherError": "errors",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str):
    """Import on first use, so that what needs torch is asked for only where torch is needed."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'minibatcher' has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "torch":
            from .errors import MissingDependency

            raise MissingDependency(
                f"minibatcher.{name} needs PyTorch, which is not installed: pip install torch"
            ) from error
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
