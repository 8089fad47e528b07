"""Timelines for tests without a model: the real schedulers, driven by a loop in virtual time that invents tokens."""

from __future__ import annotations

import random

from minibatcher.kv import BlockKV, SlotKV
from minibatcher.request import Request, SamplingParams
from minibatcher.scheduling import STRATEGIES, SchedulerConfig, make_scheduler
from minibatcher.timeline import RequestRecord, RowRecord, RowState, StepRecord, Timeline


def requests(n: int, seed: int = 0, rate: float = 20.0, longest: int = 120) -> list[Request]:
    """`n` requests with long-tailed output lengths, arriving as a Poisson process of `rate` a second."""
    rng, now, made = random.Random(seed), 0.0, []
    for i in range(n):
        output = min(longest, 1 + int(rng.lognormvariate(3.0, 0.9)))
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        made.append(Request(f"r{i}", range(rng.randrange(5, 60)), params, arrival_time=now))
        now += rng.expovariate(rate)
    return made


def run(
    name: str, todo: list[Request], max_num_seqs: int = 4, num_blocks: int = 200, block_size: int = 16, budget: int = 64
) -> Timeline:
    """Serve `todo` with strategy `name`. A step takes 8 ms and 0.1 ms for each token computed."""
    config = SchedulerConfig(max_num_seqs, budget, batch_timeout_s=0.2, max_queue_delay_s=0.01)
    slots = STRATEGIES[name].kv_layout == "slots"
    kv = SlotKV(max_num_seqs, num_blocks * block_size // max_num_seqs) if slots else BlockKV(num_blocks, block_size)
    scheduler = make_scheduler(name, kv, config)
    header = {"strategy": name, "max_num_seqs": scheduler.config.max_num_seqs, "max_num_batched_tokens": budget}
    header |= {"block_size": kv.block_size, "num_blocks": kv.num_blocks, "workload": "fake", "seed": 0, "model": "none"}
    timeline, now, todo = Timeline("simulated", header), 0.0, sorted(todo, key=lambda r: r.arrival_time)
    records = timeline.requests
    while todo or scheduler.has_work():
        while todo and todo[0].arrival_time <= now:
            request = todo.pop(0)
            records[request.request_id] = RequestRecord(
                request.request_id, request.arrival_time, request.num_prompt_tokens, token_times=request.token_times,
                output_token_ids=request.output_token_ids,
            )  # fmt: skip
            scheduler.add(request)
        plan = scheduler.schedule(now)
        if not plan.rows:
            times = [t for t in (plan.wake_at, todo[0].arrival_time if todo else None) if t is not None]
            now = max(now, min(times, default=now)) + (0 if plan.preempted or times else 0.001)
            continue
        planned = {id(row.request): row for row in plan.rows}
        states = {id(r): _state(r, planned) for r in scheduler.running}
        start, now = now, now + 0.008 + 0.0001 * plan.num_computed_tokens
        for row in plan.rows:
            request = row.request
            if request.first_scheduled_time is None:
                request.first_scheduled_time = start
            request.num_computed_tokens += row.num_tokens
            if row.num_tokens and not request.num_pending_tokens:
                request.append(1000 + (len(request.output_token_ids) * 7 + int(request.request_id[1:])) % 97, now)
        rows = [
            RowRecord(
                r.slot, r.request_id, states[id(r)], planned[id(r)].num_tokens if id(r) in planned else 0,
                r.num_computed_tokens,
            )
            for r in scheduler.running
        ]  # fmt: skip
        wait = plan.wait and {"request_id": plan.wait.request_id, "reason": plan.wait.reason.value}
        timeline.steps.append(
            StepRecord(
                len(timeline.steps), start, now - start, rows, plan.width, plan.num_computed_tokens,
                len(scheduler.waiting), wait, [r.request_id for r in plan.admitted],
                [r.request_id for r in scheduler.running if r.finished and r.finish_time == now],
                [r.request_id for r in plan.preempted], kv.num_used_blocks, kv.num_free_blocks,
                sum(row.context for row in rows),
            )
        )  # fmt: skip
        for row in plan.rows:
            request, record = row.request, records[row.request.request_id]
            record.num_output_tokens, record.num_preemptions = request.num_output_tokens, request.num_preemptions
            record.first_scheduled_time, record.finish_time = request.first_scheduled_time, request.finish_time
            record.finish_reason = request.finish_reason and request.finish_reason.value
        scheduler.update()
    return timeline


def _state(request: Request, planned: dict) -> RowState:
    if request.finished:
        return RowState.FINISHED
    if id(request) not in planned:
        return RowState.STALLED
    return RowState.DECODE if request.is_decoding else RowState.PREFILL
