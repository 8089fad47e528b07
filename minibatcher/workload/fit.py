"""Fit profiles to traces: `python -m minibatcher.workload.fit azure-conv=TRACE.csv … [--out profiles.json]`.

What is kept of a trace are figures of its whole, no rows; `profiles.py` draws from them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MinibatcherError, WorkloadError
from .base import Workload
from .prefixes import HashedPrompt, shared_tokens
from .readers import read_workload

LEVELS_PERCENT = (0, 0.1, 0.5, 1, *np.arange(2.5, 98, 2.5), 98, 98.5, 99, 99.3, 99.5, 99.7, 99.9, 99.95, 100)

_AZURE = {
    "licence": "CC BY 4.0",
    "citation": "Patel et al., Splitwise: Efficient generative LLM inference using phase splitting, ISCA 2024.",
}
_AZURE_SOURCE = "the Azure LLM inference trace 2023, {} service, one hour (github.com/Azure/AzurePublicDataset)."
ABOUT = {
    "azure-conv": {"source": _AZURE_SOURCE.format("conversation"), **_AZURE},
    "azure-code": {"source": _AZURE_SOURCE.format("code completion"), **_AZURE},
    "mooncake-conv": {
        "source": "the Mooncake FAST'25 conversation trace of Kimi, one hour (github.com/kvcache-ai/Mooncake).",
        "licence": "Apache-2.0",
        "citation": "Qin et al., Mooncake: Trading more storage for less computation, FAST 2025.",
    },
}


def fit_profile(workload: Workload, about: dict[str, str] | None = None) -> dict[str, Any]:
    """The profile of a trace with known lengths, JSON-ready. `about` has `source`, `licence`, `citation`."""
    if len(workload) < 100 or workload.requests[-1].arrival_time == 0:
        raise WorkloadError(f"{workload.name!r}: a profile needs 100 requests or more that arrive over time.")
    if any(r.prompt_tokens is None or r.output_tokens is None for r in workload):
        raise WorkloadError(f"{workload.name!r}: a profile needs the prompt and output length of every request.")
    prompt = np.array([r.prompt_tokens for r in workload])
    output = np.array([r.output_tokens for r in workload])
    constant = prompt.min() == prompt.max() or output.min() == output.max()
    spearman = 0.0 if constant else np.corrcoef(_ranks(prompt), _ranks(output))[0, 1]
    about = about or {"source": workload.source, "licence": "not stated", "citation": ""}
    return {
        **about,
        "num_requests": len(workload),
        "levels_percent": [float(level) for level in LEVELS_PERCENT],
        "prompt_tokens": _lengths(prompt),
        "output_tokens": _lengths(output),
        "spearman": _figure(spearman),
        "arrivals": _arrivals(np.array([r.arrival_time for r in workload])),
        "prefix_hit_ratio": prefix_hit_ratio(workload),
    }


def prefix_hit_ratio(workload: Workload) -> float | None:
    """Share of hashed prompt pieces that an earlier prompt has too, with all before: what an unlimited cache finds."""
    rows = [r for r in workload if r.prefix_hashes]
    prompts = [HashedPrompt.of(r) for r in rows]
    hits = sum(-(-tokens // r.tokens_per_hash) for r, tokens in zip(rows, shared_tokens(prompts, block_size=1)))
    pieces = sum(len(r.prefix_hashes) for r in rows)
    return _figure(hits / pieces) if pieces else None


def _arrivals(times: np.ndarray) -> dict[str, Any]:
    gaps = np.diff(times)
    rate = 1 / gaps.mean()
    if np.mean(gaps == 0) <= 0.5:
        quantiles = [_figure(q) for q in np.percentile(gaps, LEVELS_PERCENT)]
        return {"rate_per_s": _figure(rate), "gap_cv": _figure(gaps.std() / gaps.mean()), "gap_quantiles_s": quantiles}
    # The clock ticks more slowly than requests arrive: gaps are unknown, but for a renewal process the variance of the
    # number of arrivals in a tick over its mean tends to the squared coefficient of variation of the gaps.
    ticks, counts = np.unique(times, return_counts=True)
    cv = np.sqrt(counts.var() / counts.mean())
    clock = _figure(np.median(np.diff(ticks)))
    return {"rate_per_s": _figure(rate), "gap_cv": _figure(cv), "gap_quantiles_s": None, "clock_s": clock}


def _lengths(values: np.ndarray) -> dict[str, Any]:
    return {"mean": _figure(values.mean()), "quantiles": [_figure(q) for q in np.percentile(values, LEVELS_PERCENT)]}


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _figure(value: float) -> float:
    return float(f"{value:.6g}")  # the rest is rounding noise, which differs from machine to machine


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minibatcher.workload.fit", description=__doc__)
    parser.add_argument("traces", nargs="+", metavar="NAME=TRACE", help=f"name, one of {', '.join(ABOUT)} or your own")
    parser.add_argument("--out", type=Path, help="file to write (default: standard output)")
    args = parser.parse_args(argv)
    fitted = {}
    try:
        for name, equals, path in (trace.partition("=") for trace in args.traces):
            if not equals:
                raise WorkloadError(f"Expected NAME=TRACE, for instance azure-conv={name}, not {name!r}.")
            fitted[name] = fit_profile(read_workload(path), ABOUT.get(name))
    except MinibatcherError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = _dumps(fitted)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


def _dumps(fitted: dict[str, Any]) -> str:
    """JSON with one line for each list of figures."""
    text = json.dumps(fitted, indent=2, ensure_ascii=False)
    return re.sub(r"\[[^][{}]*\]", lambda numbers: "[" + " ".join(numbers[0][1:-1].split()) + "]", text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
