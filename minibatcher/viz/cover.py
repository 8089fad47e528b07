"""The README's picture: static against continuous batching. `python -m minibatcher.viz.cover FILE.png` draws it.

Drawn by steps from a run of the bundled model with forced lengths, so that it comes out the same on every machine.
"""

from __future__ import annotations

import sys

from matplotlib.figure import Figure

from ..compare import run_comparison
from ..timeline import RowState, Timeline
from ..workload import load_workload
from .palette import PADDING
from .plots import describe, plot_slots, state_keys
from .sheet import finish

WORKLOAD, SLOTS = "longtail:prompt_mean=8,output_min=8,output_max=64,alpha=0.9", 8
HEADLINES = {
    "static": "Static batching: nobody leaves before the slowest is done",
    "chunked": "Continuous batching, with chunked prefill: whoever is done makes room in the next step",
}


def draw(timelines: dict[str, Timeline]) -> Figure:
    figure = Figure(figsize=(9.6, 4.6), layout="constrained", dpi=110)
    axes = figure.subplots(len(timelines), 1, sharex=True)
    end = max(len(timeline.steps) for timeline in timelines.values())
    for ax, (name, timeline) in zip(axes, timelines.items()):
        steps = len(timeline.steps)
        title = f"{HEADLINES[name]} ({steps} steps)"
        plot_slots(timeline, ax, x="step", title=title, legend=False, until=end)
        ax.axvspan(steps, end, color="#eeeeee", linewidth=0)
        ax.label_outer()
    kinds = [RowState.PREFILL, RowState.DECODE, RowState.FINISHED, PADDING]
    figure.legend(handles=state_keys(kinds), loc="outside lower center", ncols=4, frameon=False)
    return finish(figure, " ".join(describe(timeline) for timeline in timelines.values()))


def main(path: str) -> None:
    workload = load_workload(WORKLOAD, num_requests=40, seed=7)
    draw(run_comparison(workload, strategies=tuple(HEADLINES), max_num_seqs=SLOTS, max_model_len=128)).savefig(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
