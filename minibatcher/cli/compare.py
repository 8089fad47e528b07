"""`minibatcher compare`: the same requests under each strategy, side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import InvalidParameter
from ..report import comparison, definitions, table
from ..scheduling import STRATEGIES, strategy
from ..workload import load_workload, workload_names
from .options import (
    add_engine_options,
    add_model_options,
    check_writable,
    engine_options,
    natural_int,
    positive_int,
    positive_number,
    rate,
    write_json,
)

DEFAULT_WORKLOAD = "azure-conv"
DEFAULT_NUM_REQUESTS = 48
DEFAULT_MAX_MODEL_LEN = 1024  # keeps the default run under a minute on two CPU cores


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compare",
        help="serve one workload with each batching strategy and print the numbers side by side",
        description="Serve one workload with each batching strategy on a real model, and print what it cost.\n\n"
        "With no options: requests with the lengths of a production chat service (fitted to the Azure 2023 trace and\n"
        "scaled to a small model), all there at once, so that every run makes the same plans. Output lengths are\n"
        "forced, so every strategy does the same useful work, and the answers must come out the same.",
        epilog="What the numbers mean:\n\n" + definitions(100),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("workload")
    what.add_argument(
        "--workload",
        default=DEFAULT_WORKLOAD,
        help=f"a name ({', '.join(workload_names())}) or a file: Azure CSV, Mooncake JSONL, ShareGPT JSON, or JSONL "
        f"with prompt_tokens/prompt, output_tokens, arrival_time (default: {DEFAULT_WORKLOAD})",
    )
    what.add_argument(
        "--num-requests", type=positive_int, help=f"how many (default: {DEFAULT_NUM_REQUESTS}, or all of a file)"
    )
    what.add_argument("--request-rate", type=rate, help="requests per second, or inf for all at once (default: inf)")
    what.add_argument("--seed", type=natural_int, default=0, help="everything random starts from it (default: 0)")
    what.add_argument(
        "--strategies",
        nargs="+",
        default=["static", "dynamic", "continuous", "chunked"],
        metavar="NAME",
        help=f"any of {', '.join(STRATEGIES)} (default: all but solo)",
    )
    judge = parser.add_argument_group("objectives and price")
    judge.add_argument(
        "--slo-ttft-ms", type=positive_number, help="count as goodput only requests with at most this TTFT"
    )
    judge.add_argument("--slo-tpot-ms", type=positive_number, help="and with at most this TPOT")
    judge.add_argument(
        "--price-per-hour", type=positive_number, help="of the machine, in any currency: adds what a token costs"
    )
    add_model_options(parser)
    add_engine_options(parser)
    out = parser.add_argument_group("results")
    out.add_argument(
        "--json", metavar="FILE", help="write all numbers, and each request's outcome, as JSON (- for stdout)"
    )
    out.add_argument("--timeline", metavar="DIR", help="write each run's timeline, step by step, as DIR/STRATEGY.json")
    out.add_argument("--plot", metavar="FILE.png", help="draw who sat in which slot, doing what")
    out.add_argument("--explain", action="store_true", help="print what every number means below the table")
    out.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    names = [name for given in args.strategies for name in given.split(",") if name]
    for name in names:
        strategy(name)
    for path in (args.json, args.plot):
        check_writable(path)
    if args.plot and Path(args.plot).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidParameter(f"--plot writes .png, .svg or .pdf, not {args.plot!r}")
    from ..build import resolve_device
    from ..compare import run_comparison
    from ..model.loader import load_model

    model = load_model(args.model, device=resolve_device(args.device), dtype=args.dtype)
    workload = _workload(args, model)
    if args.max_model_len is None:
        args.max_model_len = min(DEFAULT_MAX_MODEL_LEN, model.config.max_position_embeddings)
    workload = workload.fit_to_context(args.max_model_len)
    timelines = run_comparison(
        workload, model=model, strategies=names, progress=sys.stderr.isatty() and not args.quiet, **engine_options(args)
    )
    objectives = {name: getattr(args, f"slo_{name}") for name in ("ttft_ms", "tpot_ms")}
    objectives = {name: limit for name, limit in objectives.items() if limit is not None}
    result = comparison(timelines, objectives=objectives, price_per_hour=args.price_per_hour)
    print(table(result, explain=args.explain), file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json:
        write_json(result, args.json)
    if args.timeline:
        _write_timelines(timelines, args.timeline)
    if args.plot:
        from ..viz.plots import plot_comparison

        plot_comparison(timelines).savefig(args.plot)
    if any(timeline.header.get("interrupted") for timeline in timelines.values()):
        print("interrupted: the numbers are those of what was done so far", file=sys.stderr)
        return 130
    return 0


def _workload(args: argparse.Namespace, model):
    is_file = Path(args.workload).exists()
    request_rate = args.request_rate
    if request_rate is None and not is_file:
        request_rate = float("inf")
    count = args.num_requests or (None if is_file else DEFAULT_NUM_REQUESTS)
    tokenizer = model.tokenizer
    count_tokens = (lambda text: len(tokenizer.encode(text, add_special_tokens=True))) if tokenizer else None
    return load_workload(
        args.workload, num_requests=count, seed=args.seed, request_rate=request_rate, count_tokens=count_tokens
    )


def _write_timelines(timelines, folder: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, timeline in timelines.items():
            timeline.save(Path(folder) / f"{name}.json")
    except OSError as error:
        raise InvalidParameter(f"can't write timelines to {folder}: {error.strerror}") from error
