"""What /metrics shows: running sums of an engine's work, in Prometheus' format.

A metric whose meaning is vLLM's has vLLM's name (`vllm:`), so that a dashboard made for vLLM shows this server; what
vLLM does not count, or counts otherwise, is called `minibatcher:`. Every label has a few values known beforehand:
neither requests nor the names that clients send may make one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from .recorder import ServeRecorder

Bounds = Sequence[float]

# vLLM's bounds, and finer ones below them: a token of a small model takes a millisecond, not ten.
LATENCY_S: Bounds = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120)
LATENCY_S = (*LATENCY_S, 240, 480, 960, 1920, 7680)
TTFT_S: Bounds = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TTFT_S = (*TTFT_S, 640, 2560)
TOKEN_S: Bounds = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5)
TOKEN_S = (*TOKEN_S, 10, 20, 40, 80)
STEP_TOKENS: Bounds = (1, *(2**i for i in range(3, 15)))
PREEMPTIONS: Bounds = (1, 2, 3, 4, 5, 10, 20)

# name → what it says, and its label beside model_name
GAUGES = {
    "vllm:num_requests_running": "Requests that hold a slot and have not ended.",
    "vllm:num_requests_waiting": "Requests in the queue.",
    "vllm:kv_cache_usage_perc": "KV blocks in use, as a share of all: 1 is full. Blocks kept only for reuse are free.",
    "minibatcher:slots": "Most requests in one step.",
    "minibatcher:kv_blocks": "Blocks in the KV pool.",
}
COUNTERS = {
    "vllm:prompt_tokens": ("Prompt tokens of requests that got a first token, cached ones too.", None),
    "vllm:prompt_tokens_cached": ("Those of them that the prefix cache held.", None),
    "vllm:generation_tokens": ("Generated tokens.", None),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache, once a request.", None),
    "vllm:prefix_cache_hits": ("Prompt tokens found there.", None),
    "vllm:num_preemptions": ("Times that a running request had to make room.", None),
    "vllm:request_success": ("Requests that have ended, by how.", "finished_reason"),
    "minibatcher:requests_refused": ("Requests that were not let in, by the code in the answer.", "reason"),
    "minibatcher:requests_left": ("Requests whose client went away before they had ended.", None),
    "minibatcher:steps": ("Forward passes.", None),
    "minibatcher:step_seconds": ("Time inside them, in seconds.", None),
    "minibatcher:computed_tokens": ("Tokens that the device worked on, padding included.", None),
    "minibatcher:padding_tokens": ("Those of them that were padding.", None),
    "minibatcher:tenant_prompt_tokens": ("Prompt tokens of requests that have ended, by key.", "tenant"),
    "minibatcher:tenant_generation_tokens": ("Generated tokens of requests that have ended, by key.", "tenant"),
}
TOKENS: Bounds = ()  # follow from the longest context
HISTOGRAMS = {
    "vllm:iteration_tokens_total": ("Tokens computed in a step, padding aside.", STEP_TOKENS),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request served to its end.", TOKENS),
    "vllm:request_generation_tokens": ("Generated tokens of such a request.", TOKENS),
    "vllm:request_params_max_tokens": ("max_tokens of such a request.", TOKENS),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens less those in the prefix cache.", TOKENS),
    "vllm:request_num_preemptions": ("Preemptions of a request served to its end.", PREEMPTIONS),
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", TTFT_S),
    "vllm:inter_token_latency_seconds": ("Between two successive tokens of a request.", TOKEN_S),
    "vllm:request_time_per_output_token_seconds": ("From first to last token / (tokens - 1), of 2 or more.", TOKEN_S),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end, of requests served to their end.", LATENCY_S),
    "vllm:request_queue_time_seconds": ("From arrival until first scheduled.", LATENCY_S),
    "vllm:request_inference_time_seconds": ("From first scheduled to the last token.", LATENCY_S),
    "vllm:request_prefill_time_seconds": ("From first scheduled to the first token.", LATENCY_S),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", LATENCY_S),
}


class Histogram:
    """Counts of values by upper bounds. Written in one thread, read in any."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound, as Prometheus writes it, and how many values are at most that."""
        found, below = [], 0
        for bound, count in zip([*map(float, self.bounds), math.inf], list(self.counts)):
            below += count
            found.append((floatToGoString(bound), float(below)))
        return found


class Sums:
    """The counters and histograms of one model. Whoever adds to a counter is the only one: no lock is taken."""

    def __init__(self, longest: int) -> None:
        self.counters: dict[str, Counter[str]] = defaultdict(Counter, {name: Counter() for name in COUNTERS})
        self.histograms = {name: Histogram(bounds or token_bounds(longest)) for name, (_, bounds) in HISTOGRAMS.items()}

    def add(self, name: str, amount: float = 1, label: str = "") -> None:
        self.counters[name][label] += amount  # type: ignore[assignment]

    def observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)


def token_bounds(longest: int) -> Sequence[float]:
    """1, 2, 5, 10, … up to `longest`, as vLLM has them."""
    return [step * 10**power for power in range(len(str(longest))) for step in (1, 2, 5) if step * 10**power <= longest]


class ServerMetrics:
    """All that /metrics shows, of every model. longest: the longest context of them, in tokens."""

    def __init__(self, longest: int = 131_072) -> None:
        self.longest = longest
        self._recorders: dict[str, ServeRecorder] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)  # a collector is what has `collect`
        ProcessCollector(registry=self._registry)

    def exposition(self, accept: str | None) -> tuple[bytes, str]:
        """The body of an answer, and its content type. accept: the header of that name."""
        encode, content_type = choose_encoder(accept or "")
        return encode(self._registry), content_type

    def watch(self, recorder: ServeRecorder) -> None:
        """Show what this one counts."""
        self._recorders[recorder.model_name] = recorder

    def refused(self, model_name: str, reason: str, num_requests: int) -> None:
        """They were not let in. reason: one of a few codes, never a client's own words."""
        self._recorders[model_name].sums.add("minibatcher:requests_refused", num_requests, reason)

    def left(self, model_name: str, num_requests: int) -> None:
        """Their client went away before they had ended."""
        self._recorders[model_name].sums.add("minibatcher:requests_left", num_requests)

    def collect(self) -> Iterator[Metric]:
        """The families, for prometheus_client."""
        recorders = list(self._recorders.values())
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            for recorder in recorders:
                gauge.add_metric([recorder.model_name], recorder.gauge(name))
            yield gauge
        for name, (text, label) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["model_name", *([label] if label else [])])
            for recorder in recorders:
                values = dict(recorder.sums.counters[name])  # a copy: another thread may add a label
                for value, amount in values.items() if label else [("", values.get("", 0))]:
                    counter.add_metric([recorder.model_name, *([value] if label else [])], amount)
            yield counter
        for name, (text, _) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=["model_name"])
            for recorder in recorders:
                sums = recorder.sums.histograms[name]
                histogram.add_metric([recorder.model_name], sums.buckets(), sums.sum)
            yield histogram
