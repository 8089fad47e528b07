"""transformers' continuous batching: its manager runs in a thread of its own, requests go into its queue."""

from __future__ import annotations

import time
from typing import Any

from ..job import Clock, Job, JobRequest, Served
from . import transformers_generate
from ._common import Outputs, longest, versions

TITLE = "transformers continuous batching"
SETTINGS: dict[str, Any] = {
    "attn_implementation": "sdpa",  # the other one on a CPU, eager, holds all scores in memory
    "page_size": 32,
    "max_batch_tokens": 256,
    "max_requests_per_batch": 64,
}
missing, environment = transformers_generate.missing, transformers_generate.environment


def serve(job: Job) -> Served:
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = SETTINGS | job.settings
    settings.pop("omp_wait_policy", None)  # has been obeyed by the environment
    model, load_s = transformers_generate.load(job, settings.pop("attn_implementation"))
    pages = -(-longest(job.warm_up + job.requests) // settings["page_size"]) + 1
    config = ContinuousBatchingConfig(
        num_blocks=settings["max_requests_per_batch"] * pages,  # room for all at once: nobody is ever evicted
        allow_block_sharing=False,  # prompts have nothing in common
        **settings,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    loading = time.perf_counter()
    with torch.inference_mode():
        manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
        manager.start()
        try:
            load_s += time.perf_counter() - loading
            if job.warm_up:
                _run(manager, job.warm_up)
            outputs = _run(manager, job.requests)
        finally:
            manager.stop(block=True)
    facts = {
        "versions": versions("transformers", "torch"),
        "settings": settings
        | {
            "num_blocks": config.num_blocks,
            "threads": torch.get_num_threads(),
            "attention": model.config._attn_implementation,
        },
        "load_s": load_s,
    }
    return Served(outputs, facts)


def _run(manager: Any, requests: list[JobRequest]) -> Outputs:
    """Hands requests over as they arrive. The manager notes each token's time, so nobody need watch."""
    wanted = {r.id: r.output_tokens for r in requests}
    outputs: Outputs = {}
    clock = Clock()
    clock.start()
    for request in sorted(requests, key=lambda r: r.arrival_s):
        clock.wait_until(request.arrival_s)
        manager.add_request(
            request.prompt,
            request_id=request.id,
            max_new_tokens=request.output_tokens,
            record_timestamps=True,
            eos_token_id=-1,
        )
    while len(outputs) < len(requests):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching has stopped; its log says why")
        if result is None or not result.is_finished():
            continue
        ids, times = result.generated_tokens, result.timestamps or []
        if result.error or not len(ids) == len(times) == wanted[result.request_id]:
            raise RuntimeError(
                f"request {result.request_id!r} came back with {len(ids)} tokens and {len(times)} times, "
                f"{wanted[result.request_id]} expected ({result.error or 'no error told'})"
            )
        # Both clocks are the process's perf_counter.
        outputs[result.request_id] = (ids, [moment - clock.zero for moment in times])
    return outputs
