"""The load and the model of a benchmark: what is asked of every peer alike."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InvalidParameter, WorkloadError
from ..model.config import ModelConfig
from ..model.loader import find_model, fingerprint, read_json, weight_files
from ..model.tokenizer import Tokenizer
from ..prompts import to_requests
from ..workload import Workload
from .figures import tokens
from .job import Job, JobRequest
from .models import SHAPES, write_model

WARM_UP_REQUESTS, WARM_UP_TOKENS = 12, 4


def prepare_model(name: str, folder: Path) -> dict[str, Any]:
    """Put the model into an empty folder, in which a peer may leave its own form of it, and return what is known of it.

    name: one of bench.models.SHAPES (random weights), or whatever loader.find_model takes. Raises ModelError.
    """
    if name in SHAPES:
        write_model(name, folder)
    else:
        _link(find_model(name), folder)
    config = read_json(folder / "config.json")
    parsed = ModelConfig.from_hf(config)
    return {
        "name": name,
        "weights": "random" if name in SHAPES else "trained",
        "num_parameters": parsed.num_parameters,
        "context": parsed.max_position_embeddings,
        "fingerprint": fingerprint(config, weight_files(folder)),
    }


def make_job(workload: Workload, model: Path, *, dtype: str, threads: int, seed: int = 0) -> Job:
    """The workload as token ids and forced lengths, the first arrival at 0; lengths are cut to the model's context.

    Raises WorkloadError for a request that names no output length, or a text without a tokenizer.
    """
    config, tokenizer = _config_of(model), tokenizer_of(model)
    if unknown := next((row for row in workload if row.output_tokens is None), None):
        raise WorkloadError(
            f"request {unknown.request_id!r} of {workload.name} names no output length, and lengths are forced here, "
            "so that every engine does the same work; give output_tokens"
        )
    if tokenizer is None and any(row.prompt is not None for row in workload):
        raise WorkloadError(f"{workload.name} holds text, and the model {model.name} has no tokenizer to read it with")
    special = {*config.eos_token_ids, config.bos_token_id, config.pad_token_id}
    special |= tokenizer.special_ids if tokenizer else set()
    requests = to_requests(
        workload,
        vocab_size=config.vocab_size,
        tokenizer=tokenizer,
        special=sorted(i for i in special if i is not None),
        seed=seed,
    )
    begun = min(request.arrival_time for request in requests)
    asked = [
        JobRequest(r.request_id, r.arrival_time - begun, list(r.prompt_token_ids), r.params.max_tokens)
        for r in requests
    ]
    return Job(str(model), dtype, threads, asked, warm_up(asked))


def tokenizer_of(model: Path) -> Tokenizer | None:
    """None where the model's folder has no tokenizer.json."""
    file = model / "tokenizer.json"
    return Tokenizer.from_file(file, _config_of(model)) if file.exists() else None


def warm_up(requests: list[JobRequest]) -> list[JobRequest]:
    """A dozen requests of the same lengths, with few output tokens. Their prompts are reversed: no cache may profit."""
    return [
        replace(
            request,
            id=f"warm-up-{i}",
            arrival_s=0.0,
            prompt=request.prompt[::-1],
            output_tokens=min(request.output_tokens, WARM_UP_TOKENS),
        )
        for i, request in enumerate(requests[:WARM_UP_REQUESTS])
    ]


def load_facts(workload: Workload, job: Job) -> dict[str, Any]:
    """What the results say of the load."""
    prompt_tokens, output_tokens = tokens(job)
    return workload.facts() | {
        "num_prompt_tokens": prompt_tokens,
        "num_output_tokens": output_tokens,
        "last_arrival_s": max(r.arrival_s for r in job.requests),
        "num_warm_up_requests": len(job.warm_up),
    }


def usable_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _config_of(model: Path) -> ModelConfig:
    generation = model / "generation_config.json"
    return ModelConfig.from_hf(read_json(model / "config.json"), read_json(generation) if generation.exists() else None)


def _link(source: Path, folder: Path) -> None:
    """Links to the files of a model, copies where a system allows none; the model's own folder stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.suffix not in (".json", ".safetensors", ".jinja"):
            continue
        try:
            os.symlink(file.resolve(), folder / file.name)
        except OSError:
            shutil.copyfile(file, folder / file.name)
    if not (folder / "config.json").exists():
        raise InvalidParameter(f"the folder {source} holds no config.json")
