"""How busy the hardware was, under definitions that are easily taken for each other. Computed from a timeline."""

from __future__ import annotations

from collections.abc import Mapping

from .runners.roofline import CostModel, StepWork
from .timeline import RequestRecord, RowState, StepRecord, Timeline

UTILISATIONS: dict[str, str] = {
    "busy_share": (
        "time inside steps / makespan: about what nvidia-smi shows (share of the sampling period in which at least one "
        "kernel ran); an upper bound, for the pauses between a step's kernels count as busy"
    ),
    "mfu": (
        "model FLOPs utilisation: FLOPs that the served tokens need, each once, / (dense peak x makespan); padding, "
        "rows of ended requests and recomputed tokens do not count (Chowdhery et al., PaLM, 2022, appendix B)"
    ),
    "hfu": "hardware FLOPs utilisation: the same with every FLOP performed, padding and ended rows included",
    "bandwidth_utilisation": (
        "bytes of weights and KV cache read / (peak memory bandwidth x makespan); reading for padding and ended rows "
        "counts, since memory works for them too; activations and KV writes are left out"
    ),
    "useful_slot_share": (
        "slot-seconds in which a useful token was computed / (slots x makespan): by time, so that a long step counts "
        "more than a short one and pauses between steps count as idle; slot_occupancy, by step, counts each step once"
    ),
}


def utilisation(timeline: Timeline, cost: CostModel) -> dict[str, float | None]:
    """Shares between 0 and 1 by the names in UTILISATIONS; None for a timeline without duration.

    `cost` is the cost model that the timeline was simulated on, or that of the machine where it was measured. Peaks are
    its data sheet's (dense FLOP/s in its dtype, bytes/s), times the number of devices. Of a slice: the slice's span.
    """
    duration = timeline.duration
    if not duration:
        return dict.fromkeys(UTILISATIONS)
    flops = bytes_read = slot_seconds = busy = 0.0
    for step in timeline.steps:
        work = work_of(step, timeline.requests)
        flops += cost.model.linear_flops(work.num_tokens, work.num_sampled)
        flops += cost.model.attention_flops(work.decode_pairs + work.prefill_pairs)
        bytes_read += step_bytes(work, cost)
        slot_seconds += sum(row.num_tokens > 0 for row in step.rows) * step.duration
        busy += step.duration
    peak_flops = cost.device.rate(cost.dtype) * cost.num_gpus * duration
    return {
        "busy_share": busy / duration,
        "mfu": model_flops(timeline, cost) / peak_flops,
        "hfu": flops / peak_flops,
        "bandwidth_utilisation": bytes_read / (cost.device.bandwidth * cost.num_gpus * duration),
        "useful_slot_share": slot_seconds / (timeline.num_slots * duration),
    }


def step_bytes(work: StepWork, cost: CostModel) -> float:
    """Bytes that a step reads from device memory: all weights once, and the cached keys and values."""
    return cost.model.linear_bytes(cost.dtype) + work.kv_tokens_read * cost.model.kv_bytes_per_token(cost.dtype)


def work_of(step: StepRecord, requests: Mapping[str, RequestRecord]) -> StepWork:
    """What a recorded step asked of the device: the counts that `runners.roofline.step_work` makes of its plan."""
    if step.width is not None:
        rows, width = len(step.rows), step.width
        context = width + max(row.context - row.num_tokens - (row.num_tokens == 0) for row in step.rows)
        pairs = rows * width * (context - (width - 1) / 2)
        decode, prefill = (pairs, 0.0) if width == 1 else (0.0, pairs)
        return StepWork(rows * width, rows, rows, rows * context, decode, prefill)
    num_tokens = num_sampled = num_rows = kv_tokens = decode_pairs = 0
    prefill_pairs = 0.0
    for row in step.rows:
        n = row.num_tokens
        if n == 0:  # stalled
            continue
        num_rows += 1
        num_tokens += n
        kv_tokens += row.context
        if n == 1:
            decode_pairs += row.context
        else:
            prefill_pairs += n * (row.context - (n - 1) / 2)
        # A prompt's last chunk is sampled. After a preemption what was generated is part of that prompt, so the record
        # can't say which chunk is the last: all that reach beyond the prompt count.
        num_sampled += row.state is RowState.DECODE or row.context >= requests[row.request_id].num_prompt_tokens
    return StepWork(num_tokens, num_sampled, num_rows, kv_tokens, decode_pairs, prefill_pairs, num_rows)


def model_flops(timeline: Timeline, cost: CostModel) -> float:
    """FLOPs that the tokens made within the timeline's span need, each token computed once and alone in its row.

    A prompt counts when its first token comes out, less what was found in the prefix cache.
    """
    start, end = timeline.span
    sliced = "slice" in timeline.header
    num_tokens = num_sampled = 0
    pairs = 0.0
    for request in timeline.requests.values():
        prompt, made = request.num_prompt_tokens, len(request.token_times)
        first = 0
        if sliced:  # the tokens first:made are those of the span; the clock's last digits may differ
            inside = [i for i, t in enumerate(request.token_times) if start < t - 1e-9 <= end]
            first, made = (inside[0], inside[-1] + 1) if inside else (0, 0)
        if not made:
            continue
        # tokens computed before, or found in the prefix cache; making token i computes up to prompt + i - 1
        done = prompt + first - 1 if first else request.num_cached_tokens
        last = prompt + made - 1
        num_tokens += last - done
        num_sampled += made - first
        pairs += (last * (last + 1) - done * (done + 1)) / 2
    return cost.model.linear_flops(num_tokens, num_sampled) + cost.model.attention_flops(pairs)
