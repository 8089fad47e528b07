"""transformers' generate: static batches, padded on the left, as long as their longest request."""

from __future__ import annotations

import time
from typing import Any

from ..job import Clock, Job, JobRequest, Served
from ._common import Outputs, lacks, openmp, versions

TITLE = "transformers.generate (static batches)"
# 16: what the comparison is defined with. sdpa: the one fused attention that transformers has on a CPU.
SETTINGS: dict[str, Any] = {"batch_size": 16, "attn_implementation": "sdpa"}


def missing(settings: dict[str, Any]) -> str | None:
    if lacks("transformers"):
        return "transformers is not installed (pip install transformers)"
    return None


def environment(job: Job) -> dict[str, str]:
    return openmp(job, "active") | {"HF_HUB_OFFLINE": "1"}


def load(job: Job, attn_implementation: str) -> tuple[Any, float]:
    """The model in the job's precision, ending at no token, and the seconds that loading took."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job.threads)
    loading = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=getattr(torch, job.dtype), attn_implementation=attn_implementation
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model, time.perf_counter() - loading


def serve(job: Job) -> Served:
    import torch

    settings = SETTINGS | job.settings
    model, load_s = load(job, settings["attn_implementation"])
    with torch.inference_mode():
        if job.warm_up:
            _run(model, job.warm_up, settings["batch_size"])
        outputs = _run(model, job.requests, settings["batch_size"])
    facts = {
        "versions": versions("transformers", "torch"),
        "settings": settings | {"threads": torch.get_num_threads(), "attention": model.config._attn_implementation},
        "load_s": load_s,
        "notes": ["a batch is what has arrived when the one before it ends, in order of arrival"],
    }
    return Served(outputs, facts)


def _run(model: Any, requests: list[JobRequest], batch_size: int) -> Outputs:
    outputs: Outputs = {}
    waiting = sorted(requests, key=lambda r: r.arrival_s)[::-1]
    clock = Clock()
    clock.start()
    while waiting:
        clock.wait_until(waiting[-1].arrival_s)
        batch = []
        while waiting and len(batch) < batch_size and waiting[-1].arrival_s <= clock.now():
            batch.append(waiting.pop())
        outputs |= _generate(model, batch, clock)
    return outputs


def _generate(model: Any, batch: list[JobRequest], clock: Clock) -> Outputs:
    """One batch. What a request is given beyond its own length is thrown away."""
    import torch

    width = max(len(r.prompt) for r in batch)
    ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in batch])
    mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
    times: list[float] = []

    def note_the_time(ids, scores, **kwargs):  # a stopping criterion, called after each step, that stops nothing
        times.append(clock.now())
        return torch.zeros(len(batch), dtype=torch.bool)

    generated = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(r.output_tokens for r in batch),
        do_sample=False,
        use_cache=True,
        stopping_criteria=[note_the_time],
    )
    rows = generated[:, width:].tolist()
    return {r.id: (row[: r.output_tokens], times[: r.output_tokens]) for r, row in zip(batch, rows)}
