"""The README's table of measured runs, from what `minibatcher compare --json` wrote (`make measured`).

A table says what was measured, on what and when; so nothing of it is typed in, and it looks like no simulated one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from ..report_rows import number, percent
from .notebooks import BuildError

FOLDER = "chapters/measured"
Figure = Callable[[dict[str, Any]], float]


def comparison(root: Path) -> str:
    """A row a strategy, medians of all runs; where the fastest one loses; and what was measured where.

    Raises BuildError for no runs, simulated ones, and runs of different work or on different machines.
    """
    runs = read_runs(root / FOLDER)
    names = list(runs[0]["strategies"])
    lines = [
        "| strategy | output tokens/s (lowest, highest) | TTFT p50 / p99, s | ITL p99, ms | slots doing useful work |",
        "| --- | --: | --: | --: | --: |",
    ]
    for name in names:
        speeds = [run["strategies"][name]["output_tokens_per_s"] for run in runs]
        speed = f"{number(median(speeds), 3)} ({number(min(speeds), 3)}, {number(max(speeds), 3)})"
        ttft = " / ".join(number(middle(runs, name, p) / 1000, 3) for p in (_ttft("p50"), _ttft("p99")))
        useful = percent(middle(runs, name, lambda run: run["slot_occupancy"]))
        lines.append(f"| {name} | {speed} | {ttft} | {number(middle(runs, name, _itl), 3)} | {useful} |")
    return "\n".join([*lines, "", _where_it_loses(runs, names), "", _provenance(runs)]) + "\n"


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """The saved comparisons of a folder, which must be repetitions of one. Raises BuildError."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("comparison-*.json"))]
    if not runs:
        raise BuildError(f"{folder} holds no comparison-1.json; measure with: make measured")
    for run in runs:
        if run["clock"] != "measured" or "measured" not in run:
            raise BuildError(f"{folder} holds a run that was not measured by compare --json; measure: make measured")
        if run["header"] != runs[0]["header"] or list(run["strategies"]) != list(runs[0]["strategies"]):
            raise BuildError(f"the runs in {folder} differ in more than time; measure all again: make measured")
        if not run["answers_identical"]:
            raise BuildError(f"the strategies of a run in {folder} gave different answers; find out why")
    return runs


def middle(runs: list[dict[str, Any]], name: str, figure: Figure) -> float:
    """The median over the runs of a strategy's figure."""
    return median(figure(run["strategies"][name]) for run in runs)


def _ttft(percentile: str) -> Figure:
    return lambda run: run["ttft_ms"][percentile]


def _itl(run: dict[str, Any]) -> float:
    return run["itl_ms"]["p99"]


def _where_it_loses(runs: list[dict[str, Any]], names: list[str]) -> str:
    fastest = max(names, key=lambda name: middle(runs, name, lambda run: run["output_tokens_per_s"]))
    smoothest = min(names, key=lambda name: middle(runs, name, _itl))
    if fastest == smoothest:
        return f"Here **{fastest}** is the fastest and has the shortest pauses between tokens, too."
    ratio = middle(runs, fastest, _itl) / middle(runs, smoothest, _itl)
    return (
        f"The fastest, **{fastest}**, has its price: the pauses between two tokens of an answer. One in a hundred is "
        f"{number(ratio, 2)} times as long as with **{smoothest}**."
    )


def _provenance(runs: list[dict[str, Any]]) -> str:
    header, software = runs[0]["header"], runs[0]["header"]["software"]
    when = [run["measured"] for run in runs]
    requests = max(run["num_requests"] for run in runs[0]["strategies"].values())
    slots = max(run["header"].get("max_num_seqs") or header["max_num_seqs"] for run in runs[0]["strategies"].values())
    device = header["hardware"]
    facts = [
        f"{len(runs)} runs of `minibatcher compare --strategies {' '.join(runs[0]['strategies'])}`, medians",
        f"{requests} requests of the workload {header['workload']['name']}, all there at once",
        f"{slots} slots",
        f"model {header['model']} ({header['model_fingerprint']}), {header['dtype']}, attention {header['attention']}",
        f"seed {header['seed']}",
        device["device"] + (f" (threads: {device['threads']})" if "threads" in device else ""),
        f"minibatcher {software['minibatcher']}, PyTorch {software['torch']}, Python {software['python']}, "
        f"{software['system']}",
        " and ".join(dict.fromkeys(f"{one['date'][:10]}" for one in when)),
        "commit " + " and ".join(dict.fromkeys(str(one["git_commit"])[:10] for one in when)),
    ]
    return f"**Measured** (wall clock): {'; '.join(facts)}.{_busy(when)}"


def _busy(when: list[dict[str, Any]]) -> str:
    loads, cpus = [one["load_average"] for one in when], when[0]["num_cpus"]
    if None in loads or not cpus or max(loads) <= 0.5 * cpus:
        return ""
    load = f"{number(min(loads), 2)} to {number(max(loads), 2)}"
    return f" The machine was busy with other work, load {load} on {cpus} processors: trust the order, not the figures."
