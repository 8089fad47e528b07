"""`minibatcher simulate`: the same schedulers in virtual time, on hardware that you need not own."""

from __future__ import annotations

import argparse
import sys

from ..errors import InvalidParameter
from ..hardware import BYTES, Device, device, devices, model_spec, model_specs
from ..report import definitions
from ..variants import make_variants
from .capacity import add_capacity_options, check_capacity, give_capacities
from .options import add_engine_options, check_file, choices, engine_options, number, whole_number, write_json
from .pressure import check_limits, shorten_memory
from .runs import (
    add_result_options,
    add_workload_options,
    check_results,
    give_results,
    named_strategies,
    objectives_of,
    read_workload,
)

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
    what.add_argument("--hardware", help=f"one of {', '.join(devices())}, or this-machine (default: h100)")
    what.add_argument("--num-gpus", type=whole_number(1, 256), help="devices in tensor parallelism (default: 1)")
    what.add_argument(
        "--model-spec",
        help=f"one of {', '.join(model_specs())}, or a folder with config.json (default: llama-3.1-8b)",
    )
    what.add_argument("--dtype", choices=list(BYTES), help="of weights and KV cache (default: bfloat16)")
    what.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="TERM",
        help="leave a cost term out: linear, attention, all_reduce, swap or overhead; repeatable",
    )
    fit = parser.add_argument_group("calibration")
    fit.add_argument(
        "--calibrate",
        metavar="RUN",
        help="fit the efficiency figures on a part of a measured run, print how well the rest is predicted, and stop. "
        "RUN: a folder with requests.jsonl and meta.json of a vLLM run, or what compare --timeline wrote. Hardware, "
        "model and dtype are the run's own unless given",
    )
    fit.add_argument("--fit-share", type=number, default=0.5, help="the part to fit, of the makespan (default: 0.5)")
    fit.add_argument("--save", metavar="FILE", help="with --calibrate: keep the fitted figures")
    fit.add_argument(
        "--efficiency", metavar="FILE", help="simulate what --save kept: its figures, and its hardware and model"
    )
    add_workload_options(parser, DEFAULT_NUM_REQUESTS, "the workload's own; inf for one without")
    add_engine_options(
        parser, max_num_seqs=256, max_num_batched_tokens=2048, kv_cache="what memory leaves beside the weights"
    )
    add_capacity_options(parser, DEFAULT_NUM_REQUESTS)
    add_result_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    names = named_strategies(args)
    check_results(args)
    if args.find_capacity:
        check_capacity(args)
    if args.calibrate is not None:
        return _calibrate(args)
    from ..calibrate import load_saved
    from ..runners.roofline import CostModel, Efficiency
    from ..simulate import DEFAULT_KNOBS, rate_servers, run_simulation
    from ..utilisation import utilisation

    options = engine_options(args)
    for only_real in ("device", "attention", "seed", "dtype"):
        options.pop(only_real, None)
    saved = load_saved(args.efficiency) if args.efficiency is not None else None
    dtype = args.dtype or (saved.dtype if saved else "bfloat16")
    gpu = saved.device if saved and not args.hardware else _device(args.hardware or "h100", dtype)
    calibration = f"figures kept in {args.efficiency}" if saved else CostModel.calibration
    cost = CostModel(
        gpu,
        model_spec(args.model_spec or (saved.model if saved else "llama-3.1-8b")),
        num_gpus=args.num_gpus or (saved.num_gpus if saved else 1),
        dtype=dtype,
        efficiency=saved.efficiency if saved else Efficiency.for_device(gpu),
        switched_off=tuple(args.without),
        memory_utilization=options.pop("gpu_memory_utilization", CostModel.memory_utilization),
        calibration=calibration,
    )
    cost.check_fits()
    max_model_len = args.max_model_len or cost.model.max_position_embeddings
    workload = read_workload(args, DEFAULT_NUM_REQUESTS, None)
    workload = workload.fit_to_context(max_model_len)
    keep = len(workload) <= KEEP_UP_TO
    if not keep and (args.timeline or args.plot or args.html or any(objectives_of(args)) or args.price_per_hour):
        raise InvalidParameter(
            "--find-capacity, --timeline, --plot, --html, --slo-* and --price-per-hour need every step, which is kept "
            f"up to {KEEP_UP_TO:,} requests; this workload has {len(workload):,}"
        )
    declared, setting = shorten_memory(
        args,
        workload,
        options,
        strategies=names,
        max_num_seqs=args.max_num_seqs or DEFAULT_KNOBS["max_num_seqs"],
        max_model_len=max_model_len,
    )
    check_limits(options.get("limits"), workload, declared, max_model_len)
    variants = make_variants(names, choices(args))
    options |= {"seed": args.seed, "declared_max_tokens": declared}
    if args.find_capacity:
        return give_capacities(args, workload, rate_servers(workload, cost, variants, **options), setting)
    progress = sys.stderr.isatty() and not args.quiet
    timelines = run_simulation(workload, cost, variants=variants, progress=progress, keep_timeline=keep, **options)
    used = {name: utilisation(timeline, cost) for name, timeline in timelines.items()} if keep else None
    return give_results(args, timelines, used, setting)


def _calibrate(args: argparse.Namespace) -> int:
    from ..calibrate import calibrate, load_runs

    check_file(args.save)
    runs = load_runs(args.calibrate)
    hardware = args.hardware or ("this-machine" if runs[0].on_cpu else None)
    calibration = calibrate(
        runs,
        device=_device(hardware, args.dtype or runs[0].dtype) if hardware else None,
        model=model_spec(args.model_spec) if args.model_spec else None,
        num_gpus=args.num_gpus,
        dtype=args.dtype,
        fit_share=args.fit_share,
    )
    if args.save:
        calibration.save(args.save)
    if args.json:
        write_json(calibration.to_json(), args.json)
    if args.json != "-":
        print(calibration.text())
    return 0


def _device(name: str, dtype: str) -> Device:
    if name.lower() != "this-machine":
        return device(name)
    from ..measure import measure_device

    return measure_device("cpu", dtypes=(dtype,))
