"""Running sums in place of a timeline: the same figures for a day of traffic, in memory that hardly grows."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from .metrics import COMPLETED, PERCENTILES, Group, class_name, group_figures, ratio, refusal, spread
from .request import FinishReason, Request
from .runners.base import StepResult
from .scheduling.base import Scheduler, StepPlan
from .timeline import RowState

GAP_LOW, GAP_RATIO, GAP_BINS = 1e-6, 1.005, 5_500  # from 1 µs to about nine days, half a per cent a bin
TIME_BINS = 1024  # of a run's time, at least half of them in use


class _Histogram:
    """How many tokens there were up to a moment, in bins that become wider as time goes on."""

    def __init__(self) -> None:
        self._counts, self._width = np.zeros(TIME_BINS, dtype=np.int64), 1e-6

    def add(self, times: np.ndarray) -> None:
        """times: seconds, at least 0."""
        while times.size and times.max() >= TIME_BINS * self._width:
            self._counts = np.append(self._counts.reshape(-1, 2).sum(axis=1), np.zeros(TIME_BINS // 2, dtype=np.int64))
            self._width *= 2
        self._counts += np.bincount((times / self._width).astype(int), minlength=TIME_BINS)

    def until(self, moment: float) -> float:
        """Tokens up to a moment; within a bin they count as evenly spread."""
        bins = np.arange(TIME_BINS + 1) * self._width
        return float(np.interp(moment, bins, np.append(0, np.cumsum(self._counts))))


class Tally:
    """A recorder like TimelineRecorder that keeps sums, one number a request and latency, and a histogram of ITL.

    `summary` has the keys of metrics.summarize. Different from there: ITL percentiles are good to half a per cent,
    shares of output tokens to what is made in about a thousandth of the run, a row of one token counts as a decode, and
    single requests and steps can't be looked at afterwards.
    """

    def __init__(self) -> None:
        self.begin("simulated", {})

    def begin(self, clock: str, header: dict[str, Any]) -> None:
        self.clock, self.header = clock, header
        self._latencies = {name: array("d") for name in ("queue", "ttft", "tpot", "e2el")}
        self._ended: list[tuple[list[float], int, str]] = []  # token times, class, tenant: not counted yet
        self._gaps, self._gap_sum = np.zeros(GAP_BINS, dtype=np.int64), 0.0
        self._launched: tuple[StepPlan, Scheduler, float] | None = None  # and not stepped yet
        self._reasons: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._sums: defaultdict[str, float] = defaultdict(int)  # whole numbers but for times and shares
        self._states: Counter[RowState] = Counter()
        self._classes: defaultdict[int, Group] = defaultdict(Group)
        self._tenants: defaultdict[str, Group] = defaultdict(Group)
        self._tokens: defaultdict[tuple[str, int | str], _Histogram] = defaultdict(_Histogram)  # of classes and tenants
        self._peaks = {"waiting": 0, "kv_share": 0.0}
        self._first, self._last = float("inf"), 0.0

    @property
    def requests(self) -> dict[str, Any]:
        """Empty: single requests are not kept."""
        return {}

    @property
    def timeline(self) -> Tally:
        """In place of the timeline that it does not keep."""
        return self

    def knows(self, request_id: str) -> bool:
        return False  # ids of the past are not kept; the engine knows those of the present

    def opened(self, request: Request) -> None:
        self._first = min(self._first, request.arrival_time)
        self._sums["requests"] += 1
        for group in (self._classes[request.priority], self._tenants[request.tenant]):
            group.n += 1
            group.first_arrival = min(group.first_arrival, request.arrival_time)

    def launched(self, plan: StepPlan, scheduler: Scheduler, start: float) -> None:
        kv = scheduler.kv  # as it is now: what the step computes may be shared before it is recorded
        self._launched = plan, scheduler, start
        self._kv = kv.num_used_blocks, kv.num_cached_blocks, kv.num_shared_blocks * kv.block_size, kv.num_blocks

    def stepped(self, result: StepResult, ended: Sequence[Request], end: float) -> None:
        if self._launched is None:  # `launched` has failed
            return
        plan, scheduler, start = self._launched
        used, cached, shared_tokens, pool = self._kv
        self._launched = None
        sums, running = self._sums, scheduler.running
        counts = list(plan.num_tokens.values())
        idle_rows = counts.count(0)
        working = len(counts) - idle_rows
        decodes = counts.count(1)
        useful, computed = sum(counts), result.num_computed_tokens or plan.num_computed_tokens
        states = self._states
        states[RowState.DECODE] += decodes
        states[RowState.PREFILL] += working - decodes
        states[RowState.FINISHED] += idle_rows
        states[RowState.STALLED] += len(running) - len(counts)
        sums["steps"] += 1
        sums["working"] += working
        sums["working_time"] += working * (end - start)
        sums["held"] += len(running)
        sums["busy"] += end - start
        sums["computed"] += computed
        sums["padding"] += computed - useful
        sums["finished_padding"] += (plan.width or 0) * idle_rows
        sums["admitted"] += len(plan.admitted)
        sums["preempted"] += len(plan.preempted)
        sums["swapped"] += sum([len(swap.device_blocks) for swap in plan.swaps])
        sums["waiting"] += len(scheduler.waiting)
        sums["kv_blocks"] += used
        sums["kv_share"] += used / pool
        sums["kv_cached_share"] += cached / pool
        sums["kv_tokens"] += sum([request.num_computed_tokens for request in running]) - shared_tokens
        self._peaks["waiting"] = max(self._peaks["waiting"], len(scheduler.waiting))
        self._peaks["kv_share"] = max(self._peaks["kv_share"], used / pool)
        self._last = end

    def closed(self, request: Request) -> None:
        times, sums, latencies = request.token_times, self._sums, self._latencies
        assert request.finish_reason is not None and request.finish_time is not None  # it has ended
        self._reasons[request.finish_reason.value] += 1
        self._last = max(self._last, request.finish_time)
        if request.finish_reason is FinishReason.REFUSED:
            self._refusals[refusal(request.error)] += 1
        groups = self._classes[request.priority], self._tenants[request.tenant]
        for group in groups:
            group.num_served += request.finish_reason in COMPLETED
            group.num_refused += request.finish_reason is FinishReason.REFUSED
        sums["lost"] += request.num_lost_tokens
        sums["cached"] += request.num_cached_tokens
        if request.first_scheduled_time is not None:
            sums["let_in"] += request.num_prompt_tokens
            latencies["queue"].append(request.first_scheduled_time - request.arrival_time)
        if request.finish_reason in COMPLETED:
            latencies["e2el"].append(request.finish_time - request.arrival_time)
        if not times:
            return
        sums["output"] += len(times)
        sums["prompt"] += request.num_prompt_tokens
        first, per_token = times[0] - request.arrival_time, None
        latencies["ttft"].append(first)
        if len(times) > 1:
            per_token = (times[-1] - times[0]) / (len(times) - 1)
            latencies["tpot"].append(per_token)
        self._ended.append((times, request.priority, request.tenant))
        if len(self._ended) == 1_000:
            self._count_times()
        for group in groups:
            group.last_token = max(group.last_token, times[-1])
            group.ttft.append(first)
            if per_token is not None:
                group.tpot.append(per_token)

    def _count_times(self) -> None:
        """Of those that have ended: gaps between tokens, and each group's tokens in time."""
        ended, priorities, tenants = zip(*self._ended)
        lengths = [len(times) for times in ended]
        all_times = np.fromiter(chain.from_iterable(ended), dtype=float, count=sum(lengths))
        gaps = np.delete(np.diff(all_times), np.cumsum(lengths)[:-1] - 1)  # not from one request to the next
        bins = np.log(np.maximum(gaps, GAP_LOW) / GAP_LOW) / np.log(GAP_RATIO)
        self._gaps += np.bincount(np.minimum(bins.astype(int), GAP_BINS - 1), minlength=GAP_BINS)
        self._gap_sum += float(gaps.sum())
        for what, owned_by in (("priority", priorities), ("tenant", tenants)):
            names, which = np.unique(owned_by, return_inverse=True)
            owners = np.repeat(which, lengths)
            pieces = np.split(all_times[np.argsort(owners)], np.cumsum(np.bincount(owners))[:-1])
            for name, times in zip(names.tolist(), pieces):
                self._tokens[what, name].add(times)
        self._ended = []

    def _groups(self, what: str, groups: dict[Any, Group], called: Callable[[Any], str]) -> dict[str, Any]:
        keys = {called(key): key for key in sorted(groups)}
        return group_figures(
            {name: groups[key] for name, key in keys.items()},
            lambda name, moment: self._tokens[what, keys[name]].until(moment),
        )

    def summary(self) -> dict[str, Any]:
        """What metrics.summarize returns for a timeline."""
        if self._ended:
            self._count_times()
        sums, header = self._sums, self.header
        steps, span = sums["steps"], self._last - min(self._first, self._last)
        places = steps * header["max_num_seqs"]
        served = sum(self._reasons[reason] for reason in COMPLETED)
        reasons = dict.fromkeys(("stop", "length", "abort"), 0) | dict(self._reasons)
        return {
            "clock": self.clock,
            "makespan_s": span,
            "num_requests": sums["requests"],
            "num_finished": reasons,
            "num_output_tokens": sums["output"],
            "num_prompt_tokens": sums["prompt"],
            "output_tokens_per_s": ratio(sums["output"], span),
            "total_tokens_per_s": ratio(sums["output"] + sums["prompt"], span),
            "requests_per_s": ratio(served, span),
            "admissions_per_s": ratio(sums["admitted"], span),
            "queue_ms": spread(self._latencies["queue"]),
            "ttft_ms": spread(self._latencies["ttft"]),
            "itl_ms": self._gap_spread(),
            "tpot_ms": spread(self._latencies["tpot"]),
            "e2el_ms": spread(self._latencies["e2el"]),
            "num_steps": steps,
            "num_swapped_blocks": sums["swapped"],
            "num_lost_tokens": sums["lost"],
            "lost_share": ratio(sums["lost"], sums["computed"]),
            "num_cached_tokens": sums["cached"],
            "prefix_hit_rate": ratio(sums["cached"], sums["let_in"]),
            "refusals": dict(self._refusals),
            "classes": self._groups("priority", self._classes, class_name),
            "tenants": self._groups("tenant", self._tenants, str),
            "num_preemptions": sums["preempted"],
            "slot_occupancy": ratio(sums["working"], places),
            "slot_occupancy_time": ratio(sums["working_time"], sums["busy"] * header["max_num_seqs"]),
            "slot_shares": {state.value: ratio(self._states[state], places) for state in RowState}
            | {"idle": ratio(places - sums["held"], places)},
            "batch_fill": ratio(sums["held"], places),
            "batch_efficiency": ratio(sums["working"], sums["held"]),
            "num_computed_tokens": sums["computed"],
            "num_padding_tokens": sums["padding"],
            "padding_share": ratio(sums["padding"], sums["computed"]),
            "padding_prompt_share": ratio(sums["padding"] - sums["finished_padding"], sums["computed"]),
            "padding_finished_share": ratio(sums["finished_padding"], sums["computed"]),
            "tokens_per_step": ratio(sums["computed"], steps),
            "kv_occupancy": {
                "tokens_of_reserved": ratio(sums["kv_tokens"], sums["kv_blocks"] * header["block_size"]),
                "blocks_of_pool": ratio(sums["kv_share"], steps),
                "blocks_peak": self._peaks["kv_share"] if steps else None,
                "cached_of_pool": ratio(sums["kv_cached_share"], steps),
            },
            "queue_depth": {
                "mean": ratio(sums["waiting"], steps),
                "max": self._peaks["waiting"] if steps else None,
            },
            "busy_share": ratio(sums["busy"], span),
        }

    def _gap_spread(self) -> dict[str, Any]:
        names, n = ["mean", *(f"p{p}" for p in PERCENTILES)], int(self._gaps.sum())
        if not n:
            return dict.fromkeys(names) | {"n": 0}
        ranks = np.array(PERCENTILES) / 100 * (n - 1)
        low, high = (self._gap_of_rank(rank) for rank in (np.floor(ranks), np.ceil(ranks)))
        values = low + (high - low) * (ranks % 1)  # interpolated as in metrics
        return dict(zip(names, [self._gap_sum / n * 1e3, *values.tolist()])) | {"n": n}

    def _gap_of_rank(self, ranks: np.ndarray) -> np.ndarray:
        """Milliseconds of the gaps of these ranks (0 is the shortest): the middles of their bins."""
        bins = np.searchsorted(np.cumsum(self._gaps), ranks, side="right")
        return GAP_LOW * GAP_RATIO ** (bins + 0.5) * 1e3
