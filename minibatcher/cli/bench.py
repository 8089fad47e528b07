"""`minibatcher bench`: one workload on minibatcher and on other engines, side by side."""

from __future__ import annotations

import argparse
import math
import re
import sys
from typing import Any

from ..errors import InvalidParameter
from ..workload import workload_names
from .bench_peers import chosen, pair, setting, sorted_out
from .options import check_file, complain, positive_number, rate, seed, whole_number, write_json
from .runs import attempt
from .workloads import workload_help

DEFAULT_WORKLOAD = "longtail:prompt_mean=96,prompt_cv=1"
DEFAULT_NUM_REQUESTS = 64
OWN = "own"
MOST_RUNS = 1000

DESCRIPTION = """\
Replay one workload on minibatcher and on other engines with the same weights, precision, threads and
lengths, and print how they compare.

Each run is a fresh process. It loads the model, serves a dozen requests that are not counted, then
gets each request at its arrival time. Lengths are forced: no engine may stop early, and a run in which
a request got another number of tokens has failed. Rounds alternate the order, so that nobody is always
first; each round gives one pair, and a ratio is that of a pair, since only what ran close together
compares. Processor time that other programs took is told for every run.

Peers: minibatcher:compiled, minibatcher:prepacked, minibatcher:plain (ways through a step on a CPU: fused
operations, prepacked weights, plain PyTorch), transformers_generate (static batches, padded),
transformers_continuous, llama_cpp, vllm, nano_vllm, or the dotted name of a module of your own with
TITLE, missing and serve, as those in minibatcher/bench/peers.

  minibatcher bench --list
  minibatcher bench --model 15M --peers minibatcher:plain transformers_generate
  minibatcher bench --model 110M --dtype bfloat16 --request-rate 2 --json out.json
  minibatcher bench --python vllm=/path/to/its/python --set vllm.max_num_batched_tokens=2048"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "bench",
        help="one workload on minibatcher and on other engines side by side: ratios, measured in pairs",
        description=DESCRIPTION,
        epilog="Exit code: 0 if all that could run did (a peer that is not installed is told, and costs nothing); 1\n"
        "if a run failed; 2 for a mistake in the command; 130 after Ctrl-C, which keeps what was done so far.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    load = parser.add_argument_group("workload", workload_help())
    load.add_argument(
        "--workload",
        default=DEFAULT_WORKLOAD,
        help="a name, with parameters if need be (see above), or a file with an output length for each request "
        f"(default: {DEFAULT_WORKLOAD})",
    )
    load.add_argument(
        "--num-requests",
        type=whole_number(1, 100_000),
        help=f"how many (default: {DEFAULT_NUM_REQUESTS}, or all of a file)",
    )
    load.add_argument(
        "--request-rate",
        type=rate_or_own,
        help="requests per second; inf is offline, all there at once; own keeps the arrival times of a file or profile "
        "(default: what WORKLOAD says after its colon, else inf)",
    )
    load.add_argument("--seed", type=seed, default=0, help="everything random starts from it (default: 0)")
    what = parser.add_argument_group("model and machine")
    what.add_argument(
        "--model",
        default="bard",
        help="bard, a folder with a Hugging Face checkpoint, a .gguf file, or a shape with random weights, made for "
        "the run: 15M, 110M or 360M (default: bard)",
    )
    what.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    what.add_argument("--threads", type=whole_number(1, 1024), help="CPU threads of each engine (default: all)")
    who = parser.add_argument_group("peers")
    who.add_argument("--peers", nargs="+", metavar="NAME", help="the columns (default: all that can run here)")
    who.add_argument("--baseline", nargs="+", metavar="PEER", help="what ratios are of (default: each column of ours)")
    who.add_argument(
        "--python",
        type=pair,
        action="append",
        metavar="PEER=PATH",
        help="the interpreter of the environment that an engine is installed in; repeatable",
    )
    who.add_argument("--llama-server", metavar="PATH", help="llama.cpp's llama-server (default: the one on PATH)")
    who.add_argument(
        "--set",
        type=setting,
        action="append",
        metavar="PEER.KEY=VALUE",
        help="a setting of a peer, as JSON or as text; minibatcher.KEY is for all its columns; repeatable",
    )
    how = parser.add_argument_group("runs and results")
    how.add_argument("--runs", type=whole_number(1, MOST_RUNS), default=3, help="rounds (default: 3)")
    how.add_argument(
        "--timeout-s", type=positive_number, default=1800.0, help="of one run, with loading (default: 1800)"
    )
    how.add_argument("--json", metavar="FILE", help="write ratios, figures, every run and its circumstances as JSON")
    how.add_argument("--list", action="store_true", help="the peers, and whether they can run here")
    how.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def rate_or_own(text: str) -> float | str:
    """An option's type: a rate, or OWN."""
    return text if text == OWN else rate(text)


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    peers = chosen(args)
    able, missing, broken = sorted_out(peers)
    if args.list:
        return _list(able, missing, broken)
    data = _bench(args, able, _baselines(args, able, missing | broken), missing)
    data["failures"] = broken | data["failures"]
    written = not args.json or attempt(args, lambda: write_json(data, args.json))
    from ..bench.table import text

    print(text(data), file=sys.stderr if args.json == "-" else sys.stdout)
    for name, why in data["failures"].items():
        complain("minibatcher bench", f"{name}: {why}")
    if data["interrupted"]:
        print("interrupted: the figures are those of the runs that were done", file=sys.stderr)
        return 130
    return 2 if not written else 1 if data["failures"] else 0


def _list(able: list[Any], missing: dict[str, str], broken: dict[str, str]) -> int:
    for peer in able:
        print(f"{peer.name}: can run here ({peer.title})")
    for name, why in (missing | broken).items():
        print(f"{name}: {why}")
    return 1 if broken else 0


def _baselines(args: argparse.Namespace, able: list[Any], unable: dict[str, str]) -> list[str]:
    """The peers that ratios are of. Raises InvalidParameter."""
    names = [peer.name for peer in able]
    if not able:
        why = "; ".join(f"{name}: {sentence}" for name, sentence in unable.items())
        raise InvalidParameter(f"none of the peers can run here ({why})" if why else "none of the peers can run here")
    for name in args.baseline or ():
        if name not in names:
            why = unable.get(name, f"the peers that can run here are {', '.join(names)}")
            raise InvalidParameter(f"--baseline {name!r}: {why}")
    return args.baseline or [peer.name for peer in able if peer.module == "minibatcher"] or names[:1]


def _bench(args: argparse.Namespace, able: list[Any], baselines: list[str], missing: dict[str, str]) -> dict[str, Any]:
    from tqdm import tqdm

    from ..bench.benchmark import benchmark

    # What a workload's own parameters say of arrivals is not overruled unless asked for.
    own = re.search(r"(^|,)\s*(request_rate|arrivals)\s*=", args.workload.partition(":")[2])
    wanted: Any = args.request_rate or (OWN if own else math.inf)
    drawn = args.workload.partition(":")[0] in workload_names()
    off = args.quiet or not sys.stderr.isatty()
    with tqdm(total=args.runs * len(able), unit="run", disable=off, file=sys.stderr) as bar:

        def tell(peer: Any, index: int, done: int) -> None:
            bar.set_description(f"round {index + 1} of {args.runs}, {peer.title}", refresh=False)
            bar.n = done
            bar.refresh()

        data = benchmark(
            able,
            workload=args.workload,
            num_requests=args.num_requests or (DEFAULT_NUM_REQUESTS if drawn else None),
            request_rate=None if wanted == OWN else wanted,
            seed=args.seed,
            model=args.model,
            dtype=args.dtype,
            threads=args.threads,
            baselines=baselines,
            runs=args.runs,
            timeout_s=args.timeout_s,
            missing=missing,
            progress=tell,
        )
        bar.update(0 if data["interrupted"] else bar.total - bar.n)
        return data
