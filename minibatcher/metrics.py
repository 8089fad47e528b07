"""What a timeline amounts to in numbers. Every definition stands here, once, and is printed beside the numbers."""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableSequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from .errors import InvalidParameter
from .numeric import is_number
from .request import PRIORITY_CLASSES
from .timeline import DeviceSample, RequestRecord, RowState, Timeline

COMPLETED = ("stop", "length")  # finish reasons of requests that were served to their end
PERCENTILES = (50, 90, 99)
MIN_SPANNED = 0.9  # of a run's time that power samples must span before its energy is told

DEFINITIONS: dict[str, str] = {
    "makespan_s": "seconds from the first arrival to the last event",
    "output_tokens_per_s": "generated tokens of all requests (aborted ones too) per second of makespan",
    "total_tokens_per_s": "the same plus prompt tokens of requests that got a first token, each prompt counted once",
    "requests_per_s": "requests served to their end (finish reason stop or length) per second of makespan",
    "admissions_per_s": "requests let into a slot per second of makespan; again after a preemption counts again",
    "queue_ms": "queue time: milliseconds from arrival until first scheduled; waits after a preemption are not in it",
    "ttft_ms": "time to first token: milliseconds from arrival to the first token, queue time included",
    "itl_ms": "inter-token latency: milliseconds between successive tokens of a request, all requests' gaps pooled",
    "tpot_ms": "time per output token: milliseconds from first to last token / (tokens - 1), per request of 2 or more",
    "e2el_ms": "end-to-end latency: milliseconds from arrival to the end, of requests served to their end",
    "slot_occupancy": "slots that computed a useful token / all slots, mean over steps",
    "slot_occupancy_time": "the same with each step weighted by its duration; time between steps is not in it",
    "slot_shares": "shares of steps x slots: prefill, decode, stalled, finished (ended, still in the batch), idle",
    "batch_fill": "slots that hold a request / all slots, mean over steps",
    "batch_efficiency": "slots that computed a useful token / slots that hold a request; x fill = slot occupancy",
    "padding_share": "padding tokens / all tokens computed; the rows of ended requests are padding",
    "padding_prompt_share": "padding in rows of live requests (prompts filled up to the longest) / all tokens computed",
    "padding_finished_share": "padding in rows of requests that have ended / all tokens computed",
    "kv_occupancy": (
        "tokens_of_reserved: tokens held / room for tokens in the blocks in use, shared ones counted once; "
        "blocks_of_pool: blocks in use / all blocks, mean over steps; blocks_peak: the highest; cached_of_pool: blocks "
        "that nobody owns but that hold prefixes / all blocks, mean over steps. In use + cached + free = all"
    ),
    "queue_depth": "requests waiting after admission: mean over steps, and highest",
    "busy_share": "time inside steps / makespan",
    "tokens_per_step": "tokens computed per step, padding included",
    "num_preemptions": (
        "times that a running request lost its slot, and its KV was dropped or swapped to host memory: for want of KV "
        "memory, and with the ordering `priority` also for want of a slot, when a more urgent request waits"
    ),
    "num_swapped_blocks": "KV blocks copied to host memory or back: one that goes and comes counts twice",
    "num_lost_tokens": (
        "what preemptions dropped and the prefix cache did not hold any more; it may be dropped though memory is "
        "plenty, since `priority` preempts for slots too"
    ),
    "lost_share": "the same / all tokens computed",
    "prefix_hit_rate": (
        "prompt tokens found in the prefix cache when a request was first let in / prompt tokens of all requests let in"
    ),
    "prefix_bound": (
        "the same share for a cache without end: whole blocks that an earlier request began with, as if they had been "
        "there at once; never a prompt's last token"
    ),
    "refusals": "requests turned away when they arrived, by reason",
    "classes": (
        "where requests have several priorities, for each class: requests (n), how many were served to their end and "
        "refused, TTFT (its n: those that got a token), TPOT, and the share of output tokens while all had work: of "
        "the tokens between the moment when the last class to come has its first request and the moment when the first "
        "class to be through has its last token; classes without any token aside. Later the rest has the server for "
        "itself, and the shares of a whole run say only who asked for how much"
    ),
    "tenants": "the same for each tenant, where there are several",
    "goodput_per_s": (
        "requests served to their end within every objective stated (for their class, or for all), per second of "
        "makespan"
    ),
    "cost_per_million_output_tokens": "price per hour x makespan in hours / generated tokens x 1,000,000",
    "cost_per_request": "price per hour x makespan in hours / requests served to their end",
    "gpu_busy_share": (
        "GPU utilisation as nvidia-smi shows it, mean of samples: share of the driver's sampling period (1/6 to 1 s; "
        "the first samples tell of the time before the run) in which at least one kernel ran. It says neither how much "
        "of the chip worked (one small kernel after another shows 100 %) nor to what use (padding counts): it is not a "
        "share of peak (mfu, bandwidth_utilisation are), nor useful throughput"
    ),
    "gpu_power_w": (
        "power drawn by the GPU (its board, not the host), mean over the time sampled, in watts; most GPUs since 2020 "
        "report a mean over the last second, so that runs of a few seconds show part of what came before them"
    ),
    "gpu_memory_peak_gib": (
        "memory in use on the GPU, highest sample, in GiB (2^30 bytes): by all processes, and all that was reserved, "
        "filled or not"
    ),
    "joules_per_output_token": (
        "gpu_power_w x makespan / generated tokens: what prompts, padding and idle time took is in it; only where "
        "samples span at least 90 % of the makespan"
    ),
    "percentiles": "p50, p90, p99: interpolated linearly between sorted samples; n: number of samples",
}


def summarize(timeline: Timeline) -> dict[str, Any]:
    """Every metric of a run, as plain numbers, dicts and None (where there is no sample): it can go into JSON as it is.

    DEFINITIONS says what each one means. Of a slice, rates and step metrics are those of the slice's span; latencies
    are those of all requests in it.
    """
    start, end = timeline.span
    requests = list(timeline.requests.values())

    def inside(moment: float) -> bool:
        return "slice" not in timeline.header or start < moment - 1e-9 <= end  # the clock's last digits may differ

    output_tokens = sum(inside(t) for r in requests for t in r.token_times)
    prompt_tokens = sum(r.num_prompt_tokens for r in requests if r.token_times and inside(r.token_times[0]))
    num_served = sum(
        r.finish_reason in COMPLETED and r.finish_time is not None and inside(r.finish_time) for r in requests
    )
    admitted = sum(len(step.admitted) for step in timeline.steps)
    lost, cached = sum(r.num_lost_tokens for r in requests), sum(r.num_cached_tokens for r in requests)
    let_in = sum(r.num_prompt_tokens for r in requests if r.first_scheduled_time is not None or r.token_times)
    steps = _unknown_steps() if timeline.at_client else _step_metrics(timeline)
    reasons = Counter(r.finish_reason or "unfinished" for r in requests)
    return {
        "clock": timeline.clock,
        "makespan_s": end - start,
        "num_requests": len(requests),
        "num_finished": dict.fromkeys(("stop", "length", "abort"), 0) | dict(reasons),
        "num_output_tokens": output_tokens,
        "num_prompt_tokens": prompt_tokens,
        "output_tokens_per_s": ratio(output_tokens, end - start),
        "total_tokens_per_s": ratio(output_tokens + prompt_tokens, end - start),
        "requests_per_s": ratio(num_served, end - start),
        "admissions_per_s": None if timeline.at_client else ratio(admitted, end - start),
        "queue_ms": spread(queue_time(r) for r in requests),
        "ttft_ms": spread(ttft(r) for r in requests),
        "itl_ms": spread(gap for r in requests for gap in itl(r)),
        "tpot_ms": spread(tpot(r) for r in requests),
        "e2el_ms": spread(e2el(r) for r in requests),
        **steps,
        "num_lost_tokens": None if timeline.at_client else lost,
        "lost_share": ratio(lost, steps["num_computed_tokens"] or 0) if "slice" not in timeline.header else None,
        "num_cached_tokens": cached,
        "prefix_hit_rate": ratio(cached, let_in),
        "refusals": dict(Counter(refusal(r.error) for r in requests if r.finish_reason == "refused")),
        "classes": _by_class(requests),
        "tenants": _by_tenant(requests),
        **_device_metrics(timeline, output_tokens),
    }


def queue_time(request: RequestRecord) -> float | None:
    """Seconds from arrival until first scheduled, None if it never was."""
    return None if request.first_scheduled_time is None else request.first_scheduled_time - request.arrival_time


def ttft(request: RequestRecord) -> float | None:
    """Time to first token in seconds, queue time included; None without a token."""
    return request.token_times[0] - request.arrival_time if request.token_times else None


def itl(request: RequestRecord) -> list[float]:
    """Inter-token latencies in seconds: one fewer than there are tokens."""
    times = request.token_times
    return [later - earlier for earlier, later in pairwise(times)]


def tpot(request: RequestRecord) -> float | None:
    """Time per output token after the first, in seconds; None with fewer than two tokens."""
    times = request.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def e2el(request: RequestRecord) -> float | None:
    """End-to-end latency in seconds; None for a request that was aborted or has not ended."""
    if request.finish_time is None or request.finish_reason not in COMPLETED:
        return None
    return request.finish_time - request.arrival_time


def refusal(error: str | None) -> str:
    """The reason in a refusal's sentence, without its names and numbers."""
    return re.sub(r""" (['"]).*?\1""", "", (error or "no reason told").split(": need ")[0])


def class_name(priority: int) -> str:
    """What the class of this priority is called in tables and on the command line."""
    known = 0 <= priority < len(PRIORITY_CLASSES)
    return PRIORITY_CLASSES[priority] if known else f"priority {priority}"


def goodput(
    timeline: Timeline,
    *,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    itl_p99_ms: float | None = None,
    e2el_ms: float | None = None,
    classes: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, Any]:
    """Requests per second that were served to their end within every objective given (milliseconds, at most).

    itl_p99_ms bounds the 99th percentile of the request's own gaps. A request of one token has neither gaps nor a TPOT
    and meets those objectives. classes: objectives of single classes, as {"paid": {"ttft_ms": 200}} (class_name); each
    replaces the objective of that name for all, and a class without any is good when served to its end.
    Returns the objective, `num_good`, `num_requests`, `good_share`, `goodput_per_s`, and under `classes` the same for
    each class. Raises InvalidParameter.
    """
    for_all = _limits({"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "itl_p99_ms": itl_p99_ms, "e2el_ms": e2el_ms})
    own = {name: _limits(limits) for name, limits in (classes or {}).items()}
    if not for_all and not any(own.values()):
        raise InvalidParameter("goodput needs at least one objective: ttft_ms, tpot_ms, itl_p99_ms or e2el_ms")
    _require_whole(timeline, "goodput")
    groups = _grouped(timeline.requests.values(), lambda r: r.priority)
    requests = {class_name(priority): groups[priority] for priority in sorted(groups)}
    limits = {name: for_all | own.get(name, {}) for name in (*requests, *own)}
    counts = {
        name: (sum(_is_good(r, limits[name]) for r in requests.get(name, ())), len(requests.get(name, ())))
        for name in limits
    }

    def figures(objective: dict[str, float], good: int, n: int) -> dict[str, Any]:
        return {
            "objective": objective,
            "num_good": good,
            "num_requests": n,
            "good_share": ratio(good, n),
            "goodput_per_s": ratio(good, timeline.duration),
        }

    total = [sum(column) for column in zip(*counts.values())] or [0, 0]
    return figures(for_all, *total) | {"classes": {name: figures(limits[name], *counts[name]) for name in limits}}


OBJECTIVES: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft_ms": ttft,
    "tpot_ms": tpot,
    "itl_p99_ms": lambda r: float(np.percentile(itl(r), 99)) if len(r.token_times) > 1 else None,
    "e2el_ms": e2el,
}


def _limits(objective: Mapping[str, float | None]) -> dict[str, float]:
    """The objectives that are given. Raises InvalidParameter."""
    for name, limit in objective.items():
        if name not in OBJECTIVES:
            raise InvalidParameter(f"unknown objective {name!r}; known: {', '.join(OBJECTIVES)}")
        if limit is not None:
            _require_positive(name, limit)
    return {name: limit for name, limit in objective.items() if limit is not None}


def _is_good(request: RequestRecord, limits: dict[str, float]) -> bool:
    within = all((OBJECTIVES[name](request) or 0.0) * 1e3 <= limit for name, limit in limits.items())
    return within and request.finish_reason in COMPLETED


def _grouped(requests: Iterable[RequestRecord], key: Callable[[RequestRecord], Hashable]) -> dict[Any, list]:
    groups: dict[Any, list[RequestRecord]] = {}
    for request in requests:
        groups.setdefault(key(request), []).append(request)
    return groups


@dataclass
class Group:
    """What is kept of a class of requests, or of a tenant. Times in seconds, on the run's clock; None where a
    request has no such time."""

    n: int = 0
    num_served: int = 0
    num_refused: int = 0
    first_arrival: float = math.inf
    last_token: float = -math.inf
    ttft: MutableSequence[Any] = field(default_factory=lambda: array("d"))
    tpot: MutableSequence[Any] = field(default_factory=lambda: array("d"))


def group_figures(
    groups: Mapping[str, Group], tokens_until: Callable[[str, float], float]
) -> dict[str, dict[str, Any]]:
    """What a table says of several groups of requests. tokens_until: output tokens of a group up to a moment."""
    if len(groups) < 2:
        return {}
    begun = [group for group in groups.values() if group.last_token > -math.inf]
    start = max((group.first_arrival for group in begun), default=0.0)
    end = min((group.last_token for group in begun), default=0.0)
    tokens = {name: tokens_until(name, end) - tokens_until(name, start) if start < end else 0.0 for name in groups}
    return {
        name: {
            "n": group.n,
            "num_served": group.num_served,
            "num_refused": group.num_refused,
            "ttft_ms": spread(group.ttft),
            "tpot_ms": spread(group.tpot),
            "output_share": ratio(tokens[name], sum(tokens.values())),
        }
        for name, group in groups.items()
    }


def _by_class(requests: list[RequestRecord]) -> dict[str, dict[str, Any]]:
    groups = _grouped(requests, lambda r: r.priority)
    return _figures_of({class_name(priority): groups[priority] for priority in sorted(groups)})


def _by_tenant(requests: list[RequestRecord]) -> dict[str, dict[str, Any]]:
    groups = _grouped(requests, lambda r: r.tenant)
    return _figures_of({tenant: groups[tenant] for tenant in sorted(groups)})


def _figures_of(groups: dict[str, list[RequestRecord]]) -> dict[str, dict[str, Any]]:
    figures = {
        name: Group(
            n=len(requests),
            num_served=sum(r.finish_reason in COMPLETED for r in requests),
            num_refused=sum(r.finish_reason == "refused" for r in requests),
            first_arrival=min(r.arrival_time for r in requests),
            last_token=max((r.token_times[-1] for r in requests if r.token_times), default=-math.inf),
            ttft=[ttft(r) for r in requests],
            tpot=[tpot(r) for r in requests],
        )
        for name, requests in groups.items()
    }
    return group_figures(
        figures, lambda name, moment: float(sum(bisect_right(r.token_times, moment) for r in groups[name]))
    )


def cost(timeline: Timeline, price_per_hour: float) -> dict[str, float | None]:
    """What the run cost at a price per hour (any currency): in all, per million output tokens, per request served.

    Compare costs only at the same latency objective: `goodput` says who meets it. Raises InvalidParameter.
    """
    _require_positive("price_per_hour", price_per_hour)
    _require_whole(timeline, "cost")
    total = price_per_hour * timeline.duration / 3600
    tokens = sum(len(r.token_times) for r in timeline.requests.values())
    served = sum(r.finish_reason in COMPLETED for r in timeline.requests.values())
    return {
        "price_per_hour": price_per_hour,
        "cost_total": total,
        "cost_per_million_output_tokens": ratio(total * 1e6, tokens),
        "cost_per_request": ratio(total, served),
    }


def _step_metrics(timeline: Timeline) -> dict[str, Any]:
    steps, slots = timeline.steps, timeline.num_slots
    states: Counter[RowState] = Counter()
    num_working: list[int] = []  # rows, by step
    num_held: list[int] = []
    finished_padding = 0
    for step in steps:
        counts = Counter(row.state for row in step.rows)
        states.update(counts)
        num_held.append(len(step.rows))
        num_working.append(sum(row.num_tokens > 0 for row in step.rows))
        finished_padding += (step.width or 0) * counts[RowState.FINISHED]
    working, held = np.array(num_working), np.array(num_held)
    durations = np.array([step.duration for step in steps])
    computed = sum(step.num_computed_tokens for step in steps)
    padding = sum(step.num_padding_tokens for step in steps)
    places = len(steps) * slots
    shares = {state.value: ratio(states[state], places) for state in RowState}
    used = np.array([step.kv_used_blocks for step in steps])
    cached = np.array([step.kv_cached_blocks for step in steps])
    blocks = np.array([step.num_blocks for step in steps])
    tokens_held = sum(step.kv_tokens for step in steps)
    room = int(used.sum()) * timeline.header.get("block_size", 0)
    pool_shares = used / np.maximum(blocks, 1)
    waiting = np.array([step.num_waiting for step in steps])
    return {
        "num_steps": len(steps),
        "num_preemptions": sum(len(step.preempted) for step in steps),
        "num_swapped_blocks": sum(step.num_swapped_blocks for step in steps),
        "slot_occupancy": ratio(working.sum(), places),
        "slot_occupancy_time": ratio(float(working @ durations), durations.sum() * slots) if steps else None,
        "slot_shares": shares | {"idle": ratio(places - held.sum(), places)},
        "batch_fill": ratio(held.sum(), places),
        "batch_efficiency": ratio(working.sum(), held.sum()),
        "num_computed_tokens": computed,
        "num_padding_tokens": padding,
        "padding_share": ratio(padding, computed),
        "padding_prompt_share": ratio(padding - finished_padding, computed),
        "padding_finished_share": ratio(finished_padding, computed),
        "tokens_per_step": ratio(computed, len(steps)),
        "kv_occupancy": {
            "tokens_of_reserved": ratio(tokens_held, room),
            "blocks_of_pool": float(pool_shares.mean()) if steps else None,
            "blocks_peak": float(pool_shares.max()) if steps else None,
            "cached_of_pool": float((cached / np.maximum(blocks, 1)).mean()) if steps else None,
        },
        "queue_depth": {
            "mean": float(waiting.mean()) if steps else None,
            "max": int(waiting.max()) if steps else None,
        },
        "busy_share": ratio(durations.sum(), timeline.duration),
    }


def _unknown_steps() -> dict[str, Any]:
    """The same keys without a number: nobody outside a server knows its steps."""
    names = _step_metrics(Timeline(header={"max_num_seqs": 0}))
    return {name: dict.fromkeys(value) if isinstance(value, dict) else None for name, value in names.items()}


def _device_metrics(timeline: Timeline, output_tokens: int) -> dict[str, float | None]:
    """Figures of the GPU that was sampled; none at all where nothing was."""
    start, end = timeline.span
    samples = [sample for sample in timeline.device_samples if sample.time >= start]  # the last may follow the end
    if not samples:
        return {}
    busy = [s.utilisation for s in samples if s.utilisation is not None]
    memory = [s.memory_bytes for s in samples if s.memory_bytes is not None]
    power, seconds = mean_power(timeline.device_samples, start, end)
    energy = power * (end - start) if power is not None and seconds >= MIN_SPANNED * (end - start) else None
    return {
        "gpu_busy_share": float(np.mean(busy)) if busy else None,
        "gpu_power_w": power,
        "gpu_memory_peak_gib": max(memory) / 2**30 if memory else None,
        "joules_per_output_token": None if energy is None else ratio(energy, output_tokens),
    }


def mean_power(samples: Iterable[DeviceSample], start: float, end: float) -> tuple[float | None, float]:
    """Watts, mean over the time between `start` and `end` that the samples span, and how many seconds that is.

    By the trapezoidal rule: power goes straight from sample to sample. None, 0.0 where they span no time.
    """
    points = [(s.time, s.power_w) for s in samples if s.power_w is not None]
    times, watts = np.array(points).reshape(-1, 2).T
    low, high = max([start, *times[:1]]), min([end, *times[-1:]])
    if not points or low >= high:
        return None, 0.0
    moments = np.array([low, *times[(times > low) & (times < high)], high])
    values = np.interp(moments, times, watts)
    joules = np.diff(moments) @ (values[:-1] + values[1:]) / 2
    return float(joules / (high - low)), float(high - low)


def spread(seconds: Iterable[float | None]) -> dict[str, Any]:
    """mean, p50, p90, p99 in milliseconds and the number of samples; None for what was never measured."""
    samples = np.array([s for s in seconds if s is not None]) * 1e3
    names = ["mean", *(f"p{p}" for p in PERCENTILES)]
    if not samples.size:
        return dict.fromkeys(names) | {"n": 0}
    values = [samples.mean(), *np.percentile(samples, PERCENTILES)]
    return {name: float(value) for name, value in zip(names, values)} | {"n": samples.size}


def ratio(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None


def _require_positive(name: str, value: float) -> None:
    if not is_number(value) or value <= 0:
        raise InvalidParameter(f"{name} must be a number above 0, not {value!r}")


def _require_whole(timeline: Timeline, what: str) -> None:
    if "slice" in timeline.header:
        first, last = timeline.header["slice"]
        raise InvalidParameter(f"{what} needs a whole run, and this timeline is cut to steps {first} to {last}")
