"""What a decode step costs beside the model, while more and more requests wait in the queue."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..engine import Engine
from ..kv import BlockKV
from ..request import Request, SamplingParams
from ..runners.base import StepResult
from ..scheduling import SchedulerConfig, make_scheduler
from .machine import machine

NUM_SEQS, PROMPT_TOKENS, BLOCK_SIZE = 32, 32, 16
LENGTHS, ORDERINGS = (0, 100, 1_000, 10_000), ("fcfs", "priority")


class OneToken:
    """No model: each request whose tokens are all computed gets token 0, at once."""

    def run(self, plan) -> StepResult:
        return StepResult({r: 0 for r, n in plan.num_tokens.items() if n == r.num_pending_tokens})


def loaded_engine(num_waiting: int, ordering: str, steps: int, num_seqs: int = NUM_SEQS) -> Engine:
    """An engine without a model in which `num_seqs` requests decode, `steps` steps at least, and `num_waiting` wait."""
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * PROMPT_TOKENS, ordering=ordering)
    longest = PROMPT_TOKENS + steps + 2
    kv = BlockKV(num_seqs * -(-longest // BLOCK_SIZE), BLOCK_SIZE)
    engine = Engine(make_scheduler("chunked", kv, config), OneToken(), max_model_len=longest)
    params = SamplingParams(max_tokens=steps + 2, ignore_eos=True)
    prompt = [1] * PROMPT_TOKENS
    for i in range(num_seqs + num_waiting):
        # Classes alternate, but those that run are of the first: nobody is preempted.
        engine.submit(Request(f"r{i}", prompt, params, priority=0 if i < num_seqs else i % 3))
    engine.step()  # all prompts
    return engine


def step_ms(num_waiting: int, ordering: str, steps: int) -> float:
    """Median milliseconds of a decode step, all of which is scheduler, bookkeeping and the engine's loop."""
    engine = loaded_engine(num_waiting, ordering, steps)
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds) * 1e3


def calls_of_a_step(num_waiting: int, ordering: str) -> int:
    """Python functions called, and generators resumed, in one decode step: a count that is the same on every machine.

    What loops inside the interpreter's own C code is not counted.
    """
    engine, calls = loaded_engine(num_waiting, ordering, steps=4), 0

    def count(frame, event, argument) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        engine.step()
    finally:
        sys.setprofile(before)
    return calls


def growth(
    waiting: Sequence[int] = LENGTHS,
    orderings: Sequence[str] = ORDERINGS,
    *,
    steps: int = 100,
    runs: int = 3,
    progress: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """Milliseconds and calls a step for each ordering, in the order of `waiting`; medians of `runs`, taken in turn."""
    here = machine()
    taken: dict[str, list[list[float]]] = {name: [[] for _ in waiting] for name in orderings}
    for _ in range(runs):
        for name in orderings:
            for place, num_waiting in enumerate(waiting):
                taken[name][place].append(step_ms(num_waiting, name, steps))
                progress and progress()
    orders = {}
    for name in orderings:
        medians = [statistics.median(times) for times in taken[name]]
        orders[name] = {
            "step_ms": medians,
            "lowest_ms": [min(times) for times in taken[name]],
            "highest_ms": [max(times) for times in taken[name]],
            "of_first": [median / medians[0] for median in medians],
            "calls": [calls_of_a_step(num_waiting, name) for num_waiting in waiting],
        }
    provenance = here | {"num_seqs": NUM_SEQS, "steps": steps, "runs": runs}
    return {"kind": "waiting", "provenance": provenance, "waiting": list(waiting), "orderings": orders}
