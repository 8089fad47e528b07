"""What `compare` and `simulate` share: the workload in, the table and the files out."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InvalidParameter, MinibatcherError
from ..metrics import OBJECTIVES
from ..report import Comparison, comparison, html, table
from ..request import PRIORITY_CLASSES
from ..scheduling import DEFAULT_STRATEGIES, STRATEGIES, strategy
from ..workload import Workload, load_workload, workload_names
from .options import (
    check_file,
    check_folder,
    complain,
    file_stems,
    positive_int,
    positive_number,
    rate,
    seed,
    whole_number,
    write_json,
    writing,
)
from .workloads import workload_help

DEFAULT_WORKLOAD = "azure-conv"
DEFAULT_MAX_MODEL_LEN = 1024  # of real models: keeps the default run under a minute on two CPU cores
MAX_COLUMNS = 2000  # of a page's picture: with hundreds of slots it stays small enough to be mailed


def add_workload_options(
    parser: argparse.ArgumentParser,
    default_num_requests: int,
    default_rate: str,
    most_requests: int = 10_000_000,
    strategies: bool = True,
) -> None:
    """default_rate: in words, for the help. strategies: False where another server decides."""
    what = parser.add_argument_group("workload", workload_help())
    what.add_argument(
        "--workload",
        default=DEFAULT_WORKLOAD,
        help="a name, with parameters if need be (see above), or a file: Azure CSV, Mooncake JSONL, ShareGPT JSON, "
        "a JSON object whose requests have prompt_tokens, max_new_tokens and arrival_unit (at one a second), or "
        f"JSONL with prompt_tokens/prompt, output_tokens, arrival_time (default: {DEFAULT_WORKLOAD})",
    )
    what.add_argument(
        "--num-requests",
        type=whole_number(1, most_requests),
        help=f"how many (default: {default_num_requests}, or all of a file)",
    )
    what.add_argument(
        "--request-rate",
        type=rate,
        help=f"requests per second, or inf for all at once (default: {default_rate})",
    )
    what.add_argument("--seed", type=seed, default=0, help="everything random starts from it (default: 0)")
    if strategies:
        _add_strategies(what)
    judge = parser.add_argument_group("objectives and price")
    judge.add_argument(
        "--slo-ttft-ms", type=positive_number, help="count as goodput only requests with at most this TTFT"
    )
    judge.add_argument("--slo-tpot-ms", type=positive_number, help="and with at most this TPOT")
    judge.add_argument(
        "--slo",
        type=class_objective,
        action="append",
        metavar="CLASS:ttft=MS,tpot=MS",
        help=f"objectives of one priority class ({', '.join(PRIORITY_CLASSES)}) in place of those for all; also "
        "itl_p99 and e2el; repeatable",
    )
    judge.add_argument(
        "--price-per-hour", type=positive_number, help="of the machine, in any currency: adds what a token costs"
    )


def _add_strategies(what: argparse._ArgumentGroup) -> None:
    what.add_argument(
        "--declared-max-tokens",
        type=positive_int,
        metavar="N",
        help="requests ask for so many output tokens (as far as the context goes) and end sooner, as in practice, "
        "where nobody knows how long an answer will be (default: exactly what they use; with several --admission or "
        "--preemption the longest output)",
    )
    what.add_argument(
        "--strategies",
        nargs="+",
        default=list(DEFAULT_STRATEGIES),
        metavar="NAME",
        help=f"any of {', '.join(STRATEGIES)} (default: all but solo)",
    )


def class_objective(text: str) -> tuple[str, dict[str, float]]:
    """An option's type: CLASS:ttft=MS,tpot=MS."""
    name, colon, limits = text.partition(":")
    if name not in PRIORITY_CLASSES or not colon:
        known = ", ".join(PRIORITY_CLASSES)
        raise argparse.ArgumentTypeError(f"{text!r} must be CLASS:ttft=MS,tpot=MS with a class of {known}")
    objective = {}
    for limit in filter(None, limits.split(",")):
        what, equals, milliseconds = limit.partition("=")
        if f"{what}_ms" not in OBJECTIVES or not equals:
            known = ", ".join(key.removesuffix("_ms") for key in OBJECTIVES)
            raise argparse.ArgumentTypeError(f"{limit!r} must be an objective of {known}, as ttft=200 (milliseconds)")
        objective[f"{what}_ms"] = positive_number(milliseconds)
    if not objective:
        raise argparse.ArgumentTypeError(f"{text!r} names no objective; write {name}:ttft=200, say")
    return name, objective


def objectives_of(args: argparse.Namespace) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Latency limits for all, and by class."""
    for_all = {name: getattr(args, f"slo_{name}") for name in ("ttft_ms", "tpot_ms")}
    by_class: dict[str, dict[str, float]] = {}
    for name, objective in args.slo or ():
        by_class[name] = by_class.get(name, {}) | objective
    return {name: limit for name, limit in for_all.items() if limit is not None}, by_class


def add_max_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("requests that name no output length").add_argument(
        "--max-tokens", type=positive_int, default=128, help="most tokens, as far as the context goes (default: 128)"
    )


def add_result_options(parser: argparse.ArgumentParser, steps: bool = True) -> None:
    """steps: False for runs whose steps nobody knows, which leave nothing to draw."""
    out = parser.add_argument_group("results")
    out.add_argument(
        "--json", metavar="FILE", help="write all numbers, and each request's outcome, as JSON (- for stdout)"
    )
    kept = "each run's timeline, step by step, as DIR/COLUMN.json" if steps else "its timeline as DIR/NAME.json"
    out.add_argument("--timeline", metavar="DIR", help=f"write {kept}")
    parser.set_defaults(plot=None, html=None)
    if steps:
        out.add_argument("--plot", metavar="FILE.png", help="draw who sat in which slot, doing what")
        out.add_argument(
            "--html",
            metavar="FILE.html",
            help="the same to play, step by step, and the table: one page without a network",
        )
    out.add_argument("--explain", action="store_true", help="print what every number means below the table")
    out.add_argument("--quiet", action="store_true", help="no progress bar")


def add_with(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("other runs").add_argument(
        "--with",
        dest="beside",
        action="append",
        default=[],
        metavar="FILE",
        help="put a measured run of the same requests into the table: what replay --json wrote, or a timeline of "
        "compare, serve or replay; repeatable",
    )


def named_strategies(args: argparse.Namespace) -> list[str]:
    """The strategies asked for. Raises UnknownName, InvalidParameter."""
    names = [name for given in args.strategies for name in given.split(",") if name]
    for name in names:
        strategy(name)
    if not names:
        raise InvalidParameter(f"--strategies names none; known: {', '.join(STRATEGIES)}")
    return names


def check_results(args: argparse.Namespace) -> None:
    """Raises before anything runs if a result has nowhere to go."""
    if args.plot is not None and Path(args.plot).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidParameter(f"--plot writes .png, .svg or .pdf, not {args.plot!r}")
    if args.html is not None and Path(args.html).suffix.lower() not in (".html", ".htm"):
        raise InvalidParameter(f"--html writes .html, not {args.html!r}")
    files = [path for path in (args.json, args.plot, args.html) if path is not None]
    for path in files:
        check_file(path)
    if len({Path(path).resolve() for path in files}) < len(files):
        raise InvalidParameter("--json, --plot and --html must each write a file of its own")
    check_folder(args.timeline)


def read_workload(args: argparse.Namespace, default_num_requests: int, default_rate: float | None, count_tokens=None):
    """The workload that the options name.

    default_rate: for named workloads that say nothing of arrivals themselves; None keeps a profile's own.
    """
    name, _, own = args.workload.partition(":")
    is_file = name not in workload_names()
    request_rate = args.request_rate
    if request_rate is None and not is_file and not re.search(r"(^|,)\s*(request_rate|arrivals)\s*=", own):
        request_rate = default_rate
    count = args.num_requests or (None if is_file else default_num_requests)
    return load_workload(
        args.workload, num_requests=count, seed=args.seed, request_rate=request_rate, count_tokens=count_tokens
    )


def warn_of_duration(args: argparse.Namespace, workload: Workload, who: str) -> None:
    """Say what arrival times mean for those who wait."""
    seconds = workload.requests[-1].arrival_time
    if seconds > 60 and not args.quiet:
        print(
            f"The requests of {workload.name} arrive over {_duration(seconds)}, so {who} takes that long at least; "
            "--request-rate changes it, and inf lets all arrive at once.",
            file=sys.stderr,
        )


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 60:.1f} minutes"


def give_results(
    args: argparse.Namespace,
    timelines: dict[str, Any],
    utilisation: dict | None = None,
    setting: str = "",
    measured: dict[str, Any] | None = None,
    beside: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> int:
    """Write what was asked for, then print the table. Returns the exit code; a file that fails costs no other.

    measured: when and amid what the runs began (provenance.circumstances), for the JSON, as is extra. beside: runs
    from files, which are in the table alone.
    """
    if not timelines:
        raise KeyboardInterrupt  # before anything was served
    objectives, by_class = objectives_of(args)
    written = []
    if args.timeline:
        written.append(attempt(args, lambda: _write_timelines(timelines, args.timeline)))
    if args.plot:
        written.append(attempt(args, lambda: _draw(timelines, args.plot)))
    result = comparison(
        {**timelines, **(beside or {})},
        objectives=objectives,
        class_objectives=by_class,
        price_per_hour=args.price_per_hour,
        utilisation=utilisation,
        setting=setting,
        beside=tuple(beside or ()),
    )
    if args.html:
        written.append(attempt(args, lambda: _write_page(timelines, result, args.html)))
    if args.json:
        kept = result | ({"measured": measured} if measured else {}) | (extra or {})
        written.append(attempt(args, lambda: write_json(kept, args.json)))
    print(table(result, explain=args.explain), file=sys.stderr if args.json == "-" else sys.stdout)
    interrupted = any(timeline.header.get("interrupted") for timeline in timelines.values())
    if interrupted:
        print("interrupted: the numbers are those of what was done so far", file=sys.stderr)
    return 2 if not all(written) else 130 if interrupted else 0


def attempt(args: argparse.Namespace, write: Callable[[], None]) -> bool:
    """Whether something could be written; if not, it has been told, and costs nothing else."""
    try:
        write()
    except MinibatcherError as error:
        complain(f"minibatcher {args.command}", str(error))
        return False
    return True


def _write_timelines(timelines: dict[str, Any], folder: str) -> None:
    with writing(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
    for timeline, stem in zip(timelines.values(), file_stems(timelines)):
        path = Path(folder) / f"{stem}.json"
        with writing(str(path)):
            timeline.save(path)


def _write_page(timelines: dict[str, Any], result: Comparison, path: str) -> None:
    from ..viz.slots import animate

    film = animate(timelines, max_columns=MAX_COLUMNS)
    title = f"{'The same requests' if len(timelines) > 1 else 'Requests'} under {', '.join(timelines)}"
    with writing(path):
        film.save(path, title, below=html(result))


def _draw(timelines: dict[str, Any], path: str) -> None:
    from ..viz.plots import plot_comparison

    with writing(path):
        plot_comparison(timelines).savefig(path)
