"""Do a published load generator and our server tell the same numbers of the same run? (a script, not a test)

    python -m venv guidellm && guidellm/bin/pip install guidellm
    python tests/load_generator.py guidellm guidellm/bin/python

The generator sends a workload to `minibatcher serve`, which keeps a record of that run and counts it in /metrics: both
sides' numbers stand side by side. Between these runs `minibatcher replay` sends the same lengths at the same times, in
runs of its own. `vllm` in place of `guidellm` takes vLLM's own `bench serve`, from an environment that has vLLM. Each
difference of more than 5 % is marked; the exit code is 1 if the two sides of one run differ so much. Take a model whose
steps are long beside the way through HTTP (a few milliseconds: with bard it is a tenth of the TTFT), a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from load_generators import GENERATORS, Figures, Generator, flat, trace_rows
from serving import Metrics, running_server

from minibatcher.metrics import summarize
from minibatcher.provenance import circumstances
from minibatcher.timeline import Timeline
from minibatcher.workload import Workload, load_workload

ROOT = Path(__file__).resolve().parents[1]
MOST = 0.05  # of difference
SHORTEST = 8  # tokens of a prompt
TRIES = 6
COUNTERS = {
    "num_requests": "vllm:request_success_total",
    "num_prompt_tokens": "vllm:prompt_tokens_total",
    "num_output_tokens": "vllm:generation_tokens_total",
}
HISTOGRAMS = {
    "ttft_ms": "vllm:time_to_first_token_seconds",
    "tpot_ms": "vllm:request_time_per_output_token_seconds",
    "itl_ms": "vllm:inter_token_latency_seconds",
    "e2el_ms": "vllm:e2e_request_latency_seconds",
}


def workload_of(num_requests: int, request_rate: float, max_model_len: int) -> Workload:
    """What a generator can send: none makes prompts of a token or two, and where it sends text, the server may find a
    few tokens more in it."""
    workload = load_workload("azure-conv", num_requests=num_requests, request_rate=request_rate)
    workload = workload.fit_to_context(max_model_len - max_model_len // 16)
    return replace(workload, requests=tuple(r for r in workload if (r.prompt_tokens or 0) >= SHORTEST))


def own_figures(timeline: Timeline, num_requests: int) -> Figures:
    """Of the last so many requests to arrive: earlier ones were a warm-up."""
    last = sorted(timeline.requests.values(), key=lambda r: r.arrival_time)[-num_requests:]
    return flat(summarize(replace(timeline, requests={r.request_id: r for r in last}, steps=[])))


def metrics_figures(metrics: Callable[[str], float]) -> Figures:
    """What /metrics has counted since the server began; of latencies only the means can be had exactly."""
    counts = {name: metrics(counter) for name, counter in COUNTERS.items()}
    return counts | {
        f"{name} mean": metrics(f"{histogram}_sum") / metrics(f"{histogram}_count") * 1e3
        for name, histogram in HISTOGRAMS.items()
    }


def differences(theirs: Figures, ours: Figures) -> dict[str, float]:
    """By how much theirs is above ours, as a share of ours, for each figure that both have."""
    return {name: theirs[name] / ours[name] - 1 for name in theirs if name in ours}


def medians(runs: list[Figures]) -> Figures:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def table(theirs: str, runs: Mapping[str, Figures]) -> str:
    """runs: "generator"; "server" and "metrics", the same run seen from the other side; "replay", runs of its own."""
    heads = {"server": "server's record", "metrics": "/metrics", "replay": "replay"}
    lines: list[list[str]] = [["", theirs, *(cell for head in heads.values() for cell in (head, ""))]]
    change = {who: differences(runs["generator"], runs[who]) for who in heads}
    for name in (name for name in runs["server"] if name in runs["generator"]):
        line = [name, f"{runs['generator'][name]:,.5g}"]
        for who in heads:
            known = name in runs[who]
            line.append(f"{runs[who][name]:,.5g}" if known else "–")
            line.append(f"{change[who][name]:+.1%}{' !' if abs(change[who][name]) > MOST else ''}" if known else "")
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generator", choices=GENERATORS)
    parser.add_argument("python", help="the interpreter that has it")
    parser.add_argument("--model", type=Path, default=ROOT / "minibatcher" / "model" / "bard", help="a model's folder")
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--request-rate", type=float, default=4.0)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="options of the server, last of all")
    parser.add_argument("--json", type=Path, help="write all figures")
    args = parser.parse_args()
    python = str(Path(args.python).absolute())
    workload = workload_of(args.num_requests, args.request_rate, args.max_model_len)
    options = ["--model", str(args.model), "--served-model-name", args.model.name]
    options += ["--max-model-len", str(args.max_model_len), *args.serve]
    rounds: list[dict[str, Figures]] = []
    measured = circumstances()
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(one_round(GENERATORS[args.generator], python, args.model, workload, options, Path(folder)))
        print(f"round {len(rounds)} of {args.rounds}", file=sys.stderr)
    middle = {who: medians([found[who] for found in rounds]) for who in rounds[0]}
    print(table(args.generator, middle))
    if args.json:
        kept = {"generator": args.generator, "version": version(python, args.generator), "measured": measured}
        kept |= {"model": args.model.name, "workload": workload.facts(), "serve": args.serve, "rounds": rounds}
        kept["request_rate"] = args.request_rate
        args.json.write_text(json.dumps(kept | {"medians": middle}, indent=1) + "\n", encoding="utf-8")
    same_run = differences(middle["generator"], middle["server"])
    return int(any(abs(change) > MOST for change in same_run.values()))


def one_round(
    generator: Generator, python: str, model: Path, workload: Workload, options: list[str], folder: Path
) -> dict[str, Figures]:
    """The generator's run, seen from both sides, and a replay of the same lengths and times, each on a fresh server.

    A run of which the generator leaves out a request is done again: guidellm at times ends before its last has.
    Raises RuntimeError if that does not help.
    """
    trace, result, timeline, own = (folder / name for name in ("trace.jsonl", "result.json", "timeline.json", "own"))
    trace.write_text("".join(json.dumps(row) + "\n" for row in trace_rows(workload)), encoding="utf-8")
    for _ in range(TRIES):
        with running_server(*options, "--timeline", str(timeline)) as url:
            run(generator.command(python, url, model, trace, result))
            counted = metrics_figures(Metrics(url))
        seen = generator.read(json.loads(result.read_text(encoding="utf-8")))
        if seen["num_requests"] == len(workload):
            break
    else:
        raise RuntimeError(f"of {len(workload)} requests the generator has told of {seen['num_requests']:.0f}, again")
    workload.to_jsonl(folder / "workload.jsonl")
    with running_server(*options) as url:
        words = [
            "replay",
            str(folder / "workload.jsonl"),
            "--base-url",
            url,
            "--name",
            "replay",
            "--timeline",
            str(own),
        ]
        run([sys.executable, "-m", "minibatcher", *words, "--quiet"])
    return {
        "generator": seen,
        "server": own_figures(Timeline.load(timeline), len(workload)),
        "metrics": counted,
        "replay": own_figures(Timeline.load(own / "replay.json"), len(workload)),
    }


def run(command: list[str]) -> None:
    """Raises RuntimeError with the end of what the command wrote, if it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment |= {"PYTHONHASHSEED": "0"}  # vLLM's prompts depend on it
    environment |= {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}  # its ten would take the processors from the server
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} … ended with {done.returncode}: {done.stdout[-2000:]}")


def version(python: str, generator: str) -> str:
    """Name and version of the package that brings the generator's module."""
    ask = "import importlib.metadata as m, sys; p = m.packages_distributions()[sys.argv[1]][0]; print(p, m.version(p))"
    done = subprocess.run([python, "-c", ask, generator], capture_output=True, encoding="utf-8", check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
