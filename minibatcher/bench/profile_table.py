"""Results of `minibatcher profile` as plain text: one table for each kind."""

from __future__ import annotations

from typing import Any

from ..report import aligned, filled
from .parts import WHAT
from .table import number

WIDTH = 100


def text(data: dict[str, Any]) -> str:
    """The table with a title above and notes below. data: of profile, growth, ledger or start_up."""
    lines = {"profile": _profile, "waiting": _waiting, "ledger": _ledger, "start-up": _start_up}[data["kind"]](data)
    return "\n".join(lines)


def _title(data: dict[str, Any], what: str) -> str:
    machine = data["provenance"]["hardware"]
    return filled(f"MEASURED on {machine['device']}, {_count(machine['threads'], 'thread')}: {what}", WIDTH)


def _profile(data: dict[str, Any]) -> list[str]:
    facts, overhead = data["provenance"], data["overhead"]
    what = (
        f"a decode step of {facts['num_seqs']} sequences, context about {facts['context']}, {_model(facts)}, "
        f"{facts['cpu_path']} path"
    )
    rows = [(f"  {part}", [number(ms), f"{data['shares'][part] * 100:.1f} %"]) for part, ms in data["parts_ms"].items()]
    rows.append(("step", [number(data["step_ms"]), "100.0 %"]))
    return [
        _title(data, what),
        "",
        aligned(["ms", "of the step"], rows),
        "",
        f"scheduler + bookkeeping: {data['scheduler_and_bookkeeping_share'] * 100:.1f} % of the step",
        filled(
            f"Mean of the middle half of {data['num_steps']} steps. Watching costs: a median step takes "
            f"{number(overhead['median_ms_with'])} ms with it and {number(overhead['median_ms_without'])} ms without, "
            f"{overhead['ratio']:.2f} times as long; what is watched most often bears most of it.",
            WIDTH,
        ),
        *(filled(f"{part}: {what}.", WIDTH) for part, what in WHAT.items()),
    ]


def _waiting(data: dict[str, Any]) -> list[str]:
    facts, rows = data["provenance"], []
    for name, order in data["orderings"].items():
        ranges = [f"{number(a)}–{number(b)}" for a, b in zip(order["lowest_ms"], order["highest_ms"])]
        rows += [
            (f"{name}: ms", [number(ms) for ms in order["step_ms"]]),
            ("  lowest–highest", ranges),
            ("  of the first", [number(ratio) for ratio in order["of_first"]]),
            ("  calls of functions", [f"{calls:,}" for calls in order["calls"]]),
        ]
    what = (
        f"a step in which {facts['num_seqs']} sequences decode and others wait, without a model: scheduler, "
        f"bookkeeping and the engine's loop; medians of {_count(facts['runs'], 'run')} of {facts['steps']} steps"
    )
    return [_title(data, what), "", aligned([f"{waiting:,} waiting" for waiting in data["waiting"]], rows)]


def _ledger(data: dict[str, Any]) -> list[str]:
    facts, rows = data["provenance"], []
    cases = list(data["rows"][0]["cases"]) if data["rows"] else []
    for row in data["rows"]:
        found = [row["cases"][case] for case in cases]
        rows += [
            (row["name"], [f"{case['gain']:.2f}" for case in found]),
            (f"  on: {row['over']}", [f"{case['lowest']:.2f}–{case['highest']:.2f}" for case in found]),
            ("  ms with it", [number(case["with_ms"]) for case in found]),
        ]
    what = (
        f"time of a step without an optimisation over that with it, {_model(facts)}; median and "
        f"lowest–highest of {facts['pairs']} pairs"
    )
    return [
        _title(data, what),
        "",
        aligned(cases, rows) if rows else "Nothing of it can be measured here.",
        "",
        "What stays equal:",
        *(filled(f"{row['name']}: {row['invariant']}.", WIDTH) for row in data["rows"]),
        *(filled(f"Not measured: {name}: {why}.", WIDTH) for name, why in data["missing"].items()),
    ]


def _start_up(data: dict[str, Any]) -> list[str]:
    rows = [
        (
            name,
            [
                number(found["median_s"]),
                f"{number(found['lowest_s'])}–{number(found['highest_s'])}",
                f"{found['goal_s']:g}",
                "yes" if found["met"] else "NO",
            ],
        )
        for name, found in data["commands"].items()
    ]
    what = f"seconds from the start of a process to its end, {_count(data['provenance']['runs'], 'run')}"
    return [_title(data, what), "", aligned(["median", "lowest–highest", "goal: below", "met"], rows)]


def _model(facts: dict[str, Any]) -> str:
    model = facts["model"]
    return f"{model['name']} ({model['num_parameters'] / 1e6:,.1f}M parameters, {model['weights']}) in {facts['dtype']}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"
