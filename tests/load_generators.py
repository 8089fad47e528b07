"""Published load generators: how each is told a workload, and which figures of its report mean what ours mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minibatcher.metrics import spread
from minibatcher.workload import Workload

COUNTS = ("num_requests", "num_prompt_tokens", "num_output_tokens", "output_tokens_per_s")
LATENCIES, SPREAD = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"), ("mean", "p50", "p99")
# `vllm bench serve`, without its command: that of the CPU build looks for a package of another name.
VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
Figures = dict[str, float]


class Generator(NamedTuple):
    """How to run it, and to read what it reports.

    command: of (interpreter, server's URL, model's folder, trace file, result file). read: the report's figures under
    our names; what it defines in another way is absent.
    """

    command: Callable[[str, str, Path, Path, Path], list[str]]
    read: Callable[[dict[str, Any]], Figures]


def trace_rows(workload: Workload) -> list[dict[str, Any]]:
    """Seconds and lengths. Each prompt has pieces of its own, so that no two begin alike."""
    return [
        {
            "timestamp": request.arrival_time,
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": [index],
        }
        for index, request in enumerate(workload)
    ]


def guidellm_command(python: str, url: str, model: Path, trace: Path, result: Path) -> list[str]:
    backend = {"kind": "openai_http", "target": url, "request_format": "/v1/completions", "http2": False}
    extras = {"body": {"temperature": 0, "ignore_eos": True}}
    options = {
        "--backend": backend | {"model": model.name, "extras": extras},
        "--profile": {"kind": "replay", "schedule_turn": "timestamp"},
        "--tokenizer": {"kind": "hf_auto", "model": str(model)},
        "--data": {"kind": "trace_synthetic", "source": {"kind": "json_file", "path": str(trace)}},
        "--output": {"kind": "json", "path": str(result)},
    }
    words = [word for name, value in options.items() for word in (name, json.dumps(value))]
    return [python, "-m", "guidellm", "run", *words, "--disable-console"]


def guidellm_figures(report: dict[str, Any]) -> Figures:
    """Its percentiles do not interpolate as ours do, so that p99 of few requests is the longest: they are taken from
    the requests' own figures in its report. Its inter-token latency is a request's mean, as our TPOT is; the mean of
    all weighs each by its tokens, as that of single gaps does. Its time per output token counts the first, too.
    """
    (benchmark,) = report["benchmarks"]
    metrics, requests = benchmark["metrics"], benchmark["requests"]["successful"]

    def spread_of(name: str) -> dict[str, float]:
        return spread(None if r[name] is None else r[name] / 1e3 for r in requests)

    def told(name: str, what: str) -> float:
        return metrics[name]["successful"][what]

    return flat(
        {
            "num_requests": metrics["request_totals"]["successful"],
            "num_prompt_tokens": told("prompt_token_count", "total_sum"),
            "num_output_tokens": told("output_token_count", "total_sum"),
            "output_tokens_per_s": told("output_tokens_per_second", "mean"),
            "ttft_ms": spread_of("time_to_first_token_ms") | {"mean": told("time_to_first_token_ms", "mean")},
            "tpot_ms": spread_of("inter_token_latency_ms"),
            "itl_ms": {"mean": told("inter_token_latency_ms", "mean")},
            "e2el_ms": spread(r["request_latency"] for r in requests) | {"mean": told("request_latency", "mean") * 1e3},
        }
    )


def vllm_command(python: str, url: str, model: Path, trace: Path, result: Path) -> list[str]:
    options = {
        "--backend": "openai",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": model.name,
        "--tokenizer": str(model),
        "--dataset-name": "timed_trace",
        "--dataset-path": str(trace),
        "--timed-trace-chunk-hash-size": "1000000",  # one piece is the whole prompt
        "--num-prompts": "1000000",  # all
        "--temperature": "0",
        "--ready-check-timeout-sec": "0",
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "50,90,99",
        "--result-dir": str(result.parent),
        "--result-filename": result.name,
    }
    words = [word for pair in options.items() for word in pair]
    return [python, "-c", VLLM_BENCH, *words, "--no-oversample", "--ignore-eos", "--save-result", "--disable-tqdm"]


def vllm_figures(report: dict[str, Any]) -> Figures:
    """Defined as ours, one and all; what it calls an inter-token latency is the time between two events."""
    spreads = {f"{name}_ms": {p: report[f"{p}_{name}_ms"] for p in SPREAD} for name in ("ttft", "tpot", "itl", "e2el")}
    counts = {
        "num_requests": float(report["completed"]),
        "num_prompt_tokens": float(report["total_input_tokens"]),
        "num_output_tokens": float(report["total_output_tokens"]),
        "output_tokens_per_s": report["output_throughput"],
    }
    return flat(counts | spreads)


def flat(summary: Mapping[str, Any]) -> Figures:
    """One number a name, as "ttft_ms p99"; what is not there, or not a number, is left out."""
    figures = {name: summary.get(name) for name in COUNTS}
    figures |= {f"{name} {p}": (summary.get(name) or {}).get(p) for name in LATENCIES for p in SPREAD}
    return {name: float(value) for name, value in figures.items() if value is not None}


GENERATORS = {
    "guidellm": Generator(guidellm_command, guidellm_figures),
    "vllm": Generator(vllm_command, vllm_figures),
}
