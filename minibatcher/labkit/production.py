"""The computed part of the page on production: one workload on several engines, from what `replay --json` saved."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..metrics import COMPLETED
from ..report_rows import number
from .notebooks import BuildError

FOLDER = "chapters/measured/production"
REQUEST = ("id", "finish_reason", "output_hash")
SAME_TEXT = " as text"
METRICS = ("num_requests", "output_tokens_per_s", "ttft_ms", "itl_ms", "e2el_ms")
Report = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A column of a saved comparison. header: what holds for it; setting: a sentence on how its server was started."""

    metrics: Report
    header: Report
    measured: Report
    setting: str

    def answers(self, what: str = "output_hash") -> dict[str, str]:
        """Of requests that were served: the hash of their tokens, or of their text; of those that the server told."""
        served = [request for request in self.metrics["requests"] if request["finish_reason"] in COMPLETED]
        return {request["id"]: request[what] for request in served if request.get(what)}

    @property
    def num_served(self) -> int:
        return sum(request["finish_reason"] in COMPLETED for request in self.metrics["requests"])


def keep(report: Report) -> Report:
    """What of a report goes into the book: no address, and no times of single tokens; of a text its hash."""
    texts = {
        name: {request["request_id"]: _text_hash(request.get("output_text")) for request in timeline["requests"]}
        for name, timeline in report.get("timelines", {}).items()
    }
    strategies = {
        name: {key: run[key] for key in METRICS}
        | {
            "header": _public(run["header"]),
            "requests": [
                {key: request[key] for key in REQUEST} | {"text_hash": texts.get(name, {}).get(request["id"])}
                for request in run["requests"]
            ],
        }
        for name, run in report["strategies"].items()
    }
    same = {key: report[key] for key in ("schema", "schema_version", "clock", "setting", "measured") if key in report}
    return same | {"header": _public(report["header"]), "strategies": strategies}


def read(root: Path) -> dict[str, list[Run]]:
    """What a column is called → its runs, in the order of the files' names.

    Raises BuildError where there are none, and for runs that were simulated, cut short, or of other requests.
    """
    found: dict[str, list[Run]] = {}
    work: Report | None = None
    for path in sorted((root / FOLDER).glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["clock"] != "measured":
            raise BuildError(f"{path.name} in {FOLDER} holds no measured run; replay again")
        for name, metrics in report["strategies"].items():
            header = report["header"] | metrics["header"]
            if header.get("interrupted"):
                raise BuildError(f"{path.name} in {FOLDER} holds a run that was cut short; replay again")
            its = {key: header.get(key) for key in ("workload", "seed")}
            work = work or its
            if its != work:
                raise BuildError(f"{path.name} in {FOLDER} holds other requests than the files before it; replay again")
            found.setdefault(name, []).append(Run(metrics, header, report.get("measured", {}), report["setting"]))
    if not found:
        raise BuildError(f"{FOLDER} holds no run; replay a workload, and keep its --json there")
    return found


def measured(root: Path) -> str:
    """A row an engine, medians of its runs; what ran where; and how each server was started."""
    engines = read(root)
    first = next(iter(engines))
    lines = [
        "| engine | output tokens/s (lowest, highest) | TTFT p50 / p99, ms | ITL p50 / p99, ms | E2EL p50 / p99, ms "
        f"| served | answers as of {first} |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for name, runs in engines.items():
        speeds = [run.metrics["output_tokens_per_s"] for run in runs]
        cells = [name, f"{number(median(speeds), 3)} ({number(min(speeds), 3)}, {number(max(speeds), 3)})"]
        for metric in ("ttft_ms", "itl_ms", "e2el_ms"):
            cells.append(" / ".join(number(_middle(runs, metric, p), 3) for p in ("p50", "p99")))
        served = sum(run.num_served for run in runs)
        cells.append(f"{served:,} of {sum(run.metrics['num_requests'] for run in runs):,}")
        cells.append(_same(engines[first][0], runs[0]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _circumstances(engines), *_notes(engines)]) + "\n"


def _middle(runs: list[Run], metric: str, percentile: str) -> float | None:
    """The median over the runs; None where no answer had so many tokens."""
    values = [spread[percentile] for run in runs if (spread := run.metrics[metric])]
    return median(values) if values else None


def _same(first: Run, other: Run) -> str:
    """How many answers two runs have in common, of those that both have; as text where a server tells no tokens."""
    for what, how in (("output_hash", ""), ("text_hash", SAME_TEXT)):
        mine, its = first.answers(what), other.answers(what)
        both = mine.keys() & its.keys()
        if both:
            return f"{sum(mine[name] == its[name] for name in both):,} of {len(both):,}{how}"
    return "–"


def _text_hash(text: str | None) -> str | None:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16] if text else None


def _circumstances(engines: dict[str, list[Run]]) -> str:
    runs = [run for of_engine in engines.values() for run in of_engine]
    header, workload = runs[0].header, runs[0].header["workload"]
    rounds = sorted({len(of_engine) for of_engine in engines.values()})
    each = "one run" if rounds == [1] else f"medians of {' to '.join(map(str, rounds))} runs"
    processors = {run.measured.get("num_cpus") for run in runs} - {None}
    facts = [
        f"{each} of each",
        ", ".join(dict.fromkeys(f"model {model}" for run in runs if (model := run.header.get("model")))),
        f"{runs[0].metrics['num_requests']} requests of the workload {workload['name']}, seed {header['seed']}",
        *(f"{count} processors" for count in processors),
        ", ".join(dict.fromkeys(version for run in runs if (version := _version(run.header)))),
        " and ".join(sorted({run.measured["date"][:10] for run in runs if "date" in run.measured})),
    ]
    return f"**Measured** by the client: {'; '.join(filter(None, facts))}."


def _notes(engines: dict[str, list[Run]]) -> list[str]:
    """How servers were started, and what the client had to say of each."""
    told = dict.fromkeys(run.setting for runs in engines.values() for run in runs if run.setting)
    for name, runs in engines.items():
        told |= dict.fromkeys(f"{name}: {note}." for run in runs for note in run.header.get("client_notes") or ())
    return ["", *(f"- {sentence}" for sentence in told)] if told else []


def _version(header: Report) -> str:
    server = header.get("server") or {}
    return f"{server['owned_by']} {server['version']}" if {"owned_by", "version"} <= server.keys() else ""


def _public(header: Report) -> Report:
    return {key: value for key, value in header.items() if key != "base_url"}
