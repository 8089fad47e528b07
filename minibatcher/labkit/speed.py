"""The computed parts of the page on speed, from what `minibatcher bench` and its kin wrote (`make measured-speed`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..report_rows import number, percent
from .notebooks import BuildError

FOLDER = "chapters/measured/speed"
OURS = "minibatcher:compiled"
SHAPES = ("15M", "110M", "360M")
DTYPES = ("float32", "bfloat16")
SLOW = "-slow"
Report = dict[str, Any]


def keep(report: Report) -> Report:
    """What of a bench's report goes into the book: all but the single runs and where programs lie."""
    kept = {key: value for key, value in report.items() if key != "runs"}
    peers = {name: {"settings": peer["settings"]} for name, peer in kept["provenance"]["peers"].items()}
    versions = {run["peer"]: run["facts"].get("versions", {}) for run in report["runs"] if run.get("facts")}
    for name, found in versions.items():
        peers[name]["versions"] = found
    for peer in peers.values():
        peer["settings"].pop("server", None)
    return kept | {"provenance": kept["provenance"] | {"peers": peers}}


def read(root: Path, name: str) -> Report:
    """Raises BuildError for a report that has failures or was cut short."""
    report = json.loads((root / FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    if report.get("failures") or report.get("interrupted"):
        raise BuildError(f"{FOLDER}/{name}.json holds a run that failed or was cut short; measure again")
    return report


def _benches(root: Path, more: str = "") -> Iterator[tuple[str, Report]]:
    """(column title, report) of each shape and precision that has been measured offline.

    more: end of the names of further reports, for engines that are too slow to go round with the others.
    """
    for shape in SHAPES:
        for dtype in DTYPES:
            if (root / FOLDER / f"{shape}-{dtype}{more}.json").exists():
                yield f"{shape} {dtype}", read(root, f"{shape}-{dtype}{more}")


def ratios(root: Path) -> str:
    """How many times as many output tokens/s ours makes as each other, a column for each shape and precision."""
    return _ratios(root, OURS, "output tokens/s, compiled path / the other")


def plain_ratios(root: Path) -> str:
    """The same for PyTorch alone."""
    return _ratios(root, "minibatcher:prepacked", "output tokens/s, prepacked path / the other")


def _ratios(root: Path, ours: str, corner: str) -> str:
    benches, slow = dict(_benches(root)), dict(_benches(root, SLOW))
    titles: dict[str, str] = {}
    for report in (*benches.values(), *slow.values()):
        titles |= {name: title for name, title in report["titles"].items() if name in report["figures"]}
    lines = [f"| {corner} | {' | '.join(benches)} |", f"| --- |{' --: |' * len(benches)}"]
    for name, title in titles.items():
        if name != ours:
            cells = [_ratio(r if name in r["figures"] else slow.get(t), ours, name) for t, r in benches.items()]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ratio(report: Report | None, ours: str, other: str) -> str:
    found = (report or {"ratios": {}})["ratios"].get(ours, {}).get(other, {}).get("output_tokens_per_s")
    if not found:
        return "–"
    return f"**{number(found['median'], 3)}** ({number(found['min'], 3)}–{number(found['max'], 3)})"


def circumstances(root: Path) -> str:
    """What was run on what, how often, how quiet the machine was, and how many answers were the same."""
    reports = [*_benches(root), *_benches(root, SLOW)]
    lines = [
        "| measured | rounds | requests | other programs took at most | share of the bound | outputs equal to ours |",
        "| --- | --: | --: | --: | --: | --- |",
    ]
    for title, report in reports:
        rounds = max(len(figures["output_tokens_per_s"]["values"]) for figures in report["figures"].values())
        others = [figures["others_share"]["max"] for figures in report["figures"].values()]
        told = [value for value in others if value is not None]
        share = report["figures"][OURS].get("bound_share_of_run")
        equal = [report["titles"][n] + f" {e['equal']}" for n, e in report["outputs_equal"].items() if n != OURS]
        cells = [
            f"{title}, {report['provenance']['measured']['date'][:10]}",
            str(rounds),
            str(report["provenance"]["workload"]["num_requests"]),
            percent(max(told)) if told else "unknown",
            percent(share["median"]) if share else "unknown",
            ", ".join(equal),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    work, where = reports[0][1]["provenance"]["workload"], reports[0][1]["provenance"]
    return "\n".join(lines) + (
        f"\n\nOn {where['hardware']['device']}, {where['threads']} threads. The first row's workload has "
        f"{work['num_prompt_tokens']:,} prompt and {work['num_output_tokens']:,} output tokens.\n"
    )


def figures(root: Path) -> str:
    """What each engine did with the 110M shape in bfloat16, offline and online."""
    lines = []
    for name, what in (("110M-bfloat16", "all there at once"), ("110M-bfloat16-online", "two requests a second")):
        report = read(root, name)
        lines += [
            f"| {what} | output tokens/s | TTFT p50 / p99, ms | ITL p50 / p99, ms |",
            "| --- | --: | --: | --: |",
        ]
        for peer, found in report["figures"].items():
            cells = [number(found["output_tokens_per_s"]["median"], 3)]
            for metric in ("ttft", "itl"):
                cells.append(" / ".join(number(found[f"{metric}_{p}_ms"]["median"], 3) for p in ("p50", "p99")))
            lines.append(f"| {report['titles'][peer]} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def versions(root: Path) -> str:
    """The versions of all engines in the tables."""
    found: dict[str, str] = {}
    for _, report in (*_benches(root), *_benches(root, SLOW)):
        for name, peer in report["provenance"]["peers"].items():
            told = ", ".join(f"{package} {version}" for package, version in peer.get("versions", {}).items())
            if told:
                found[report["titles"][name]] = told
    lines = ["| engine | versions |", "| --- | --- |", *(f"| {title} | {told} |" for title, told in found.items())]
    return "\n".join(lines) + "\n"
