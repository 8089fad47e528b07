"""What `--find-capacity` of `compare` and `simulate` share: its options, the search for each column, the results."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..capacity import INTERRUPTED, Capacity, find_capacity
from ..errors import InvalidParameter
from ..metrics import COMPLETED
from ..report_capacity import capacity_comparison, capacity_table
from ..workload import Workload
from .options import positive_number, write_json
from .runs import attempt, objectives_of

LOWEST, HIGHEST = 1 / 16, 8  # of the rate at which requests that are all there at once are served

Serve = Callable[[float], Any]  # request rate → Timeline


def add_capacity_options(parser: argparse.ArgumentParser, num_requests: int) -> None:
    """num_requests: how many are served in each run, unless --num-requests says otherwise."""
    group = parser.add_argument_group("capacity")
    group.add_argument(
        "--find-capacity",
        action="store_true",
        help="find the highest request rate at which the objectives (--slo-*) are met and the queue does not grow, by "
        f"serving the same requests again and again, faster or slower: {num_requests:,} in each run, or "
        "--num-requests. A run at a low rate lasts as long as its requests take to arrive",
    )
    group.add_argument(
        "--capacity-share",
        type=positive_number,
        default=0.99,
        metavar="SHARE",
        help="share of all requests that must be within the objectives; with --slo of each class, too (default: 0.99)",
    )
    group.add_argument(
        "--capacity-range",
        type=rate_range,
        metavar="LOW:HIGH",
        help="request rates to search between (default: from 1/16 of the rate at which requests that are all there at "
        "once are served, which is measured first and tried first, to 8 times that)",
    )


def rate_range(text: str) -> tuple[float, float]:
    """An option's type: LOW:HIGH requests per second."""
    low, colon, high = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} must be LOW:HIGH, in requests per second")
    ends = positive_number(low), positive_number(high)
    if ends[0] >= ends[1]:
        raise argparse.ArgumentTypeError(f"{text!r} must go from a lower rate to a higher one")
    return ends


def check_capacity(args: argparse.Namespace) -> None:
    """Say before anything runs what doesn't go with --find-capacity. Raises InvalidParameter."""
    if not any(objectives_of(args)):
        raise InvalidParameter("--find-capacity needs an objective: --slo-ttft-ms, --slo-tpot-ms or --slo")
    if args.request_rate is not None:
        raise InvalidParameter("--find-capacity looks for the request rate; leave --request-rate out")
    if args.capacity_share > 1:
        raise InvalidParameter(f"--capacity-share must be at most 1, not {args.capacity_share:g}")
    for name in ("timeline", "plot", "html", "price_per_hour"):
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise InvalidParameter(f"--{option} is of single runs; leave it out with --find-capacity")


def give_capacities(
    args: argparse.Namespace, workload: Workload, servers: Iterable[tuple[str, Serve]], setting: str = ""
) -> int:
    """Search for each column, then print the table and write the JSON. Returns the exit code.

    Raises WorkloadError before anything is served if the lowest rate of --capacity-range makes the workload too long.
    """
    objectives, by_class = objectives_of(args)
    if args.capacity_range is not None:
        workload.at_rate(args.capacity_range[0])
    found: dict[str, Capacity] = {}
    interrupted = False
    try:
        with _ended_like_interrupted():
            for name, serve in servers:
                say = _quiet if args.quiet else _telling(name)
                start: float | None = None
                if args.capacity_range is None:
                    start = _own_rate(serve)
                    say(f"{start:.3g} requests/s when all are there at once")
                    low, high = LOWEST * start, HIGHEST * start
                else:
                    low, high = args.capacity_range
                capacity = find_capacity(
                    serve,
                    objectives,
                    class_objectives=by_class,
                    share=args.capacity_share,
                    low=low,
                    high=high,
                    start=start,
                    on_probe=lambda probe: say(probe.sentence()),  # noqa: B023 - called before the next `say`
                )
                if capacity.probes:
                    found[name] = capacity
                if capacity.outcome == INTERRUPTED:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        if not found:
            raise
        interrupted = True
    result = capacity_comparison(found, objectives=objectives, class_objectives=by_class, setting=setting)
    written = attempt(args, lambda: write_json(result, args.json)) if args.json else True
    print(capacity_table(result), file=sys.stderr if args.json == "-" else sys.stdout)
    if interrupted:
        print("interrupted: the rates are those tried so far", file=sys.stderr)
    return 2 if not written else 130 if interrupted else 0


def _telling(name: str) -> Callable[[str], None]:
    """Says on standard error what became of a column's probe, at once."""
    return lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True)


def _quiet(text: str) -> None:
    pass


@contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does: what was found so far is printed."""
    if threading.current_thread() is not threading.main_thread():  # signals are delivered there alone
        yield
        return

    def interrupt(signum: int, frame: Any) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # ignored, as in a shell's background job
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _own_rate(serve: Serve) -> float:
    """Requests per second that are served when all are there at once."""
    timeline = serve(math.inf)
    if timeline.header.get("interrupted"):
        raise KeyboardInterrupt
    served = sum(record.finish_reason in COMPLETED for record in timeline.requests.values())
    if not served:
        raise InvalidParameter("none of the requests was served when all came at once; name a --capacity-range")
    if not timeline.duration:
        raise InvalidParameter(
            "all requests were served in no time, so no rate is too high; put the cost terms back (--without) or "
            "name a --capacity-range"
        )
    return served / timeline.duration
