"""Where the time of a decode step goes, in a real engine that is watched part by part."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..build import EngineOptions, build_engine
from ..engine import Engine
from ..errors import InvalidParameter
from ..model.loader import load_model
from ..request import Request, SamplingParams
from .load import prepare_model, usable_cpus
from .machine import machine
from .parts import BOOKKEEPING, PARTS, REST, SCHEDULER, watch_engine, watch_runner
from .stopwatch import Stopwatch

PROMPT_STEPS = 8  # that all prompts take; the first ones decode meanwhile
SKIPPED = 3  # first steps in which everybody decodes: caches fill
FEWEST_STEPS = 20  # so that some are left


def profile(
    model: str = "bard",
    *,
    dtype: str = "float32",
    threads: int | None = None,
    num_seqs: int = 32,
    context: int = 128,
    cpu_path: str | None = None,
    steps: int = 100,
    runs: int = 3,
    progress: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """Time of a step in which `num_seqs` requests decode, by part: kind, provenance, and what `results` gives.

    model: as load.prepare_model takes it. cpu_path: None is the engine's own choice. context: tokens of a request in
    the middle of the run. steps: decodes in a run. runs: so many with wrappers and as many without, in turn. progress:
    called after each. Raises MinibatcherError for what is wrong with the model or the options.
    """
    prompt_tokens = context - steps // 2
    if prompt_tokens < 1 or steps < FEWEST_STEPS:
        raise InvalidParameter(
            f"a context of {context} tokens in the middle of {steps} steps can't be; take at least {FEWEST_STEPS} "
            f"steps, and a context above {steps // 2}"
        )
    folder = Path(tempfile.mkdtemp(prefix="minibatcher-profile-"))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or usable_cpus())
        facts = prepare_model(model, folder / "model")
        longest = prompt_tokens + steps + 1
        if longest > facts["context"]:
            raise InvalidParameter(f"{longest} tokens a request are above the model's context, {facts['context']}")
        here = machine()
        engine = build_engine(
            load_model(str(folder / "model"), device=torch.device("cpu"), dtype=dtype),
            strategy="chunked",
            cpu_path=cpu_path or EngineOptions.cpu_path,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs + -(-num_seqs * prompt_tokens // PROMPT_STEPS),
            max_model_len=longest,
        )
        run(engine, num_seqs, prompt_tokens, FEWEST_STEPS)  # warm-up
        unwatched, laps = [], []
        for _ in range(runs):
            unwatched += run(engine, num_seqs, prompt_tokens, steps)
            progress and progress()
            laps += watched(engine, num_seqs, prompt_tokens, steps)
            progress and progress()
        provenance = here | {
            "model": facts,
            "dtype": dtype,
            "threads": torch.get_num_threads(),
            "cpu_path": engine.timeline.header["cpu_path"],
            "num_seqs": num_seqs,
            "context": context,
            "steps": steps,
            "runs": runs,
        }
        return {"kind": "profile", "provenance": provenance} | results(laps, unwatched)
    finally:
        torch.set_num_threads(before)
        shutil.rmtree(folder, ignore_errors=True)


def results(laps: list[dict[str, float]], unwatched: list[float]) -> dict[str, Any]:
    """Seconds of steps, by part and in all, as milliseconds of a typical step: the mean of the middle half of laps.

    A mean, since then parts add up; of the middle half by total, since other programs lengthen some steps.
    """
    laps = sorted(laps, key=lambda lap: sum(lap.values()))
    middle = laps[len(laps) // 4 : len(laps) - len(laps) // 4]
    parts = {part: statistics.fmean(lap.get(part, 0.0) for lap in middle) * 1e3 for part in PARTS}
    step = sum(parts.values())
    with_ms = statistics.median(sum(lap.values()) for lap in laps) * 1e3
    without_ms = statistics.median(unwatched) * 1e3
    return {
        "num_steps": len(laps),
        "step_ms": step,
        "parts_ms": parts,
        "shares": {part: value / step for part, value in parts.items()},
        "scheduler_and_bookkeeping_share": (parts[SCHEDULER] + parts[BOOKKEEPING]) / step,
        "overhead": {
            "median_ms_with": with_ms,
            "median_ms_without": without_ms,
            "ratio": with_ms / without_ms,
        },
    }


def requests(engine: Engine, num_seqs: int, prompt_tokens: int, steps: int) -> list[Request]:
    """All there at once, none ends early; their prompts differ, so that no cache of prefixes may profit."""
    vocab = engine.vocab_size or 2
    prompts = [[(7 * i + 3 * j) % (vocab - 1) + 1 for j in range(prompt_tokens)] for i in range(num_seqs)]
    params = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
    return [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]


def run(engine: Engine, num_seqs: int, prompt_tokens: int, steps: int) -> list[float]:
    """Seconds of each pure decode step, from the end of the one before to its own."""
    watch = Stopwatch(REST)
    try:
        laps = _laps(engine, watch, requests(engine, num_seqs, prompt_tokens, steps))
    finally:
        watch.restore()
    return [sum(lap.values()) for lap in laps]


def watched(engine: Engine, num_seqs: int, prompt_tokens: int, steps: int) -> list[dict[str, float]]:
    """The same, by part."""
    watch = Stopwatch(REST)
    try:
        watch_engine(engine, watch)
        watch_runner(engine, watch)
        return _laps(engine, watch, requests(engine, num_seqs, prompt_tokens, steps))
    finally:
        watch.restore()


def _laps(engine: Engine, watch: Stopwatch, todo: list[Request]) -> list[dict[str, float]]:
    step = engine._step

    def lap():
        done = step()
        if done is not None:
            watch.lap()
        return done

    watch.replace(engine, "_step", lap)
    timeline = engine.run(todo)
    if timeline.header.get("interrupted"):  # to the engine that is the end of a run; here it is the end of all
        raise KeyboardInterrupt
    decodes = [
        lap
        for lap, record in zip(watch.laps, timeline.steps, strict=True)
        if len(record.rows) == len(todo) == record.num_computed_tokens and not record.finished
    ]
    return decodes[SKIPPED:]
