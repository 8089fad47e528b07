"""The roofline of a machine, and where each step of a run lies under it.

Source: Williams et al., «Roofline: An Insightful Visual Performance Model for Multicore Architectures», CACM 2009.
"""

from __future__ import annotations

from statistics import median

import numpy as np
from matplotlib.figure import Figure

from ..errors import InvalidParameter
from ..runners.roofline import CostModel
from ..timeline import RowState, StepRecord, Timeline
from ..utilisation import step_bytes, work_of
from .palette import OKABE_ITO
from .sheet import by_name, counted, finish, headline, legend_below, new_sheet, panel_title, scale, short, si, tidy

KINDS = {  # of steps: colour, marker
    "decode": (OKABE_ITO["blue"], "o"),
    "prefill": (OKABE_ITO["orange"], "^"),
    "mixed": (OKABE_ITO["bluish green"], "s"),
}

ABOVE = {  # why a step can be there, by the run's clock
    "measured": "a cache held what counts here as read from memory, or the machine was measured at less than its best",
    "simulated": "the run was simulated for another machine than this roof's",
}


def step_points(timeline: Timeline, cost: CostModel) -> dict[str, np.ndarray]:
    """Kind of step → rows of (FLOPs per byte read, FLOP/s achieved). Padding counts: the device works on it too."""
    points = {kind: [] for kind in KINDS}
    for step in timeline.steps:
        work = work_of(step, timeline.requests)
        if not work.num_tokens or step.duration <= 0:
            continue
        flops = cost.model.linear_flops(work.num_tokens, work.num_sampled)
        flops += cost.model.attention_flops(work.decode_pairs + work.prefill_pairs)
        points[_kind(step)].append((flops / step_bytes(work, cost), flops / step.duration))
    return {kind: np.array(found).reshape(-1, 2) for kind, found in points.items()}


def plot_roofline(timeline: Timeline, cost: CostModel) -> Figure:
    """The machine's two limits, memory and arithmetic, and each step's arithmetic intensity and achieved FLOP/s.

    cost: the machine and the model of the run; `CostModel(measure_device(), model_spec(folder), dtype="float32")` is
    the machine that runs this. Raises InvalidParameter.
    """
    by_name(timeline, "a roofline")
    points = step_points(timeline, cost)
    everything = np.concatenate(list(points.values()))
    if not len(everything):
        raise InvalidParameter("a roofline needs a step that computed something and took time; this run has none")
    rate, bandwidth = cost.device.rate(cost.dtype) * cost.num_gpus, cost.device.bandwidth * cost.num_gpus
    ridge = rate / bandwidth
    unit = 1e12 if rate >= 1e12 else 1e9
    left = min(everything[:, 0].min() / 2, ridge / 8)
    right = max(everything[:, 0].max() * 2, ridge * 8)

    figure = new_sheet(5.0)
    ax = figure.add_subplot()
    x = np.array([left, ridge, right])
    ax.plot(x, np.minimum(bandwidth * x, rate) / unit, color="black", linewidth=1.6)
    ax.axvline(ridge, color="#999999", linestyle=":", linewidth=1)
    for kind, found in sorted(points.items(), key=lambda pair: -len(pair[1])):  # the few on top of the many
        if len(found):
            colour, marker = KINDS[kind]
            ax.scatter(
                found[:, 0], found[:, 1] / unit, s=22, color=colour, marker=marker, alpha=0.6, linewidths=0,
                label=f"{kind}: {counted(len(found), 'step')}",
            )  # fmt: skip
    tidy(ax)
    bottom = min(everything[:, 1].min(), bandwidth * left) / 2
    top = max(everything[:, 1].max(), rate) * 4
    ax.set(xlim=(left, right), ylim=(bottom / unit, top / unit))
    scale(ax, "x", (left, right))
    scale(ax, "y", (bottom, top))
    ax.set_xlabel("arithmetic intensity, FLOPs per byte read from memory")
    ax.set_ylabel(f"achieved rate, {'TFLOP/s' if unit == 1e12 else 'GFLOP/s'}, {timeline.clock}")
    above = ax.get_xaxis_transform()
    ax.text(ridge / 1.1, 0.97, "bandwidth-bound", transform=above, ha="right", va="top")
    ax.text(ridge * 1.1, 0.97, "compute-bound", transform=above, ha="left", va="top")
    ax.text(ridge * 1.1, 0.03, f"ridge: {short(ridge)} FLOPs per byte", transform=above, ha="left", va="bottom")
    machine = f"{cost.num_gpus} × {cost.device.name}" if cost.num_gpus > 1 else cost.device.name
    whose = "as measured" if cost.device.measured else "by its data sheet"
    roof = f"Roof: {si(bandwidth, 'B/s')} and {si(rate, 'FLOP/s')} in {cost.dtype}, {whose}"
    panel_title(ax, roof)
    headline(figure, f"Steps of {cost.model.name} on {machine}, {timeline.header.get('strategy', 'a run')} batching")
    legend_below(figure, ax.get_legend_handles_labels()[0])

    beyond = int((everything[:, 1] > 1.02 * np.minimum(bandwidth * everything[:, 0], rate)).sum())
    facts = [
        f"{counted(len(found), kind + ' step')}: median {short(median(found[:, 0]))} FLOPs per "
        f"byte, {si(median(found[:, 1]), 'FLOP/s')}"
        for kind, found in points.items()
        if len(found)
    ]
    if beyond:
        facts.append(f"above the roof: {counted(beyond, 'step')}; {ABOVE[timeline.clock]}")
        panel_title(ax, f"{roof}; {counted(beyond, 'step')} above it")
    return finish(
        figure,
        f"Roofline of {machine} ({whose}): {si(bandwidth, 'B/s')}, {si(rate, 'FLOP/s')} in {cost.dtype}, ridge at "
        f"{short(ridge)} FLOPs per byte. Steps, {timeline.clock}: {'; '.join(facts)}.",
    )


def _kind(step: StepRecord) -> str:
    states = {row.state for row in step.rows if row.num_tokens}
    if RowState.PREFILL not in states:
        return "decode"
    return "mixed" if RowState.DECODE in states else "prefill"
