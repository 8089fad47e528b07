"""The same schedulers in virtual time, on hardware described by figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from . import __version__
from .clock import VirtualClock
from .engine import Engine
from .errors import InvalidParameter, WorkloadError
from .kv import make_kv
from .request import Request, SamplingParams
from .runners.roofline import CostModel, RooflineRunner
from .scheduling import SchedulerConfig, make_scheduler, strategy
from .timeline import Timeline
from .workload import Workload

DEFAULT_STRATEGIES = ("static", "dynamic", "continuous", "chunked")


def simulated_engine(
    cost: CostModel,
    strategy_name: str,
    *,
    max_model_len: int,
    block_size: int = 16,
    kv_cache_tokens: int | None = None,
    header: dict[str, Any] | None = None,
    **knobs,
) -> Engine:
    """An engine without a model: a scheduler, a RooflineRunner and a virtual clock.

    kv_cache_tokens: size of the KV pool; None is what the devices' memory leaves beside the weights. knobs: fields of
    SchedulerConfig. Raises InvalidParameter if the model does not fit the devices.
    """
    cost.check_fits()
    config = SchedulerConfig(**knobs)
    tokens = cost.kv_capacity_tokens if kv_cache_tokens is None else kv_cache_tokens
    layout = strategy(strategy_name).kv_layout
    kv = make_kv(layout, tokens, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len, block_size=block_size)
    facts = {
        "model": cost.model.name,
        "dtype": cost.dtype,
        "hardware": {"device": f"{cost.num_gpus} × {cost.device.name}", "source": cost.device.source},
        "efficiency": asdict(cost.efficiency),
        "switched_off": list(cost.switched_off),
        "software": {"minibatcher": __version__},
    }
    return Engine(
        make_scheduler(strategy_name, kv, config),
        RooflineRunner(cost),
        VirtualClock(),
        max_model_len=max_model_len,
        header=facts | (header or {}),
    )


def run_simulation(
    workload: Workload,
    cost: CostModel,
    *,
    strategies: Sequence[str] = DEFAULT_STRATEGIES,
    max_model_len: int | None = None,
    seed: int = 0,
    progress: bool = False,
    **options,
) -> dict[str, Timeline]:
    """Serve a workload in virtual time under each strategy; returns name → timeline, as compare.run_comparison does.

    Every row must name its output length. max_model_len: None is the workload's longest prompt + output, so that a slot
    is no larger than it must be. seed is recorded only: the workload holds all that is random. options: those of
    simulated_engine. After an interrupt the strategies that have not begun are left out.
    """
    requests = to_simulated(workload)
    longest = max(r.max_total_tokens for r in requests)
    if max_model_len is None:
        max_model_len = longest
    if max_model_len > cost.model.max_position_embeddings:
        raise InvalidParameter(
            f"max_model_len {max_model_len} is above the context of {cost.model.name}, "
            f"{cost.model.max_position_embeddings} tokens; scale the workload with fit_to_context"
        )
    facts = {"name": workload.name, "source": workload.source, "notes": list(workload.notes)}
    facts["num_requests"] = len(workload)
    timelines = {}
    for name in dict.fromkeys(strategies):
        engine = simulated_engine(
            cost, name, max_model_len=max_model_len, header={"workload": facts, "seed": seed}, **options
        )
        timelines[name] = engine.run(to_simulated(workload), progress=progress)
        if timelines[name].header.get("interrupted"):
            break
    return timelines


def to_simulated(workload: Workload) -> list[Request]:
    """Requests whose tokens are placeholders. Raises WorkloadError for a row without an output length."""
    requests = []
    for row in workload:
        if row.prompt_tokens is None or row.output_tokens is None:
            raise WorkloadError(
                f"request {row.request_id!r} of {workload.name} names no prompt or output length; a simulation needs both"
            )
        params = SamplingParams(max_tokens=row.output_tokens, ignore_eos=True)
        requests.append(
            Request(
                row.request_id,
                range(row.prompt_tokens),
                params,
                arrival_time=row.arrival_time,
                priority=row.priority,
                tenant=row.tenant,
            )
        )
    return requests
