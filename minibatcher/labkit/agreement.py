"""What published load generators told of our server, beside its own record: written by tests/load_generator.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..report_rows import number
from .notebooks import BuildError

FILES = "chapters/measured/load-generator-*.json"
FIGURES = {
    "num_requests": "requests",
    "num_prompt_tokens": "prompt tokens",
    "num_output_tokens": "output tokens",
    "output_tokens_per_s": "output tokens/s",
    **{
        f"{name}_ms {which}": f"{name.upper()} {which}, ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for which in ("mean", "p50", "p99")
    },
}
MOST = 0.05


def agreement(root: Path) -> str:
    """For each generator its own figure, the server's of the very same run, how far apart they are, and a replay's.

    More than 5 % between the two sides of one run stands in bold. Raises BuildError where there is no report.
    """
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(root.glob(FILES))]
    if not reports:
        raise BuildError(f"there is no {FILES}; tests/load_generator.py writes it")
    heads = [f"{report['version']} | the server | apart by | a replay" for report in reports]
    lines = [f"| | {' | '.join(heads)} |"]
    lines.append(f"| --- |{' --: |' * 4 * len(reports)}")
    for name, title in FIGURES.items():
        cells = [cell for report in reports for cell in _cells(report, name)]
        if any(cell != "–" for cell in cells):
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _circumstances(reports)]) + "\n"


def _cells(report: dict[str, Any], name: str) -> list[str]:
    told = report["medians"]["generator"].get(name)
    if told is None:  # defined in another way
        return ["–"] * 4
    server, replay = (report["medians"][who][name] for who in ("server", "replay"))
    digits = (lambda value: f"{value:,.0f}") if name.startswith("num_") else (lambda value: number(value, 4))
    apart = f"{told / server - 1:+.1%}"
    return [digits(told), digits(server), f"**{apart}**" if abs(told / server - 1) > MOST else apart, digits(replay)]


def _circumstances(reports: list[dict[str, Any]]) -> str:
    told = []
    for report in reports:
        workload, when = report["workload"], report["measured"]["date"][:10]
        told.append(
            f"{report['version']}: model {report['model']}, {workload['num_requests']} requests of "
            f"{workload['name']} at {number(report['request_rate'], 3)} a second, {len(report['rounds'])} rounds, "
            f"medians, {when}"
        )
    return f"**Measured**: {'; '.join(told)}. More than {MOST:.0%} apart stands in bold."
