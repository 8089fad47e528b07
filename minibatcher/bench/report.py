"""Runs of a benchmark as results for a file, ratios first. The table of them is in table.py."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from .bound import WHAT as WHAT_BOUND
from .run import Peer

SCHEMA_VERSION = 1
BUSY = 0.05  # others' share of the processors above which a run is doubtful
FIGURES: dict[str, tuple[str, ...]] = {  # name in the results → where a run has it
    "output_tokens_per_s": ("figures", "output_tokens_per_s"),
    "total_tokens_per_s": ("figures", "total_tokens_per_s"),
    "ttft_p50_ms": ("figures", "ttft_ms", "p50"),
    "ttft_p99_ms": ("figures", "ttft_ms", "p99"),
    "itl_p50_ms": ("figures", "itl_ms", "p50"),
    "itl_p99_ms": ("figures", "itl_ms", "p99"),
    "e2el_p50_ms": ("figures", "e2el_ms", "p50"),
    "e2el_p99_ms": ("figures", "e2el_ms", "p99"),
    "load_s": ("load_s",),
    "peak_rss_bytes": ("usage", "peak_rss_bytes"),
    "others_share": ("usage", "others_share"),
    "bound_share_of_run": ("bound", "of_run"),
    "bound_share_of_steps": ("bound", "of_steps"),
}
RATIOS = ("output_tokens_per_s", "ttft_p99_ms", "itl_p99_ms", "e2el_p99_ms")
WHAT_RATIO = (
    "a ratio is one engine's figure / the other's, both measured in the same round; of tokens per second above 1, of "
    "times below 1, means that the first is ahead"
)

Runs = Sequence[dict[str, Any]]


def results(
    peers: Sequence[Peer],
    runs: Runs,
    baselines: Sequence[str],
    *,
    missing: dict[str, str],
    interrupted: bool = False,
    rates: dict[str, Any] | None = None,
    provenance: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All that is kept of a benchmark, as plain data; the order of its keys is that of a reader's questions.

    peers: those that could run, in the order of the columns. baselines: names of those that ratios are of; outputs are
    compared with those of the first. missing: name → why it could not. rates: of measure_rates.
    """
    titles = {peer.name: peer.title for peer in peers}
    good = {name: [run for run in runs if run["peer"] == name and not run["failure"]] for name in titles}
    base = good.get(baselines[0], [])
    return {
        "schema": "minibatcher.bench",
        "schema_version": SCHEMA_VERSION,
        "clock": "measured",
        "ratios": {
            of: {
                name: {figure: _pairs(good[of], good[name], figure) for figure in RATIOS}
                for name in titles
                if name != of and good[name]
            }
            for of in baselines
            if good.get(of)
        },
        "what_a_ratio_is": WHAT_RATIO,
        "outputs_of": baselines[0],
        "outputs_equal": {name: _equal(base, good[name]) for name in titles if base and good[name]},
        "figures": {
            name: {figure: _spread([value(run, figure) for run in good[name]]) for figure in FIGURES}
            for name in titles
            if good[name]
        },
        "titles": titles,
        "bound": {"what": WHAT_BOUND, "rates": rates},
        "missing": missing,
        "failures": {run["peer"]: run["failure"] for run in runs if run["failure"]},
        "interrupted": interrupted,
        "warnings": warnings(runs, titles),
        "runs": list(runs),
        "provenance": provenance or {},
    }


def value(run: dict[str, Any], figure: str) -> float | None:
    """One of FIGURES of a run; None where it has none."""
    found: Any = run
    for key in FIGURES[figure]:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def warnings(runs: Runs, titles: dict[str, str]) -> list[str]:
    """A sentence on the runs beside which other programs were busy, where there are any."""
    shares = [(share, run) for run in runs if (share := value(run, "others_share")) is not None]
    busy = [(share, run) for share, run in shares if share > BUSY]
    if not busy:
        return []
    most, run = max(busy, key=lambda pair: pair[0])
    return [
        f"Other programs took more than {BUSY:.0%} of the processors in {len(busy)} of {len(shares)} runs (most: "
        f"{most:.0%}, {titles.get(run['peer'], run['peer'])}, round {run['round'] + 1}), so these figures are doubtful."
    ]


def _pairs(base: Runs, other: Runs, figure: str) -> dict[str, Any] | None:
    """Ratios of the rounds in which both ran."""
    by_round = {run["round"]: value(run, figure) for run in other}
    pairs = [(value(run, figure), by_round.get(run["round"])) for run in base]
    return _spread([a / b if a is not None and b else None for a, b in pairs])


def _spread(values: list[float | None]) -> dict[str, Any] | None:
    """median, min, max and all values, in the order of the rounds; None where there is no value at all."""
    known = [v for v in values if v is not None]
    return {"median": median(known), "min": min(known), "max": max(known), "values": known} if known else None


def _equal(base: Runs, other: Runs) -> dict[str, int] | None:
    """Requests with the output of the baseline's first run, in that run of this peer that has the fewest; and all."""
    expected = base[0]["output_hashes"]
    found = [run["output_hashes"] for run in other]
    if expected is None or not all(found):
        return None
    equal = min(sum(hashes[name] == expected[name] for name in expected) for hashes in found)
    return {"equal": equal, "of": len(expected)}
