"""The whole engine's decode step against its roofline: each weight and each cached key and value read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from ..build import build_engine
from ..hardware import ModelSpec
from ..model.loader import resolve_dtype
from ..request import Request, SamplingParams
from ..timeline import StepRecord, Timeline
from .arithmetic import decode_step_bytes, roofline_seconds
from .bench import COPY_BYTES, copy_bandwidth
from .child import failure
from .random_model import LLAMA_1B, TINY, random_model
from .timer import Timer, timer_for


@dataclass(frozen=True)
class EngineRun:
    """What is served: `batch` requests of `prompt` random tokens each, `output` tokens out of each."""

    batch: int = 64
    prompt: int = 1024
    output: int = 64


# Name, options of the engine. What needs a GPU is left out in a trial on a CPU.
VARIANTS = (
    ("Triton, CUDA graphs", {"attention": "triton", "cuda_graphs": True}),
    ("Triton, CUDA graphs, planned ahead", {"attention": "triton", "cuda_graphs": True, "plan_ahead": True}),
    ("Triton", {"attention": "triton"}),
    ("SDPA", {"attention": "sdpa"}),
)


def rows(device: str = "cuda", tiny: bool = False) -> Iterator[dict[str, Any]]:
    """The section: {"total": rows to come}, then a row for each way to run the engine. tiny: a trial's sizes."""
    where = torch.device(device)
    dtype = resolve_dtype("auto", where)
    config, run = (TINY, EngineRun(4, 12, 6)) if tiny else (LLAMA_1B, EngineRun())
    yield from measure(timer_for(where), where, dtype, config, run, 1 << 20 if tiny else COPY_BYTES)


def measure(
    timer: Timer, device: torch.device, dtype: torch.dtype, config: dict, run: EngineRun, copy_bytes: int
) -> Iterator[dict[str, Any]]:
    """Rows: kind "engine", variant, batch, mean_context, seconds (of a decode step on the wall clock, sampling and
    scheduling included), roofline_seconds, share_of_roofline, output_tokens_per_s; or `failure`.
    """
    variants = [v for v in VARIANTS if device.type == "cuda" or "cuda_graphs" not in v[1]]
    yield {"total": len(variants)}
    bandwidth = copy_bandwidth(timer, device, copy_bytes)
    name = "a Llama of 1B parameters, random weights" if config is LLAMA_1B else "a tiny Llama, random weights"
    model, spec = random_model(config, name, device, dtype), ModelSpec.from_hf(config, name)
    short = str(dtype).removeprefix("torch.")
    for variant, options in variants:
        row = {"kind": "engine", "variant": variant, "model": name, "dtype": short, "batch": run.batch}
        try:
            timeline = serve(model, run, **options)
        except Exception as problem:
            yield {**row, "failure": failure(problem)}
            continue
        seconds, contexts = decode_step(timeline, run.batch)
        least = roofline_seconds(decode_step_bytes(spec, contexts, short), bandwidth)
        yield {
            **row,
            "mean_context": sum(contexts) / len(contexts),
            "seconds": seconds,
            "roofline_seconds": least,
            "share_of_roofline": least / seconds,
            "output_tokens_per_s": run.batch / seconds,
            "copy_bytes_per_s": bandwidth,
        }


def serve(model, run: EngineRun, **options) -> Timeline:
    """The timeline of one run, all requests there at once, after a short one that warms up."""
    length = run.prompt + run.output
    engine = build_engine(
        model,
        max_num_seqs=run.batch,
        max_num_batched_tokens=8 * run.prompt,
        max_model_len=length,
        kv_cache_tokens=run.batch * (length + 16),
        **options,
    )
    for output in (4, run.output):
        engine.run(_requests(model, run, output))
        timeline = engine.timeline
        engine.reset()
    return timeline


def _requests(model, run: EngineRun, output: int) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (run.batch, run.prompt), generator=generator).tolist()
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return [Request(f"request-{i}", prompt, params) for i, prompt in enumerate(ids)]


def decode_step(timeline: Timeline, batch: int) -> tuple[float, list[int]]:
    """Median seconds from step to step while `batch` requests decode and nothing else runs, and the contexts of the
    middle one of these steps. From end to end, so that what the host does between two steps is in it.
    """

    def is_full(step: StepRecord) -> bool:
        return len(step.rows) == batch and all(row.num_tokens == 1 for row in step.rows)

    steps = [
        (now.end - before.end, now) for before, now in pairwise(timeline.steps) if is_full(before) and is_full(now)
    ]
    middle = steps[len(steps) // 2][1]
    return median(seconds for seconds, _ in steps), [row.context for row in middle.rows]
