"""Row 3.6: one engine for both phases, against one engine for each, on as many devices in all.

Source: Patel et al., Splitwise, ISCA 2024; Zhong et al., DistServe, OSDI 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InvalidParameter
from ..metrics import goodput, itl, tpot, ttft
from ..request import Request, SamplingParams
from ..runners.roofline import CostModel
from ..scheduling import ChunkedScheduler, StepPlan
from ..simulate import run_simulation, simulated_engine
from ..timeline import RequestRecord, Timeline
from ..workload import Workload, profile
from ..workload.prefixes import HashedPrompt
from .common import percentile


class DecodeScheduler(ChunkedScheduler):
    """Chunked prefill whose requests come with the KV cache of their prompt, but for the prompt's last token.

    That token is the one which the other engine has made from the rest. A request that is preempted has lost what came
    with it, and is computed here from the start.
    """

    name = "decode"

    def add(self, request: Request) -> None:
        request.num_computed_tokens = request.num_prompt_tokens - 1
        super().add(request)

    def _admit(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        return super()._admit(request, request.num_computed_tokens + num_tokens, plan)


@dataclass(frozen=True)
class Serving:
    """One way to serve at one rate. Latencies in seconds; good_share: requests within both objectives."""

    system: str
    request_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    itl_p99_s: float
    longest_itl_s: float
    good_share: float


def disaggregation(
    cost: CostModel,
    *,
    request_rates: Sequence[float] = (4.0, 8.0, 12.0, 16.0),
    budgets: Sequence[int] = (512, 2_048),
    num_requests: int = 200,
    max_num_seqs: int = 256,
    link_bandwidth: float | None = None,
    ttft_ms: float = 1_000.0,
    tpot_ms: float = 25.0,
    seed: int = 0,
) -> list[Serving]:
    """Row 3.6: "mixed" (one engine on all devices) and "two mixed" (two halves, requests dealt out in turn) under each
    token budget, and "split" (one half computes prompts and hands the KV cache over, the other decodes).

    cost: all devices together; half of them must hold the model. link_bandwidth: bytes/s that a hand-over takes its KV
    through; None is the link of every device of the half at once, each sending its own part. Hand-overs do not queue
    for the link. Both halves of "split" have the largest budget, the same scheduler and cost model. Objectives:
    `ttft_ms`, and `tpot_ms` as the mean of each request.
    """
    if cost.num_gpus % 2:
        raise InvalidParameter(f"two halves need an even number of devices, not {cost.num_gpus}")
    half = replace(cost, num_gpus=cost.num_gpus // 2)
    link = link_bandwidth or half.num_gpus * (cost.device.link_bandwidth or 0.0)
    if not link:
        raise InvalidParameter(f"{cost.device.name} has no link in the table; give link_bandwidth in bytes/s")
    found = []
    for rate in request_rates:
        workload = profile("azure-conv", num_requests, request_rate=rate, seed=seed).fit_to_context(8_192)
        turns = [replace(workload, requests=workload.requests[turn::2]) for turn in (0, 1)]
        options, systems = {"max_num_seqs": max_num_seqs}, {}
        for budget in budgets:
            options["max_num_batched_tokens"] = budget
            systems[f"mixed, budget {budget}"] = _mixed(workload, cost, options)
            systems[f"two mixed, budget {budget}"] = [r for turn in turns for r in _mixed(turn, half, options)]
        options["max_num_batched_tokens"] = max(budgets)
        systems["split"] = split_engines(workload, half, link, **options)
        for name, records in systems.items():
            gaps = [gap for r in records for gap in itl(r)]
            whole = Timeline("simulated", {"max_num_seqs": max_num_seqs}, [], {r.request_id: r for r in records})
            found.append(
                Serving(
                    name,
                    rate,
                    percentile((ttft(r) for r in records), 50),
                    percentile((ttft(r) for r in records), 99),
                    percentile((t for r in records if (t := tpot(r)) is not None), 99),
                    percentile(gaps, 99),
                    max(gaps),
                    goodput(whole, ttft_ms=ttft_ms, tpot_ms=tpot_ms)["good_share"],
                )
            )
    return found


def _mixed(workload: Workload, cost: CostModel, options: dict) -> list[RequestRecord]:
    return list(run_simulation(workload, cost, strategies=["chunked"], **options)["chunked"].requests.values())


def split_engines(workload: Workload, cost: CostModel, link_bandwidth: float, **options: Any) -> list[RequestRecord]:
    """A prefill engine and a decode engine, `cost` each; returns one record a request, its story across both.

    The prefill engine makes the first token of each request and is done with it. Its KV cache then takes bytes /
    link_bandwidth seconds to the decode engine, where the request arrives one token behind, as every decode is.
    """
    prompts = replace(workload, requests=tuple(replace(r, output_tokens=1) for r in workload))
    first = run_simulation(prompts, cost, strategies=["chunked"], **options)["chunked"].requests
    bytes_per_token = cost.model.kv_bytes_per_token(cost.dtype)
    handed_over, longest = [], 0
    for row in workload:
        prompt, output, made = row.prompt_tokens, row.output_tokens, first[row.request_id].finish_time
        assert prompt is not None and output is not None and made is not None  # or run_simulation had refused it
        longest = max(longest, prompt + output)
        if output > 1:
            tokens = HashedPrompt.of(replace(row, prompt_tokens=prompt + 1))  # and the first token
            params = SamplingParams(max_tokens=output - 1, ignore_eos=True)
            arrival = made + prompt * bytes_per_token / link_bandwidth
            handed_over.append(Request(row.request_id, tokens, params, arrival_time=arrival))
    engine = simulated_engine(cost, "chunked", max_model_len=longest, **options)
    engine.scheduler = DecodeScheduler(engine.scheduler.kv, engine.scheduler.config)
    then = engine.run(handed_over).requests
    records = []
    for name, record in first.items():
        rest = then.get(name)
        if rest is not None:
            record = replace(
                record,
                num_output_tokens=1 + rest.num_output_tokens,
                token_times=[*record.token_times, *rest.token_times],
                finish_time=rest.finish_time,
                num_preemptions=record.num_preemptions + rest.num_preemptions,
            )
        records.append(record)
    return records
