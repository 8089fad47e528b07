"""`minibatcher compare`: the same requests under each strategy, side by side."""

from __future__ import annotations

import argparse
import sys

from ..errors import InvalidParameter
from ..report import definitions
from ..request import SamplingParams
from ..scheduling import SchedulerConfig
from ..variants import make_variants
from .capacity import add_capacity_options, check_capacity, give_capacities
from .options import (
    add_engine_options,
    add_model_options,
    add_speed_options,
    choices,
    engine_options,
    load_for,
)
from .pressure import check_limits, shorten_memory
from .runs import (
    DEFAULT_MAX_MODEL_LEN,
    add_max_tokens,
    add_result_options,
    add_with,
    add_workload_options,
    check_results,
    give_results,
    named_strategies,
    read_workload,
    warn_of_duration,
)

DEFAULT_NUM_REQUESTS = 48  # replay's too
CAPACITY_NUM_REQUESTS = 100  # so that one may be late of 99 %


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compare",
        help="serve one workload with each batching strategy and print the numbers side by side",
        description="Serve one workload with each batching strategy on a real model, and print what it cost.\n\n"
        "With no options: requests with the lengths of a production chat service (fitted to the Azure 2023 trace and\n"
        "scaled to a small model), all there at once, so that every run makes the same plans. Output lengths are\n"
        "forced, so every strategy does the same useful work, and the answers must come out the same.\n\n"
        "Add solo to --strategies to see each request served alone. The bundled model fits a CPU's cache, so there a\n"
        "step of sixteen rows costs much more than a step of one, and batching gains less than on a GPU, where a step\n"
        "streams the weights from memory whoever is in it (see simulate).\n\n"
        "Several names for --admission, --ordering, --preemption or --enable-prefix-caching make a column each:\n"
        "  minibatcher compare --strategies chunked --admission worst-case,optimistic,preempt\n"
        "  minibatcher compare --strategies chunked --workload shared-prefix --enable-prefix-caching off,on\n\n"
        "How much traffic does it take? The highest request rate at which 99 % of requests meet the objectives:\n"
        "  minibatcher compare --strategies static chunked --find-capacity --slo-ttft-ms 500 --slo-tpot-ms 50",
        epilog="What the numbers mean:\n\n" + definitions(100),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_workload_options(parser, DEFAULT_NUM_REQUESTS, "what WORKLOAD says, else inf", most_requests=100_000)
    add_max_tokens(parser)
    add_model_options(parser)
    add_engine_options(parser)
    add_speed_options(parser)
    add_capacity_options(parser, CAPACITY_NUM_REQUESTS)
    add_with(parser)
    add_result_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    names = named_strategies(args)
    check_results(args)
    if args.find_capacity:
        check_capacity(args)
        if args.beside:
            raise InvalidParameter("--with is of single runs; leave it out with --find-capacity")
    from ..replay.saved import beside

    others = beside(make_variants(names, choices(args)), args.beside)
    from ..compare import rate_servers, run_comparison
    from ..provenance import circumstances

    model = load_for(args)
    tokenizer = model.tokenizer
    count_tokens = (lambda text: len(tokenizer.encode(text, add_special_tokens=True))) if tokenizer else None
    count = CAPACITY_NUM_REQUESTS if args.find_capacity else DEFAULT_NUM_REQUESTS
    workload = read_workload(args, count, float("inf"), count_tokens)
    if args.max_model_len is None:
        args.max_model_len = min(DEFAULT_MAX_MODEL_LEN, model.config.max_position_embeddings)
    workload = workload.fit_to_context(args.max_model_len)
    if not args.find_capacity:
        warn_of_duration(args, workload, "each strategy")
    options = engine_options(args)
    declared, setting = shorten_memory(
        args,
        workload,
        options,
        strategies=names,
        max_num_seqs=args.max_num_seqs or SchedulerConfig.max_num_seqs,
        max_model_len=args.max_model_len,
        max_tokens=args.max_tokens,
    )
    check_limits(options.get("limits"), workload, declared, args.max_model_len, args.max_tokens)
    options |= {
        "model": model,
        "params": SamplingParams(max_tokens=args.max_tokens),
        "variants": make_variants(names, choices(args)),
        "declared_max_tokens": declared,
        "keep_going": True,
    }
    if args.find_capacity:
        return give_capacities(args, workload, rate_servers(workload, **options), setting)
    measured = circumstances()
    timelines = run_comparison(workload, progress=sys.stderr.isatty() and not args.quiet, **options)
    return give_results(args, timelines, setting=setting, measured=measured, beside=others)
