"""What a step of the engine consists of, and which functions are watched for which part."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..build import model_runner
from ..compiled.model import PARTS as COMPILED_PARTS
from ..compiled.model import CompiledModel
from ..engine import Engine
from .stopwatch import Stopwatch

LINEAR, ATTENTION, ELEMENTWISE, LOGITS = "linear layers", "attention", "norms, rotation, elementwise", "logits"
SAMPLING, PACKING, SCHEDULER, BOOKKEEPING = "sampling", "packing", "scheduler", "bookkeeping"
DETOKENISATION, REST = "detokenisation", "the rest of Python"
PARTS = (LINEAR, ATTENTION, ELEMENTWISE, LOGITS, SAMPLING, PACKING, SCHEDULER, BOOKKEEPING, DETOKENISATION, REST)
OF_COMPILED = dict(zip(COMPILED_PARTS, (ELEMENTWISE, LINEAR, ELEMENTWISE, ATTENTION, LOGITS)))
WHAT = {
    LINEAR: "products with weights, but for the output's",
    ATTENTION: "storing keys and values, and reading them",
    ELEMENTWISE: "embeddings, norms, rotation, activation, and the calls of layers; keys and values are stored here "
    "where the path is compiled",
    LOGITS: "the product with the output's weights; where the path is compiled, finding the best token too",
    SAMPLING: "the next token of each request",
    PACKING: "the step's arrays, built and handed over",
    SCHEDULER: "planning, checking the plan, and what it learns of the step",
    BOOKKEEPING: "the record, and each request's new token",
    DETOKENISATION: "text of the new tokens",
    REST: "the loop, and what lies between the others",
}


def watch_engine(engine: Engine, watch: Stopwatch) -> None:
    """Scheduler and bookkeeping: all of the engine's step but the runner's part of it."""
    for name in ("schedule", "computed", "update"):
        watch.wrap(engine.scheduler, name, SCHEDULER)
    watch.wrap(engine, "_begin", SCHEDULER)  # holds check_plan; the record of the plan is its own part
    for owner, name in ((engine.recorder, "launched"), (engine, "_advance"), (engine, "_complete")):
        watch.wrap(owner, name, BOOKKEEPING)
    if engine.tokenizer is not None:
        make = engine.tokenizer.detokenizer

        def detokenizer(*args, **kwargs):
            made = make(*args, **kwargs)
            watch.wrap(made, "add", DETOKENISATION)
            return made

        watch.replace(engine.tokenizer, "detokenizer", detokenizer)


def watch_runner(engine: Engine, watch: Stopwatch) -> None:
    """What the model's step consists of."""
    runner = model_runner(engine)
    watch.wrap(runner, "_launch", PACKING)
    watch.wrap(runner, "sample_from", SAMPLING)
    if runner.compiled is not None:
        _watch_compiled(runner.compiled, watch)
        return
    watch.wrap(runner, "forward", ELEMENTWISE)
    watch.wrap(runner.model, "logits", LOGITS)
    attention = runner.attention

    def ragged(*args, **kwargs):
        with watch.within(ATTENTION):
            return attention.ragged(*args, **kwargs)

    def store(*args, **kwargs):
        with watch.within(ATTENTION):
            return attention.store(*args, **kwargs)

    watch.replace(runner, "attention", replace(attention, ragged=ragged, store=store))
    for layer in runner.model.layers:
        for owner, names in ((layer.self_attn, ("qkv_proj", "o_proj")), (layer.mlp, ("gate_up_proj", "down_proj"))):
            for name in names:
                watch.wrap(getattr(owner, name), "forward", LINEAR)


def _watch_compiled(model: CompiledModel, watch: Stopwatch) -> None:
    """The library times its own parts; what is left of the call is Python's."""
    step = model.step
    seconds = torch.zeros(len(COMPILED_PARTS), dtype=torch.float64)

    def timed(*args):
        seconds.zero_()
        with watch.within(REST):
            out = step(*args)
            for part, spent in zip(COMPILED_PARTS, seconds.tolist()):
                watch.move(OF_COMPILED[part], spent)
        return out

    watch.replace(model, "seconds", seconds)
    watch.replace(model, "step", timed)
