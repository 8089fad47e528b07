"""nano-vllm on a CUDA GPU, driven step by step as its own `generate` does.

Written against its published source; it serves Qwen3 checkpoints that bring a tokenizer.
"""

from __future__ import annotations

import json
import shutil
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from ..job import Clock, Job, JobRequest, Served
from ._common import lacks, longest, replay, versions

TITLE = "nano-vllm (GPU)"
SETTINGS: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 16384}  # the second is its default
# It divides logits by the temperature and refuses 0; so small a one leaves the most probable token alone.
TEMPERATURE = 1e-6


def missing(settings: dict[str, Any]) -> str | None:
    if not _has_gpu():
        return "nano-vllm needs a CUDA GPU, and there is none here (no NVIDIA driver)"
    for package, name in (("flash_attn", "flash-attn"), ("nanovllm", "nano-vllm")):
        if lacks(package):
            return f"nano-vllm needs {name}, which is not installed here"
    return None


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None  # PyTorch would take seconds


def serve(job: Job) -> Served:
    # By name: it is no dependency of ours.
    SamplingParams = import_module("nanovllm").SamplingParams
    LLMEngine = import_module("nanovllm.engine.llm_engine").LLMEngine

    _check(job)
    settings = SETTINGS | job.settings
    loading = time.perf_counter()

    engine = LLMEngine(job.model, max_model_len=longest(job.warm_up + job.requests), **settings)
    load_s = time.perf_counter() - loading
    live: dict[str, Any] = {}

    def add(request: JobRequest) -> None:
        engine.add_request(
            request.prompt,
            SamplingParams(temperature=TEMPERATURE, max_tokens=request.output_tokens, ignore_eos=True),
        )
        live[request.id] = engine.scheduler.waiting[-1]  # nobody returns it, and its tokens are told at its end only

    seen: dict[str, int] = {}

    def step() -> list[tuple[str, list[int]]]:
        engine.step()
        news = []
        for name, sequence in list(live.items()):
            new = sequence.completion_token_ids[seen.get(name, 0) :]
            seen[name] = seen.get(name, 0) + len(new)
            if new:
                news.append((name, list(new)))
            if sequence.is_finished:
                del live[name]
        return news

    if job.warm_up:
        replay(job.warm_up, Clock(), add, step)
        seen.clear()
    outputs = replay(job.requests, Clock(), add, step)
    facts = {
        "versions": versions("nano-vllm", "torch", "flash-attn"),
        "settings": settings | {"temperature": TEMPERATURE},
        "load_s": load_s,
    }
    return Served(outputs, facts)


def _check(job: Job) -> None:
    """It would load a Llama into a Qwen3, and takes the precision from config.json: both fail late or not at all."""
    config = json.loads(Path(job.model, "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "qwen3":
        raise ValueError(f"nano-vllm serves Qwen3 models only, and {job.model!r} is a {config.get('model_type')!r}")
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype != job.dtype:
        raise ValueError(
            f"nano-vllm runs a model in its config.json's precision, {dtype!r}, and {job.dtype!r} is asked"
        )
