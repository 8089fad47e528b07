"""The ledger of optimisations: each step with one and without it, in turn in one process, and what stays equal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compiled.library import SWITCHES
from ..cpu_path import why_not_compiled, why_not_prepacked
from ..errors import InvalidParameter
from ..kernels.random_model import random_model
from ..model.loader import LoadedModel
from ..model.prepacked import prepack
from .ledger_steps import CASES, Case, Step, compiled_step, one_query_row, plain_step
from .load import usable_cpus
from .machine import machine
from .models import shape_config

FEWEST_PAIRS, LEAST_S = 7, 0.02  # a measurement repeats its step until it takes so long
SAME_NUMBERS = "every logit, but for rounding where sums are taken in another order"
INVARIANTS = {
    "weights fetched ahead": "every number: only when weights are read changes",
    "keys and values fetched ahead": "every number: only when the cache is read changes",
    "chunks as matrix products": SAME_NUMBERS,
    "last layer for the newest tokens alone": "logits of the newest tokens, and all keys and values",
    "prepacked weights": SAME_NUMBERS,
    "compiled loops": SAME_NUMBERS,
    "two query rows in half precision": "attention of the one query, but for rounding; the second is its copy, unread",
}
OVER = dict.fromkeys(SWITCHES, "compiled") | {
    "prepacked weights": "prepacked, against plain",
    "compiled loops": "compiled, against prepacked",
    "two query rows in half precision": "plain",
}
Forward = Callable[[Step], Tensor]


def ledger(
    shape: str = "110M",
    *,
    dtype: str = "bfloat16",
    threads: int | None = None,
    pairs: int = FEWEST_PAIRS,
    cases: dict[str, Case] = CASES,
    progress: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """Gains of each optimisation in each case, as plain data. What can't run here is under "missing", with a sentence.

    A row has name, over (what runs it), invariant, and for each case: gain (median time without / time with of pairs),
    lowest, highest, with_ms and without_ms (medians), max_difference of logits and same_argmax (share of tokens).
    shape: one of bench.models.SHAPES. pairs: at least FEWEST_PAIRS. progress: called after each of INVARIANTS.
    Raises UnknownName, InvalidParameter.
    """
    if pairs < FEWEST_PAIRS:
        raise InvalidParameter(f"a ledger takes at least {FEWEST_PAIRS} pairs, not {pairs}")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or usable_cpus())
        here, config = machine(), shape_config(shape)
        loaded = random_model(config, shape, torch.device("cpu"), getattr(torch, dtype))
        steps = {name: Step(loaded, case) for name, case in cases.items()}
        missing = _missing(loaded)
        rows = []
        for name in INVARIANTS:
            if name not in missing:
                with_it, without = _both(name, loaded)
                row = {"name": name, "over": OVER[name], "invariant": INVARIANTS[name]}
                rows.append(
                    row | {"cases": {case: _case(with_it, without, step, pairs) for case, step in steps.items()}}
                )
            progress and progress()
        provenance = here | {
            "model": {"name": shape, "num_parameters": loaded.config.num_parameters, "weights": "random"},
            "dtype": dtype,
            "threads": torch.get_num_threads(),
            "pairs": pairs,
        }
        return {"kind": "ledger", "provenance": provenance, "rows": rows, "missing": missing}
    finally:
        torch.set_num_threads(before)


def _both(name: str, loaded: LoadedModel) -> tuple[Forward, Forward]:
    """The step with an optimisation, and without it."""
    if name in SWITCHES:
        return compiled_step(loaded), compiled_step(loaded, name)
    if name == "prepacked weights":
        return plain_step(prepack(loaded.model)), plain_step(loaded.model)
    if name == "compiled loops":
        slower = loaded.model if why_not_prepacked(loaded) else prepack(loaded.model)
        return compiled_step(loaded), plain_step(slower)
    return plain_step(loaded.model), one_query_row(plain_step(loaded.model))


def _missing(loaded: LoadedModel) -> dict[str, str]:
    """By name, why an optimisation can't be measured here."""
    found = {}
    if why := why_not_compiled(loaded):
        found |= dict.fromkeys([*SWITCHES, "compiled loops"], why)
    if why := why_not_prepacked(loaded):
        found |= {"prepacked weights": why, "compiled loops": why}
    if loaded.dtype == torch.float32:
        found["two query rows in half precision"] = "float32 is no half precision"
    elif loaded.config.num_heads != loaded.config.num_kv_heads:
        found["two query rows in half precision"] = "query heads share key heads here, so there are several rows anyway"
    return found


def _case(with_it: Forward, without: Forward, step: Step, pairs: int) -> dict[str, float]:
    with torch.inference_mode():
        a, b = with_it(step), without(step)  # warm-up, too
        repeats = max(1, round(LEAST_S / seconds(with_it, step, 2)))
        taken = []
        for index in range(pairs):
            order: Sequence[Forward] = (with_it, without) if index % 2 else (without, with_it)
            times = [seconds(forward, step, repeats) for forward in order]
            taken.append(tuple(times) if index % 2 else tuple(times[::-1]))
    return gains(taken) | {
        "max_difference": (a - b).abs().max().item(),
        "same_argmax": (a.argmax(-1) == b.argmax(-1)).float().mean().item(),
    }


def gains(taken: Sequence[tuple[float, ...]]) -> dict[str, float]:
    """Of pairs (seconds with, seconds without): how many times as long a step takes without."""
    ratios = [without / with_it for with_it, without in taken]
    return {
        "gain": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "with_ms": statistics.median(pair[0] for pair in taken) * 1e3,
        "without_ms": statistics.median(pair[1] for pair in taken) * 1e3,
    }


def seconds(forward: Forward, step: Step, repeats: int) -> float:
    """Of one step, the mean of `repeats`."""
    begun = time.perf_counter()
    for _ in range(repeats):
        forward(step)
    return (time.perf_counter() - begun) / repeats
