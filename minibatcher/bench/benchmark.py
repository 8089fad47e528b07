"""A whole benchmark: load and model in, results out."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..hardware import model_spec
from ..provenance import circumstances, hardware, software
from ..workload import load_workload
from .load import load_facts, make_job, prepare_model, tokenizer_of, usable_cpus
from .process import ProcessFailed
from .report import BUSY, results
from .run import Peer, measure_rates, run_rounds


def benchmark(
    peers: Sequence[Peer],
    *,
    workload: str,
    num_requests: int | None = None,
    request_rate: float | None = math.inf,
    seed: int = 0,
    model: str = "bard",
    dtype: str = "float32",
    threads: int | None = None,
    baselines: Sequence[str] = (),
    runs: int = 3,
    timeout_s: float = 1800.0,
    missing: dict[str, str] | None = None,
    progress: Callable[[Peer, int, int], None] | None = None,
) -> dict[str, Any]:
    """Replay one workload on every peer, and return report.results.

    peers: those that can run here (run.about). workload, num_requests, request_rate, seed: as load_workload takes them.
    model: see load.prepare_model. dtype: "float32" or "bfloat16". threads: of each engine; None is all CPUs. baselines:
    names of the peers that ratios are of; the first peer unless told. runs: rounds. timeout_s: seconds of one run, its
    loading included. missing: peers that can't run here, and why. progress: as run_rounds takes it.
    Raises MinibatcherError for what is wrong with the load or the model. A run that fails raises nothing.
    """
    folder = Path(tempfile.mkdtemp(prefix="minibatcher-bench-"))
    try:
        threads, at = threads or usable_cpus(), folder / "model"
        facts = prepare_model(model, at)
        tokenizer = tokenizer_of(at)
        load = load_workload(
            workload,
            num_requests=num_requests,
            seed=seed,
            request_rate=request_rate,
            count_tokens=(lambda text: len(tokenizer.encode(text, add_special_tokens=True))) if tokenizer else None,
        ).fit_to_context(facts["context"])
        job = make_job(load, at, dtype=dtype, threads=threads, seed=seed)
        provenance = {
            "measured": circumstances(),
            "hardware": hardware(torch.device("cpu")) | {"threads": threads},
            "software": software(),
            "threads": threads,
            "dtype": dtype,
            "seed": seed,
            "request_rate": "own" if request_rate is None else str(request_rate),
            "model": facts,
            "workload": load_facts(load, job),
            "peers": {peer.name: {"settings": dict(peer.settings), "python": peer.python} for peer in peers},
        }
        rates, doubts = _rates(peers, dtype, threads)
        done, interrupted = run_rounds(
            peers,
            job,
            runs=runs,
            timeout_s=timeout_s,
            model=model_spec(str(at)),
            rates=rates,
            progress=progress,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    data = results(
        peers,
        done,
        baselines or [peers[0].name],
        missing=missing or {},
        interrupted=interrupted,
        rates=rates,
        provenance=provenance,
    )
    return data | {"warnings": doubts + data["warnings"]}


def _rates(peers: Sequence[Peer], dtype: str, threads: int) -> tuple[dict[str, Any] | None, list[str]]:
    """This machine's rates, where a peer will tell its steps, and sentences about what went wrong."""
    if all(peer.module != "minibatcher" for peer in peers):
        return None, []
    try:
        rates = measure_rates(dtype, threads)
    except ProcessFailed as problem:
        return None, [f"The bound is unknown, since this machine's rates could not be measured: {problem}."]
    share = rates["others_share"]
    if share is None or share <= BUSY:
        return rates, []
    doubt = f"Other programs took {share:.0%} of the processors while the rates were measured: they are low, and "
    return rates, [doubt + "shares of the bound too high."]
