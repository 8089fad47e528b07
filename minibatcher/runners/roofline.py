"""No model: what a step would take on hardware described by figures. Virtual time from a roofline.

Source: Williams et al., «Roofline: An Insightful Visual Performance Model for Multicore Architectures», CACM 2009.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ..errors import InvalidParameter
from ..hardware import BYTES, Device, ModelSpec
from ..scheduling.base import StepPlan
from .base import StepResult


@dataclass(frozen=True)
class Efficiency:
    """How far real steps stay behind the data sheet. The defaults are ours, from published figures; a calibration fits them.

    bandwidth, compute: shares of the device's rates that weights and matrix products reach. attention_bandwidth,
    attention_compute: the same for reading the KV cache and for attention's products. step_s: fixed seconds a step
    (launches, scheduler, sampling). request_s, token_s: further seconds for each request in the step and each token.
    """

    bandwidth: float = 0.8
    compute: float = 0.65
    attention_bandwidth: float = 0.6
    attention_compute: float = 0.35
    step_s: float = 0.003
    request_s: float = 10e-6
    token_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            share = not field.name.endswith("_s")
            if not (0 < value <= 1 if share else value >= 0):
                limits = "in (0, 1]" if share else "at least 0 (seconds)"
                raise InvalidParameter(f"efficiency {field.name} must be {limits}, not {value!r}")


@dataclass(frozen=True)
class StepWork:
    """What a plan asks of the device, in plain counts.

    num_tokens: tokens through the linear layers, padding included; num_sampled: rows of logits; num_requests: rows.
    kv_tokens_read: cached tokens that attention reads; decode_pairs, prefill_pairs: (query, key) pairs of rows with one
    token and of wider rows.
    """

    num_tokens: int
    num_sampled: int
    num_requests: int
    kv_tokens_read: int
    decode_pairs: float
    prefill_pairs: float


def step_work(plan: StepPlan) -> StepWork:
    """Counts of one plan. A padded plan pays for its whole rectangle: every row as wide, as long, as the longest."""
    rows = len(plan.num_tokens)
    if plan.width is not None:
        context = plan.width + max(r.num_computed_tokens - (n == 0) for r, n in plan.num_tokens.items())
        pairs = rows * plan.width * (context - (plan.width - 1) / 2)
        decode, prefill = (pairs, 0.0) if plan.width == 1 else (0.0, pairs)
        return StepWork(rows * plan.width, rows, rows, rows * context, decode, prefill)
    num_tokens = num_sampled = kv_tokens = decode_pairs = 0
    prefill_pairs = 0.0
    for request, n in plan.num_tokens.items():
        context = request.num_computed_tokens + n
        num_tokens += n
        kv_tokens += context
        if n == 1:
            decode_pairs += context
        else:
            prefill_pairs += n * (context - (n - 1) / 2)
        num_sampled += n == request.num_pending_tokens
    return StepWork(num_tokens, num_sampled, rows, kv_tokens, decode_pairs, prefill_pairs)


TERMS = ("linear", "attention", "all_reduce", "overhead")


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step on `num_gpus` devices in tensor parallelism.

    switched_off: names of TERMS to leave out, so that a reader sees what each contributes.
    Raises InvalidParameter for a model that does not fit (need, have, how many devices it would take).
    """

    device: Device
    model: ModelSpec
    num_gpus: int = 1
    dtype: str = "bfloat16"
    efficiency: Efficiency = Efficiency()
    memory_utilization: float = 0.9
    workspace_bytes: int = 2 << 30
    switched_off: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise InvalidParameter(f"num_gpus must be at least 1, not {self.num_gpus!r}")
        unknown = set(self.switched_off) - set(TERMS)
        if unknown:
            raise InvalidParameter(f"unknown cost term {sorted(unknown)[0]!r}; known: {', '.join(TERMS)}")
        if self.num_gpus > 1 and self.device.link_bandwidth is None:
            raise InvalidParameter(f"{self.device.name} has no link between devices in the table; use num_gpus 1")
        self.device.rate(self.dtype)

    def seconds(self, work: StepWork) -> float:
        return sum(self.terms(work).values())

    def terms(self, work: StepWork) -> dict[str, float]:
        """Seconds by term. Within «linear» and «attention» memory and arithmetic overlap, so the larger one counts."""
        e, model, n = self.efficiency, self.model, self.num_gpus
        bandwidth, rate = self.device.bandwidth * n, self.device.rate(self.dtype) * n
        linear = max(
            model.linear_bytes(self.dtype) / (bandwidth * e.bandwidth),
            model.linear_flops(work.num_tokens, work.num_sampled) / (rate * e.compute),
        )
        kv_bytes = work.kv_tokens_read * model.kv_bytes_per_token(self.dtype)
        pairs = work.decode_pairs + work.prefill_pairs
        attention = max(
            kv_bytes / (bandwidth * e.attention_bandwidth),
            model.attention_flops(pairs) / (rate * e.attention_compute),
        )
        terms = {
            "linear": linear,
            "attention": attention,
            "all_reduce": self._all_reduce(work.num_tokens),
            "overhead": e.step_s + e.request_s * work.num_requests + e.token_s * work.num_tokens,
        }
        return {name: 0.0 if name in self.switched_off else value for name, value in terms.items()}

    def _all_reduce(self, num_tokens: int, latency_s: float = 10e-6) -> float:
        """Two ring all-reduces a layer over hidden states (Shoeybi et al., Megatron-LM, 2019, section 3)."""
        n = self.num_gpus
        if n == 1:
            return 0.0
        size = num_tokens * self.model.hidden_size * BYTES[self.dtype]
        return 2 * self.model.num_layers * (latency_s + 2 * (n - 1) / n * size / self.device.link_bandwidth)

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that fit beside weights and workspace: the memory budget of row 0.6."""
        usable = self.num_gpus * (self.device.memory_bytes * self.memory_utilization - self.workspace_bytes)
        return int(max(0.0, usable - self.model.weight_bytes(self.dtype)) // self.model.kv_bytes_per_token(self.dtype))

    def check_fits(self) -> None:
        """Raise InvalidParameter unless weights and at least one full context fit."""
        context = min(self.model.max_position_embeddings, 2048)
        if self.kv_capacity_tokens >= context:
            return
        needed = self.model.weight_bytes(self.dtype) + context * self.model.kv_bytes_per_token(self.dtype)
        each = self.device.memory_bytes * self.memory_utilization - self.workspace_bytes
        have, gib = self.num_gpus * each, 2**30
        takes = next(n for n in range(1, 4097) if n * each >= needed)
        raise InvalidParameter(
            f"{self.model.name} in {self.dtype} does not fit {self.num_gpus} × {self.device.name}: need {needed / gib:.1f} GiB "
            f"(weights and {context:,} tokens of KV cache), have {have / gib:.1f} GiB; it takes {takes} of them"
        )

    def without(self, *terms: str) -> CostModel:
        return replace(self, switched_off=(*self.switched_off, *terms))


class RooflineRunner:
    """Runs a plan by asking the cost model how long it would take. Tokens are placeholders: lengths come from the workload."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def run(self, plan: StepPlan) -> StepResult:
        token_ids = {r: 0 for r, n in plan.num_tokens.items() if n and n == r.num_pending_tokens}
        return StepResult(token_ids, self.cost.seconds(step_work(plan)))
