"""One step under the roof of a machine, for any batch, context and chunk of prefill that the reader sets.

`roofline_numbers.js` computes what `claims.step_intensity` does, so that the picture moves without a kernel.
Source: Williams et al., «Roofline: An Insightful Visual Performance Model for Multicore Architectures», CACM 2009.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..claims.common import machine
from ..claims.intensity import BATCH_SIZES, Intensity, step_intensity
from ..errors import InvalidParameter
from ..hardware import BYTES, device
from ..runners.roofline import CostModel, StepWork
from .interactive import Interactive
from .palette import OKABE_ITO
from .roofline import KINDS
from .sheet import (
    alt_of,
    clipped,
    counted,
    finish,
    headline,
    legend_below,
    new_sheet,
    panel_title,
    plain,
    scale,
    short,
    si,
    tick_values,
    tidy,
)

MACHINES = (  # model, device, number of devices
    ("llama-3.1-70b", "h100", 4),
    ("llama-3.1-8b", "h100", 1),
    ("llama-3.1-8b", "rtx-4090", 1),
    ("llama-2-13b", "a100-80", 1),
    ("llama-2-7b", "l4", 1),
    ("qwen2.5-0.5b", "t4", 1),
)
MAX_DECODES, MAX_PREFILL = BATCH_SIZES[-1], 4_096


def roofline_view(
    cost: CostModel | None = None,
    *,
    num_decodes: int = 1,
    context_tokens: int = 1_000,
    prefill_tokens: int = 0,
) -> Interactive:
    """A step as a point under the roof of its machine, and its output tokens/s against the batch size.

    The reader sets what the step holds: decodes (the batch size), tokens in each one's cache, prefill tokens beside
    them; and chooses another machine and model of the shipped tables. Seconds are the cost model's. cost: what is shown
    first, the reader's measured machine say; None is a 70B model on four H100.
    Its widget's `state` has machine (its position in the choice), num_decodes, context_tokens, prefill_tokens.
    Raises InvalidParameter.
    """
    shipped = [_shipped(*names) for names in MACHINES]
    cost = shipped[0] if cost is None else cost
    if not isinstance(cost, CostModel):
        raise InvalidParameter(f"cost must be a CostModel (claims.machine() makes one), not {cost!r}")
    longest = cost.model.max_position_embeddings
    for name, value, low, high in (
        ("num_decodes", num_decodes, 1, MAX_DECODES),
        ("context_tokens", context_tokens, 1, longest),
        ("prefill_tokens", prefill_tokens, 0, MAX_PREFILL),
    ):
        if type(value) is not int or not low <= value <= high:
            raise InvalidParameter(f"{name} must be a whole number from {low:,} to {high:,}, not {value!r}")
    machines = shipped if cost in shipped else [cost, *shipped]
    start = {"num_decodes": num_decodes, "context_tokens": context_tokens, "prefill_tokens": prefill_tokens}
    data = {
        "machines": [_figures(each) for each in machines],
        "machine": machines.index(cost),
        "start": start,
        "max_decodes": MAX_DECODES,
        "max_prefill": MAX_PREFILL,
        "trail": BATCH_SIZES,
        "colours": {
            "decode": KINDS["decode"][0],
            "mixed": KINDS["mixed"][0],
            "compute": KINDS["prefill"][0],
            "alarm": OKABE_ITO["vermillion"],
        },
    }
    still = _still(cost, **start)
    return Interactive("roofline", data, {}, still=still, alt=alt_of(still), text=_text(cost, **start))


def max_batch(cost: CostModel, context_tokens: int, prefill_tokens: int = 0) -> int:
    """Sequences with so many tokens in the cache that fit the memory, beside a prompt's tokens."""
    return max(0, cost.kv_capacity_tokens - prefill_tokens) // context_tokens


def turning_batch(cost: CostModel, context_tokens: int, prefill_tokens: int = 0) -> int | None:
    """The smallest batch up to MAX_DECODES that lies on the other side of the ridge than a batch of one does."""
    steps = (
        step_intensity(cost, num_decodes=b, context_tokens=context_tokens, prefill_tokens=prefill_tokens)
        for b in range(1, MAX_DECODES + 1)
    )
    first = next(steps).compute_bound
    return next((step.num_decodes for step in steps if step.compute_bound is not first), None)


def _shipped(model: str, device_name: str, num_gpus: int) -> CostModel:
    dtype = "bfloat16" if "bfloat16" in device(device_name).flops else "float16"
    return machine(model, device_name, num_gpus, dtype=dtype)


def _name(cost: CostModel) -> str:
    devices = f"{cost.num_gpus} × {cost.device.name}" if cost.num_gpus > 1 else cost.device.name
    return f"{cost.model.name} on {devices}, {cost.dtype}{', as measured' if cost.device.measured else ''}"


def _figures(cost: CostModel) -> dict[str, Any]:
    """A machine and model as numbers, bandwidth and rate those of all devices together."""
    model, n = cost.model, cost.num_gpus

    def all_reduce(num_tokens: int) -> float:
        return cost.terms(StepWork(num_tokens, 0, 0, 0, 0, 0))["all_reduce"]

    return {
        "name": _name(cost),
        "bandwidth": cost.device.bandwidth * n,
        "rate": cost.device.rate(cost.dtype) * n,
        "bytes": BYTES[cost.dtype],
        "layers": model.num_layers,
        "layer_parameters": model.num_layers * model.layer_matrix_parameters,
        "head_parameters": model.head_parameters,
        "attention_flops": model.attention_flops(1),
        "kv_bytes": model.kv_bytes_per_token(cost.dtype),
        "kv_copies": max(1, n // model.num_kv_heads),  # with more devices than key/value heads
        "all_reduce": [all_reduce(0), all_reduce(1) - all_reduce(0)],  # seconds: fixed, a token
        "capacity": cost.kv_capacity_tokens,
        "max_context": model.max_position_embeddings,
        "efficiency": asdict(cost.efficiency),
        "switched_off": cost.switched_off,
    }


def _sentences(cost: CostModel, num_decodes: int, context_tokens: int, prefill_tokens: int) -> list[str]:
    """What one step is, what it brings, and what the memory holds; roofline_numbers.js says the same."""
    step = step_intensity(cost, num_decodes=num_decodes, context_tokens=context_tokens, prefill_tokens=prefill_tokens)
    bandwidth, rate = cost.device.bandwidth * cost.num_gpus, cost.device.rate(cost.dtype) * cost.num_gpus
    beside = f" beside {counted(prefill_tokens, 'prefill token')}" if prefill_tokens else ""
    side = "above" if step.compute_bound else "below"
    first = (
        f"A step of {counted(num_decodes, 'decode')} with {counted(context_tokens, 'cached token')} each{beside} reads "
        f"{si(step.bytes_read, 'B')} and computes {si(step.flops, 'FLOP')}: {short(step.intensity)} FLOPs per byte, "
        f"{side} the ridge of {short(step.ridge)}. At the machine's peak, reading takes "
        f"{_seconds(step.bytes_read / bandwidth)} and arithmetic {_seconds(step.flops / rate)}: the step is "
        f"{_bound(step)}."
    )
    second = (
        f"By the cost model it takes {_seconds(step.seconds)} and brings {short(step.tokens_per_s)} output tokens/s, "
        f"at {_percent(step.flops / step.seconds / min(rate, bandwidth * step.intensity))} of the roof above it."
    )
    fit = max_batch(cost, context_tokens, prefill_tokens)
    third = (
        f"The memory holds {counted(fit, 'such sequence')}{'' if num_decodes <= fit else ': this batch does not fit'}."
    )
    turn = turning_batch(cost, context_tokens, prefill_tokens)
    if turn is None:
        fourth = f"Batches from 1 to {MAX_DECODES:,} are all {_bound(step)}."
    else:
        beyond = step_intensity(cost, num_decodes=turn, context_tokens=context_tokens, prefill_tokens=prefill_tokens)
        fourth = f"From a batch of {turn:,} on, such a step is {_bound(beyond)}."
    return [first, second, third, fourth]


def _text(cost: CostModel, num_decodes: int, context_tokens: int, prefill_tokens: int) -> str:
    """The same in letters: the sentences, and a line a batch size."""
    fit = max_batch(cost, context_tokens, prefill_tokens)
    lines = [
        f"{_name(cost)}",
        *_sentences(cost, num_decodes, context_tokens, prefill_tokens),
        "",
        f"{'batch':>6} {'read':>10} {'computed':>12} {'FLOPs/byte':>11} {'a step':>10} {'tokens/s':>10}",
    ]
    for size in sorted({*BATCH_SIZES, num_decodes}):
        step = step_intensity(cost, num_decodes=size, context_tokens=context_tokens, prefill_tokens=prefill_tokens)
        fits = "" if size <= fit else ", does not fit"
        lines.append(
            f"{size:>6,} {si(step.bytes_read, 'B'):>10} {si(step.flops, 'FLOP'):>12} {short(step.intensity):>11} "
            f"{_seconds(step.seconds):>10} {short(step.tokens_per_s):>10}  {_bound(step)}{fits}"
        )
    return "\n".join(lines)


def _still(cost: CostModel, num_decodes: int, context_tokens: int, prefill_tokens: int) -> Figure:
    """The picture at rest: the roof with the path of batches 1, 2, 4, … under it, and tokens/s against the batch."""
    sizes = sorted({*BATCH_SIZES, num_decodes})
    steps = {
        size: step_intensity(cost, num_decodes=size, context_tokens=context_tokens, prefill_tokens=prefill_tokens)
        for size in sizes
    }
    fit = max_batch(cost, context_tokens, prefill_tokens)
    kind = "mixed" if prefill_tokens else "decode"
    figure = new_sheet(4.8)
    left, right = figure.subplots(1, 2, width_ratios=[5, 4])
    _draw_roof(left, cost, steps, num_decodes, fit, kind)
    _draw_rates(right, steps, num_decodes, fit, kind)
    turn = turning_batch(cost, context_tokens, prefill_tokens)
    if turn is not None:
        right.axvline(turn, color="#999999", linestyle=":", linewidth=1)
        side = {"ha": "right", "x": turn / 1.08} if turn > 32 else {"ha": "left", "x": turn * 1.08}
        right.text(y=0.03, s=f"ridge: {turn:,}", transform=right.get_xaxis_transform(), fontsize="small", **side)
    beside = f", {counted(prefill_tokens, 'prefill token')} beside them" if prefill_tokens else ""
    headline(figure, f"{clipped(_name(cost), 80)}\n{counted(context_tokens, 'cached token')} a decode{beside}")
    legend_below(figure, left.get_legend_handles_labels()[0])
    words = " ".join(_sentences(cost, num_decodes, context_tokens, prefill_tokens))
    return finish(figure, f"Roofline of {_name(cost)}, and output tokens per second against batch size. {words}")


def _draw_roof(ax: Axes, cost: CostModel, steps: dict[int, Intensity], now: int, fit: int, kind: str) -> None:
    rate, bandwidth = cost.device.rate(cost.dtype) * cost.num_gpus, cost.device.bandwidth * cost.num_gpus
    ridge, unit = rate / bandwidth, 1e12 if rate >= 1e12 else 1e9
    points = np.array([(step.intensity, step.flops / step.seconds / unit) for step in steps.values()])
    bounds = (min(points[:, 0].min() / 2, ridge / 8), max(points[:, 0].max() * 2, ridge * 8))
    x = np.array([bounds[0], ridge, bounds[1]])
    ax.plot(x, np.minimum(bandwidth * x, rate) / unit, color="black", linewidth=1.6)
    ax.axvline(ridge, color="#999999", linestyle=":", linewidth=1)
    _draw_path(ax, list(steps), points, now, fit, kind)
    low, high = points[:, 1].min() / 2, rate / unit * 4
    tidy(ax)
    ax.set(xlim=bounds, ylim=(low, high))
    scale(ax, "x", bounds)
    scale(ax, "y", (low, high))
    ax.set_xlabel("arithmetic intensity, FLOPs per byte read")
    ax.set_ylabel(f"rate by the cost model, {'TFLOP/s' if unit == 1e12 else 'GFLOP/s'}")
    above = ax.get_xaxis_transform()
    ax.text(ridge / 1.1, 0.98, "bandwidth-bound", transform=above, ha="right", va="top", fontsize="small")
    ax.text(ridge * 1.1, 0.98, "compute-bound", transform=above, ha="left", va="top", fontsize="small")
    panel_title(ax, f"Ridge at {short(ridge)} FLOPs per byte; this step: {short(steps[now].intensity)}")


def _draw_rates(ax: Axes, steps: dict[int, Intensity], now: int, fit: int, kind: str) -> None:
    points = np.array([(size, step.tokens_per_s) for size, step in steps.items()])
    _draw_path(ax, list(steps), points, now, fit, kind)
    tidy(ax)
    ax.set_xscale("log", base=2)
    scale(ax, "y", points[:, 1], ratio=8)
    ax.set_xlim(0.8, MAX_DECODES * 1.25)
    tick_values(ax, BATCH_SIZES, inches=3.6)
    ax.set_xlabel("batch size, decodes in a step")
    ax.set_ylabel("output rate by the cost model, tokens/s")
    panel_title(ax, f"Batch size {plain(now)}: {short(steps[now].tokens_per_s)} tokens/s")


def _draw_path(ax: Axes, sizes: list[int], points: np.ndarray, now: int, fit: int, kind: str) -> None:
    """Batch sizes as points on a thin line: those that fit filled, the others hollow, the present one large."""
    colour, marker = KINDS[kind]
    fits = np.array(sizes) <= fit
    ax.plot(*points.T, color="#999999", linewidth=0.8)
    for chosen, face, label in ((fits, colour, "fits the memory"), (~fits, "white", "does not fit it")):
        if chosen.any():
            x, y = points[chosen].T
            ax.scatter(
                x, y, s=20, marker=marker, facecolor=face, edgecolor=colour, linewidths=1, zorder=2,
                label=f"batch size 1, 2, 4, …, {label}",
            )  # fmt: skip
    x, y = points[sizes.index(now)]
    ax.scatter(
        x, y, s=110, marker=marker, facecolor=colour if now <= fit else "white", edgecolor="black",
        linewidths=1.2, zorder=3, label=f"batch size {plain(now)}",
    )  # fmt: skip


def _bound(step: Intensity) -> str:
    return "compute-bound" if step.compute_bound else "bandwidth-bound"


def _seconds(value: float) -> str:
    return (
        f"{short(value)} s"
        if value >= 1
        else f"{short(1e3 * value)} ms"
        if value >= 1e-3
        else f"{short(1e6 * value)} µs"
    )


def _percent(share: float) -> str:
    return f"{int(100 * share + 0.5)} %"
