"""The computed parts of the page on speed that look inside this engine, from `minibatcher profile --json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..report_rows import number, percent
from .speed import read

STEPS = ("step-bard-plain", "step-bard-compiled", "step-110M-plain", "step-110M-compiled")
LEDGERS = ("ledger-15M", "ledger-110M")


def profile(root: Path) -> str:
    """A column for each model and path: milliseconds of each part, and its share of the step."""
    found = [read(root, name) for name in STEPS]
    heads = [f"{p['provenance']['model']['name']}, {p['provenance']['cpu_path']}" for p in found]
    lines = [f"| part | {' | '.join(heads)} |", f"| --- |{' --: |' * len(found)}"]
    for part in found[0]["parts_ms"]:
        cells = [f"{number(p['parts_ms'][part], 3)} ms, {percent(p['shares'][part])}" for p in found]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    steps = [f"**{number(p['step_ms'], 3)} ms**" for p in found]
    lines.append(f"| **a step** | {' | '.join(steps)} |")
    shares = [percent(p["scheduler_and_bookkeeping_share"]) for p in found]
    lines.append(f"| scheduler and bookkeeping together | {' | '.join(shares)} |")
    where = found[0]["provenance"]
    dtypes = ", ".join(f"{p['provenance']['model']['name']} in {p['provenance']['dtype']}" for p in found[::2])
    lines += [
        "",
        f"Measured: {where['num_seqs']} sequences, contexts of about {where['context']} tokens; {dtypes}; "
        f"{where['hardware']['device']}, {where['threads']} threads; {where['measured']['date'][:10]}.",
    ]
    return "\n".join(lines) + "\n"


def waiting(root: Path) -> str:
    """What a step costs beside its model, by the length of the queue."""
    found = read(root, "waiting")
    heads = [f"{count:,} waiting" for count in found["waiting"]]
    lines = [f"| order of service | {' | '.join(heads)} |", f"| --- |{' --: |' * len(heads)}"]
    for name, order in found["orderings"].items():
        cells = [f"{number(ms, 2)} ms, {calls:,} calls" for ms, calls in zip(order["step_ms"], order["calls"])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ledger(root: Path) -> str:
    """For each shape, each optimisation with its invariant and its gain in each kind of step."""
    lines: list[str] = []
    for name in LEDGERS:
        found = read(root, name)
        where = found["provenance"]
        cases = list(found["rows"][0]["cases"])
        lines += [
            f"**{where['model']['name']} in {where['dtype']}**, {where['threads']} threads, {where['pairs']} pairs, "
            f"medians; PyTorch's threads wait {_waiting_policy(where)}:",
            "",
            f"| trick | invariant | {' | '.join(cases)} |",
            f"| --- | --- |{' --: |' * len(cases)}",
        ]
        for row in found["rows"]:
            gains = " | ".join(_gain(row["cases"][case]) for case in cases)
            lines.append(f"| {row['name']} (on: {row['over']}) | {row['invariant']} | {gains} |")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _waiting_policy(where: dict[str, Any]) -> str:
    return {"passive": "asleep", "active": "awake"}.get(where["hardware"]["omp_wait_policy"], "as the system has it")


def _gain(case: dict[str, Any]) -> str:
    text = number(case["gain"], 3)
    return f"**{text}**" if case["lowest"] > 1 else text  # every pair says so


def start_up(root: Path) -> str:
    found = read(root, "start-up")
    lines = ["| in a fresh process | median (lowest–highest), s | goal: below, s |", "| --- | --: | --: |"]
    for name, row in found["commands"].items():
        spread = f"{number(row['lowest_s'], 2)}–{number(row['highest_s'], 2)}"
        lines.append(f"| {name} | {number(row['median_s'], 2)} ({spread}) | {row['goal_s']:g} |")
    return "\n".join(lines) + "\n"
