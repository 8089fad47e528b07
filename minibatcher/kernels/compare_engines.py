"""All strategies through the whole engine, with SDPA and with our kernels: the answers must be the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..compare import run_comparison
from ..model.loader import load_model, resolve_dtype
from ..scheduling import DEFAULT_STRATEGIES
from ..workload import Workload, load_workload
from .child import failure
from .random_model import LLAMA_1B, TINY, random_model

ATTENTION = ("sdpa", "triton")


def rows(device: str = "cuda", tiny: bool = False) -> Iterator[dict[str, Any]]:
    """{"total": rows to come}; a row for each model, attention and strategy; for float32, whether all answers agree.

    The bundled model runs in float32, where answers must agree token for token; the large one in the device's own
    precision, where a near tie may fall either way. tiny: a trial's sizes, and one strategy of each kind of memory.
    """
    where = torch.device(device)
    strategies = ("static", "chunked") if tiny else DEFAULT_STRATEGIES
    yield {"total": 2 * len(ATTENTION) * len(strategies) + 1}
    small = _workload(2 if tiny else 24, 20 if tiny else 384)
    bundled = load_model("bard", device=where, dtype="float32")
    runs = []
    for row in _served(bundled, small, strategies):
        runs.append(row)
        yield {key: value for key, value in row.items() if key != "hashes"}
    yield answers(runs)
    config, name = (TINY, "tiny-random") if tiny else (LLAMA_1B, "llama-1b-random")
    large = random_model(config, name, where, resolve_dtype("auto", where))
    for row in _served(large, _workload(2 if tiny else 16, 20 if tiny else 512), strategies):
        yield {key: value for key, value in row.items() if key != "hashes"}


def answers(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether all runs, at least two, gave the same output hashes; names those that differ from the first."""
    served = [run for run in runs if "hashes" in run]
    odd = [f"{run['attention']} {run['strategy']}" for run in served if run["hashes"] != served[0]["hashes"]]
    same = not odd and len(served) == len(runs) > 1
    return {"kind": "answers", "runs": len(served), "identical": same, "different": odd}


def _served(model, workload: Workload, strategies: Sequence[str]) -> Iterator[dict[str, Any]]:
    longest = max((r.prompt_tokens or 0) + (r.output_tokens or 0) for r in workload)
    for attention in ATTENTION:
        for strategy in strategies:
            row = {
                "kind": "compare",
                "model": model.name,
                "dtype": str(model.dtype).removeprefix("torch."),
                "attention": attention,
                "strategy": strategy,
                "requests": len(workload),
            }
            options: dict[str, Any] = {
                "max_num_seqs": 8,
                "max_model_len": longest,
                "max_num_batched_tokens": max(256, longest),
            }
            try:
                found = run_comparison(workload, model=model, strategies=[strategy], attention=attention, **options)
            except Exception as problem:
                yield {**row, "failure": failure(problem)}
                continue
            timeline = found[strategy]
            tokens = sum(len(r.output_token_ids) for r in timeline.requests.values())
            seconds = timeline.steps[-1].end
            hashes = {r.request_id: r.output_hash for r in timeline.requests.values()}
            yield {**row, "seconds": seconds, "output_tokens_per_s": tokens / seconds, "hashes": hashes}


def _workload(num_requests: int, longest: int) -> Workload:
    """Lengths of a production chat service, all there at once, cut to `longest` tokens each."""
    workload = load_workload("azure-conv", num_requests=num_requests, request_rate=float("inf"))
    return workload.fit_to_context(longest)
