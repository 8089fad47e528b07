"""`minibatcher simulate`: the same schedulers in virtual time, on hardware that you need not own."""

from __future__ import annotations

import argparse
import sys

from ..errors import InvalidParameter
from ..hardware import BYTES, device, devices, model_spec, model_specs
from ..report import definitions
from .options import add_engine_options, engine_options, positive_int
from .runs import add_result_options, add_workload_options, check_results, give_results, read_workload

DEFAULT_NUM_REQUESTS = 1_000
KEEP_UP_TO = 10_000  # requests whose every step is kept; beyond, running sums


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "simulate",
        help="the same strategies in virtual time, on described hardware: a 70B model on eight GPUs",
        description="Run the schedulers of `compare` in virtual time. A roofline says how long each step takes:\n"
        "weights streamed once, KV cache read, FLOPs of products and attention, fixed overheads. No model runs,\n"
        "so every number is a prediction; --calibrate fits the few efficiency figures on a measured run and prints\n"
        "how far the prediction of the rest of that run is off.",
        epilog="What the numbers mean:\n\n" + definitions(100),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("hardware and model")
    what.add_argument(
        "--hardware", default="h100", help=f"one of {', '.join(devices())}, or this-machine (default: h100)"
    )
    what.add_argument("--num-gpus", type=positive_int, default=1, help="devices in tensor parallelism (default: 1)")
    what.add_argument(
        "--model-spec",
        default="llama-3.1-8b",
        help=f"one of {', '.join(model_specs())}, or a folder with config.json (default: llama-3.1-8b)",
    )
    what.add_argument(
        "--dtype", default="bfloat16", choices=list(BYTES), help="of weights and KV cache (default: bfloat16)"
    )
    what.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="TERM",
        help="leave a cost term out: linear, attention, all_reduce or overhead; repeatable",
    )
    add_workload_options(parser, DEFAULT_NUM_REQUESTS, "the workload's own")
    add_engine_options(parser)
    add_result_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    names = check_results(args)
    from ..runners.roofline import CostModel
    from ..simulate import run_simulation
    from ..utilisation import utilisation

    options = engine_options(args)
    for only_real in ("device", "attention", "seed", "dtype"):
        options.pop(only_real, None)
    cost = CostModel(
        _device(args),
        model_spec(args.model_spec),
        num_gpus=args.num_gpus,
        dtype=args.dtype,
        switched_off=tuple(args.without),
        memory_utilization=options.pop("gpu_memory_utilization", CostModel.memory_utilization),
    )
    cost.check_fits()
    workload = read_workload(args, DEFAULT_NUM_REQUESTS, None)
    workload = workload.fit_to_context(args.max_model_len or cost.model.max_position_embeddings)
    keep = len(workload) <= KEEP_UP_TO
    if not keep and (args.timeline or args.plot or args.slo_ttft_ms or args.slo_tpot_ms or args.price_per_hour):
        raise InvalidParameter(
            f"--timeline, --plot, --slo-* and --price-per-hour need every step, which is kept up to {KEEP_UP_TO:,} "
            f"requests; this workload has {len(workload):,}"
        )
    timelines = run_simulation(
        workload,
        cost,
        strategies=names,
        seed=args.seed,
        progress=sys.stderr.isatty() and not args.quiet,
        keep_timeline=keep,
        **options,
    )
    used = {name: utilisation(timeline, cost) for name, timeline in timelines.items()} if keep else None
    return give_results(args, timelines, used)


def _device(args: argparse.Namespace):
    if args.hardware != "this-machine":
        return device(args.hardware)
    from ..measure import measure_device

    return measure_device("cpu", dtypes=(args.dtype,))
