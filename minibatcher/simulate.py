"""The same schedulers in virtual time, on hardware described by figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from . import __version__, prompts
from .clock import VirtualClock
from .engine import Engine
from .errors import InvalidParameter, WorkloadError
from .kv import make_kv
from .limits import Limits
from .prompts import check_declared, forced
from .request import Request, SamplingParams
from .runners.roofline import CostModel, RooflineRunner
from .scheduling import DEFAULT_STRATEGIES, Scheduler, SchedulerConfig, make_scheduler, strategy
from .tally import Tally
from .timeline import Timeline
from .variants import Variants, make_variants, varied
from .workload import HashedPrompt, Workload, WorkloadRequest, prefix_bound

DEFAULT_KNOBS = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}  # what large servers run with, vLLM's defaults


def simulated_engine(
    cost: CostModel,
    strategy_name: str | type[Scheduler],
    *,
    max_model_len: int,
    block_size: int = 16,
    kv_cache_tokens: int | None = None,
    enable_prefix_caching: bool = False,
    header: dict[str, Any] | None = None,
    recorder=None,
    limits: Limits | None = None,
    **knobs: Any,
) -> Engine:
    """An engine without a model: a scheduler, a RooflineRunner and a virtual clock.

    kv_cache_tokens: size of the KV pool; None is what the devices' memory leaves beside the weights. limits: how much
    may wait, and how much each tenant may ask for. knobs: fields of SchedulerConfig. Raises InvalidParameter if the
    model does not fit the devices.
    """
    cost.check_fits()
    config = SchedulerConfig(**(DEFAULT_KNOBS | knobs))
    tokens = cost.kv_capacity_tokens if kv_cache_tokens is None else kv_cache_tokens
    layout = strategy(strategy_name).kv_layout
    kv = make_kv(
        layout,
        tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
    )
    if layout == "slots":
        config = replace(config, max_num_seqs=kv.num_blocks)  # a batch is full when every slot is taken
    facts = {
        "model": cost.model.name,
        "dtype": cost.dtype,
        "hardware": {"device": f"{cost.num_gpus} × {cost.device.name}", "source": cost.device.source},
        "efficiency": asdict(cost.efficiency),
        "calibration": cost.calibration,
        "switched_off": list(cost.switched_off),
        "software": {"minibatcher": __version__},
    }
    return Engine(
        make_scheduler(strategy_name, kv, config),
        RooflineRunner(cost, kv.block_size),
        VirtualClock(),
        max_model_len=max_model_len,
        header=facts | (header or {}),
        recorder=recorder,
        check_plans=recorder is None,
        limits=limits,
    )


def run_simulation(
    workload: Workload,
    cost: CostModel,
    *,
    strategies: Sequence[str | type[Scheduler]] = DEFAULT_STRATEGIES,
    variants: Variants | None = None,
    max_model_len: int | None = None,
    seed: int = 0,
    progress: bool = False,
    keep_timeline: bool = True,
    declared_max_tokens: int | None = None,
    **options: Any,
) -> dict[str, Timeline | Any]:  # Any: a Tally, for who asks for one with keep_timeline=False
    """Serve a workload in virtual time under each strategy; returns name → timeline, as compare.run_comparison does.

    Every row must name its output length. variants: in place of strategies, label → strategy and what else this run
    sets (variants.make_variants). max_model_len: None is the workload's longest prompt + output, so that a slot is no
    larger than it must be. keep_timeline: False keeps running sums (a Tally) in place of every step, for traffic
    too large to hold; requests are then made as they arrive. declared_max_tokens: what requests ask for where their
    output is shorter (prompts.forced). seed is recorded only: the workload holds all that is random. options: those of
    simulated_engine. With prefix caching header["prefix_bound"] says what a cache without limits would find
    (workload.prefix_bound), if anything is shared. After an interrupt the strategies not yet begun are left out.
    """
    longest = max(_check_lengths(workload, row) for row in workload)
    check_declared(declared_max_tokens)
    if max_model_len is None:
        declared = max((row.prompt_tokens or 0) + (declared_max_tokens or 0) for row in workload)
        max_model_len = max(longest, min(declared, cost.model.max_position_embeddings))
    if max_model_len > cost.model.max_position_embeddings:
        raise InvalidParameter(
            f"max_model_len {max_model_len} is above the context of {cost.model.name}, "
            f"{cost.model.max_position_embeddings} tokens; scale the workload with fit_to_context"
        )
    timelines: dict[str, Timeline | Any] = {}
    variants = variants or make_variants(strategies)
    header = {"workload": workload.facts(), "seed": seed, "varied": varied(variants)}
    if declared_max_tokens is not None:
        header["declared_max_tokens"] = declared_max_tokens
    for name, own in variants.items():
        own = {**options, **own}
        engine = simulated_engine(
            cost,
            own.pop("strategy"),
            max_model_len=max_model_len,
            header=header,
            recorder=None if keep_timeline else Tally(),
            **own,
        )
        arriving = (to_request(row, declared_max_tokens, max_model_len) for row in workload)
        requests = list(arriving) if keep_timeline else arriving
        timelines[name] = timeline = engine.run(requests, progress=progress, total=len(workload))
        kv = engine.scheduler.kv
        if kv.shares_prefixes:
            bound = prefix_bound(map(HashedPrompt.of, workload), kv.block_size)
            timeline.header |= {"prefix_bound": bound} if bound["tokens"] else {}
        if timeline.header.get("interrupted"):
            break
    return timelines


def rate_servers(
    workload: Workload, cost: CostModel, variants: Variants, *, seed: int = 0, **options: Any
) -> Iterator[tuple[str, Callable[[float], Timeline]]]:
    """For each variant, a function that serves the workload at a request rate, as capacity.find_capacity takes it.

    options: those of run_simulation.
    """
    for name, own in variants.items():

        def serve(request_rate: float, name: str = name, own: Mapping[str, Any] = own) -> Timeline:
            faster = workload.at_rate(request_rate, seed=seed)
            timeline = run_simulation(faster, cost, variants={name: own}, seed=seed, **options)[name]
            timeline.header |= {"workload": workload.facts(), "varied": varied(variants)}
            return timeline

        yield name, serve


def to_request(
    row: WorkloadRequest, declared_max_tokens: int | None = None, max_model_len: int | None = None
) -> Request:
    """A request of placeholder tokens, forced to the row's output length (prompts.forced)."""
    assert row.prompt_tokens is not None and row.output_tokens is not None  # _check_lengths has seen to it
    room = None if max_model_len is None else max_model_len - row.prompt_tokens
    params = forced(SamplingParams(), row.output_tokens, declared_max_tokens, room)
    return prompts.to_request(row, HashedPrompt.of(row), params)


def _check_lengths(workload: Workload, row: WorkloadRequest) -> int:
    """Prompt + output tokens. Raises WorkloadError for a row without them."""
    if row.prompt_tokens is None or row.output_tokens is None:
        raise WorkloadError(
            f"request {row.request_id!r} of {workload.name} names no prompt or output length; a simulation needs both"
        )
    return row.prompt_tokens + row.output_tokens
