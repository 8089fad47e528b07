"""Capacities side by side: the highest sustained request rate of each variant, as a dict for JSON and as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .capacity import ABOVE, BELOW, GROWTH, LEAST_SHARE, Capacity, share_text
from .errors import InvalidParameter
from .report import aligned, filled, title_of
from .report_rows import Lines, limits_text, number

SCHEMA_VERSION = 1


def capacity_comparison(
    capacities: Mapping[str, Capacity],
    *,
    objectives: Mapping[str, float] | None = None,
    class_objectives: Mapping[str, Mapping[str, float]] | None = None,
    setting: str = "",
) -> dict[str, Any]:
    """What find_capacity found for each variant, as plain data. Raises InvalidParameter where there is nothing."""
    if not capacities:
        raise InvalidParameter("a comparison of capacities needs at least one")
    headers = [capacity.header for capacity in capacities.values() if capacity.probes] or [{}]
    shared = {key: value for key, value in headers[0].items() if all(h.get(key) == value for h in headers)}
    return {
        "schema": "minibatcher.capacity",
        "schema_version": SCHEMA_VERSION,
        "clock": next(iter(capacities.values())).clock,
        "header": shared,
        "setting": setting,
        "objectives": dict(objectives or {}),
        "class_objectives": {name: dict(limits) for name, limits in (class_objectives or {}).items()},
        "share": next(iter(capacities.values())).share,
        "columns": {
            name: {key: value for key, value in asdict(capacity).items() if key not in ("clock", "header")}
            | {"sentence": capacity.sentence()}
            for name, capacity in capacities.items()
        },
    }


def capacity_table(data: dict[str, Any], *, width: int = 96) -> str:
    """Plain text, a column a variant, then every probe."""
    columns = data["columns"]
    num_requests = max((probe["ttft_ms"]["n"] for c in columns.values() for probe in c["probes"]), default=0)
    num_requests = (data["header"].get("workload") or {}).get("num_requests", num_requests)
    texts = [title_of(data["clock"], data["header"], num_requests), data["setting"], _question(data)]
    out = [filled(text, width) for text in texts if text]
    out += ["", aligned(list(columns), _lines(columns))]
    for name, column in columns.items():
        out.append(filled(f"{name}: {column['sentence']}.", width))
        out += [filled(f"{name}: {warning}.", width) for warning in column["warnings"]]
    out.append("")
    out.append("Probes, requests/s: share within the objectives (*: the queue grew)")
    for name, column in columns.items():
        probes = sorted(column["probes"], key=lambda probe: probe["request_rate"])
        told = (f"{probe['request_rate']:.3g}: {_share(probe)}{'*' * probe['queue_grows']}" for probe in probes)
        told = (text.replace(" ", "\N{NO-BREAK SPACE}") for text in told)
        out.append(textwrap.fill(f"  {name}: {', '.join(told)}", width, subsequent_indent="    "))
    return "\n".join(out)


def _question(data: dict[str, Any]) -> str:
    by_class = (f"{name} requests{limits_text(limits)}" for name, limits in data["class_objectives"].items())
    limits = "; ".join(filter(None, [limits_text(data["objectives"]).removeprefix(": "), *by_class]))
    each = ", of each class," if data["class_objectives"] else ""
    return (
        f"Sustained: at least {100 * data['share']:g} % of all requests{each} are served within {limits}, and the "
        f"queue does not grow (the last third of arrivals finds at most {GROWTH:g} times as many waiting as the middle "
        f"third, or under {100 * LEAST_SHARE:g} % of all requests)."
    )


def _lines(columns: dict[str, Any]) -> Lines:
    def at(column: dict[str, Any], rate: float | None) -> dict[str, Any] | None:
        return next((probe for probe in column["probes"] if probe["request_rate"] == rate), None)

    best = [at(column, column["request_rate"]) for column in columns.values()]
    failed = [at(column, column["failed_rate"]) for column in columns.values()]
    return [
        ("highest rate sustained, requests/s", [_rate(column) for column in columns.values()]),
        ("  within the objectives", [_share(probe) for probe in best]),
        ("  output tokens/s", [number(probe["output_tokens_per_s"], 3) if probe else "–" for probe in best]),
        ("  TTFT p99, ms", [number(probe["ttft_ms"]["p99"], 3) if probe else "–" for probe in best]),
        ("  TPOT p99, ms", [number(probe["tpot_ms"]["p99"], 3) if probe else "–" for probe in best]),
        ("lowest rate that failed", [number(probe["request_rate"], 3) if probe else "–" for probe in failed]),
        ("  failed by", [probe["failed_by"][0] if probe else "–" for probe in failed]),
        ("  within the objectives", [_share(probe) for probe in failed]),
        ("  waiting, middle → last third", [_waiting(probe) for probe in failed]),
        ("probes", [f"{len(column['probes'])}" for column in columns.values()]),
    ]


def _rate(column: dict[str, Any]) -> str:
    if column["outcome"] == BELOW:
        return f"< {number(column['low'], 3)}"
    return ("≥ " if column["outcome"] == ABOVE else "") + number(column["request_rate"], 3)


def _share(probe: dict[str, Any] | None) -> str:
    return share_text(probe["good_share"]) if probe else "–"


def _waiting(probe: dict[str, Any] | None) -> str:
    return " → ".join(number(n, 2) for n in probe["waiting"]) if probe else "–"
