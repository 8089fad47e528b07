"""What several peers need: is a package there, and the loop around an engine that is driven step by step."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence

from ..job import Clock, Job, JobRequest

Outputs = dict[str, tuple[list[int], list[float]]]


def lacks(package: str) -> bool:
    """True where this interpreter finds no such package; it is looked for, not imported."""
    return importlib.util.find_spec(package) is None


def openmp(job: Job, waiting: str) -> dict[str, str]:
    """Variables for GNU's OpenMP: the job's threads, and how one waits for another.

    waiting: unless settings["omp_wait_policy"] says otherwise, "passive" (they sleep) or "active" (they spin: quicker
    where nothing else runs, many times slower where something does).
    """
    return {"OMP_NUM_THREADS": str(job.threads), "OMP_WAIT_POLICY": job.settings.get("omp_wait_policy", waiting)}


def versions(*packages: str) -> dict[str, str]:
    return {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in packages}


def longest(requests: Iterable[JobRequest]) -> int:
    """Tokens of the longest request, prompt and output."""
    return max(len(r.prompt) + r.output_tokens for r in requests)


def replay(
    requests: Sequence[JobRequest],
    clock: Clock,
    add: Callable[[JobRequest], None],
    step: Callable[[], Iterable[tuple[str, Sequence[int]]]],
) -> Outputs:
    """Start the clock; hand each request to `add` once its time has come, and `step` while any is unfinished.

    step: one pass of the engine; returns (request id, new token ids) of each request that got some. Tokens of one step
    share its time. Raises RuntimeError for a request that gets more tokens than it asked for.
    """
    waiting = sorted(requests, key=lambda r: r.arrival_s)[::-1]
    wanted = {r.id: r.output_tokens for r in requests}
    outputs: Outputs = {r.id: ([], []) for r in requests}
    running: set[str] = set()
    clock.start()
    while waiting or running:
        if not running:
            clock.wait_until(waiting[-1].arrival_s)
        while waiting and waiting[-1].arrival_s <= clock.now():
            running.add(waiting[-1].id)
            add(waiting.pop())
        news = step()
        now = clock.now()
        for name, new in news:
            ids, times = outputs[name]
            ids.extend(new)
            times.extend([now] * len(new))
            if len(ids) >= wanted[name]:
                running.discard(name)
            if len(ids) > wanted[name]:
                raise RuntimeError(f"request {name!r} got {len(ids)} tokens and asked for {wanted[name]}")
    return outputs
