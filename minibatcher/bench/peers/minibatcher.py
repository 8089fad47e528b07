"""minibatcher itself, in its process: chunked prefill, on the path through the CPU that the settings name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..job import Job, JobRequest, Served
from ._common import lacks, longest, openmp, versions

TITLE = "minibatcher"
SETTINGS: dict[str, Any] = {"strategy": "chunked", "max_num_seqs": 64, "max_num_batched_tokens": 256}


def missing(settings: dict[str, Any]) -> str | None:
    if lacks("torch"):
        return "PyTorch is not installed (pip install torch)"
    if settings.get("cpu_path") != "compiled":
        return None
    from ...compiled.library import find_compiler

    if find_compiler() is None:
        return "there is no C++ compiler here (c++, g++ or clang++), and the compiled CPU path needs one"
    return None


def environment(job: Job) -> dict[str, str]:
    # The compiled path waits in its own way; PyTorch's threads spin, as those of the other engines do here.
    return openmp(job, "passive" if job.settings.get("cpu_path") == "compiled" else "active")


def serve(job: Job) -> Served:
    import torch

    from ...engine import Engine
    from ...request import Request, SamplingParams

    torch.set_num_threads(job.threads)
    options = SETTINGS | job.settings
    options.pop("omp_wait_policy", None)  # has been obeyed by the environment
    if options.get("cpu_path") == "plain":
        del options["cpu_path"]
    loading = time.perf_counter()
    engine = Engine.from_model(
        job.model,
        device="cpu",
        dtype=job.dtype,
        max_model_len=longest(job.warm_up + job.requests),
        **options,
    )
    load_s = time.perf_counter() - loading

    def run(requests: Sequence[JobRequest]):
        return engine.run(
            [
                Request(r.id, r.prompt, SamplingParams(max_tokens=r.output_tokens, ignore_eos=True), r.arrival_s)
                for r in requests
            ]
        )

    if job.warm_up:
        run(job.warm_up)
    timeline = run(job.requests)
    records = timeline.requests
    facts = {
        "versions": versions("torch"),
        "settings": options | {"threads": torch.get_num_threads()},
        "load_s": load_s,
        "hashes": {name: record.output_hash for name, record in records.items()},
        "steps": [
            [s.num_computed_tokens, len(s.rows), sum(row.context for row in s.rows), s.duration] for s in timeline.steps
        ],
        "header": timeline.header,
    }
    return Served({name: (r.output_token_ids, r.token_times) for name, r in records.items()}, facts)
