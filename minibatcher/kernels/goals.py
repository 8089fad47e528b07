"""What the kernels are meant to reach on an H200, and what was measured. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Goal:
    """`value`: the share that a report's rows show, None where they don't. `least`: the share that is meant."""

    name: str
    text: str
    least: float
    value: Callable[[Rows], float | None]


def _least(rows: Iterable[dict[str, Any]], key: str) -> float | None:
    return min((row[key] for row in rows if key in row), default=None)


def _decode(rows: Rows) -> float | None:
    many = (r for r in rows if r.get("kind") == "decode" and r["num_requests"] >= 64 and r["context"] >= 2048)
    return _least(many, "share_of_copy")


def _prefill(rows: Rows) -> float | None:
    return _least((r for r in rows if r.get("kind") == "prefill" and r["context"] >= 4096), "share_of_matrix")


def _engine(rows: Rows) -> float | None:
    shares = (r["share_of_roofline"] for r in rows if r.get("kind") == "engine" and "share_of_roofline" in r)
    return max(shares, default=None)


GOALS = (
    Goal("decode", "decode attention: of the copy bandwidth, ≥ 64 requests of ≥ 2k (the least of them)", 0.85, _decode),
    Goal("prefill", "prefill attention: of the matrix rate, head size 128, prompts of 4k", 0.50, _prefill),
    Goal("engine", "engine: of the weights + KV roofline, 64 decodes, 1B parameters (the best way)", 0.70, _engine),
)


def all_rows(report: dict[str, Any]) -> Rows:
    return [row for section in report["sections"].values() for row in section["rows"]]


def judge(report: dict[str, Any]) -> Rows:
    """A row for each goal: name, text, least, value (None: not measured), met (None: not measured)."""
    rows = [] if report.get("trial") else all_rows(report)  # a trial's sizes are not those of the goals
    found = []
    for goal in GOALS:
        value = goal.value(rows)
        met = None if value is None else value >= goal.least
        found.append({"name": goal.name, "text": goal.text, "least": goal.least, "value": value, "met": met})
    return found


def measured_reports() -> Rows:
    """The reports that stand in the package, oldest first."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")]
    return sorted(reports, key=lambda report: report["date"])


def goals_table(reports: Rows) -> str:
    """Plain text: each goal, and what each device reached."""
    lines = []
    for i, goal in enumerate(GOALS):
        lines.append(f"{goal.text}: at least {goal.least:.0%}")
        judged = [(report, judge(report)[i]) for report in reports]
        shown = [
            f"    {report['hardware']['device']}, {report['date'][:10]}: {row['value']:.0%}, "
            + ("met" if row["met"] else "not met")
            for report, row in judged
            if row["value"] is not None
        ]
        lines += shown or ["    not measured yet"]
    return "\n".join(lines)
