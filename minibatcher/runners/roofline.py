"""No model: what a step would take on hardware described by figures. Virtual time from a roofline.

Source: Williams et al., «Roofline: An Insightful Visual Performance Model for Multicore Architectures», CACM 2009.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from ..errors import InvalidParameter
from ..hardware import BYTES, Device, ModelSpec
from ..numeric import is_number
from ..scheduling.base import StepPlan
from .base import StepResult

# Of the host link's rate, in large copies to and from pinned memory: NVIDIA's nvbandwidth measures 24.8 GB/s over PCIe
# 4.0 x16 (A100; NVIDIA developer forum 352186, 2025) and 55.6 GB/s over PCIe 5.0 x16 (H100).
HOST_LINK_SHARE = 0.8


@dataclass(frozen=True)
class Efficiency:
    """How far real steps stay behind the data sheet. The defaults come from published figures; a calibration fits them.

    bandwidth, compute: shares of the device's rates that weights and matrix products reach. Their defaults fit the
    operator times that Vidur measured on an A100 (Agrawal et al., MLSys 2024) for Llama-3-8B: within 15 % above 256
    tokens. tile_tokens: matrix products compute whole tiles of so many rows (128 in cuBLAS's usual kernels), so that
    257 tokens cost what 384 do; 1 where rows are not rounded up. attention_bandwidth, attention_compute: shares
    reached in reading the KV cache and in attention's products. step_s: fixed seconds a step (launches, scheduler,
    sampling). request_s, token_s: further seconds for each request in the step and each token. attention_call_s: the
    same for each call of attention in each layer, 0 on GPUs, where one kernel serves all and step_s has its launch.
    """

    bandwidth: float = 0.8
    compute: float = 0.73
    tile_tokens: int = 128
    attention_bandwidth: float = 0.6
    attention_compute: float = 0.35
    step_s: float = 0.003
    request_s: float = 10e-6
    token_s: float = 0.0
    attention_call_s: float = 0.0

    def __post_init__(self) -> None:
        if type(self.tile_tokens) is not int or self.tile_tokens < 1:
            raise InvalidParameter(
                f"efficiency tile_tokens must be a whole number of at least 1, not {self.tile_tokens!r}"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s"):
                good, limits = is_number(value) and 0 <= value <= 3600, "seconds from 0 to 3,600"
            else:
                good, limits = is_number(value) and 0 < value <= 1, "in (0, 1]"
            if field.name != "tile_tokens" and not good:
                raise InvalidParameter(f"efficiency {field.name} must be {limits}, not {value!r}")

    @classmethod
    def for_device(cls, device: Device) -> Efficiency:
        """The uncalibrated figures: for a data sheet's rates those above; measured rates need no discount for them."""
        if not device.measured:
            return cls()
        return cls(bandwidth=1.0, compute=1.0, tile_tokens=1, attention_bandwidth=0.5, step_s=0.001)


@dataclass(frozen=True)
class StepWork:
    """What a plan asks of the device, in plain counts.

    num_tokens: tokens through the linear layers, padding included; num_sampled: rows of logits; num_requests: rows.
    kv_tokens_read: cached tokens that attention reads; decode_pairs, prefill_pairs: (query, key) pairs of rows with one
    token and of wider rows. num_attention_calls: calls a layer where requests need calls of their own, as on a CPU:
    one for each request of a ragged step, one for a whole padded step. num_swapped_tokens: tokens whose KV is copied to
    or from host memory, empty places of their blocks included.
    """

    num_tokens: float  # whole numbers, but for means over several steps
    num_sampled: float
    num_requests: float
    kv_tokens_read: float
    decode_pairs: float
    prefill_pairs: float
    num_attention_calls: int = 1
    num_swapped_tokens: int = 0


def step_work(plan: StepPlan, num_sampled: int, block_size: int = 16) -> StepWork:
    """Counts of one plan, of whose rows `num_sampled` get a new token. block_size: tokens of a block that is swapped.

    A padded plan pays for its whole rectangle: every row as wide, as long, as the longest.
    """
    rows = len(plan.num_tokens)
    if plan.width is not None:
        context = plan.width + max(r.num_computed_tokens - (n == 0) for r, n in plan.num_tokens.items())
        pairs = rows * plan.width * (context - (plan.width - 1) / 2)
        decode, prefill = (pairs, 0.0) if plan.width == 1 else (0.0, pairs)
        return StepWork(rows * plan.width, rows, rows, rows * context, decode, prefill)
    num_tokens, prefill_pairs, past, one_token_past = 0, 0.0, 0, 0
    for request, n in plan.num_tokens.items():
        if n == 1:
            one_token_past += request.num_computed_tokens
        else:
            prefill_pairs += n * (request.num_computed_tokens + (n + 1) / 2)
            past += request.num_computed_tokens
            num_tokens += n
    ones = list(plan.num_tokens.values()).count(1)
    decode_pairs = one_token_past + ones
    num_tokens += ones
    kv_tokens_read = past + one_token_past + num_tokens
    swapped = block_size * sum(len(swap.device_blocks) for swap in plan.swaps)
    return StepWork(num_tokens, num_sampled, rows, kv_tokens_read, decode_pairs, prefill_pairs, rows, swapped)


TERMS = ("linear", "attention", "all_reduce", "swap", "overhead")


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step on `num_gpus` devices in tensor parallelism.

    switched_off: names of TERMS to leave out, so that a reader sees what each contributes. calibration: where the
    efficiency figures are from, in words; it goes into the record.
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
    calibration: str = "none: default efficiency figures, derived from published ones"

    def __post_init__(self) -> None:
        if type(self.num_gpus) is not int or self.num_gpus < 1:
            raise InvalidParameter(f"num_gpus must be a whole number of at least 1, not {self.num_gpus!r}")
        if self.model.num_heads % self.num_gpus:
            raise InvalidParameter(
                f"tensor parallelism over {self.num_gpus} devices can't share the {self.model.num_heads} heads of "
                f"{self.model.name} evenly; use a number that divides them"
            )
        if not is_number(self.memory_utilization) or not 0 < self.memory_utilization <= 1:
            raise InvalidParameter(f"memory_utilization must be in (0, 1], not {self.memory_utilization!r}")
        unknown = set(self.switched_off) - set(TERMS)
        if unknown:
            raise InvalidParameter(f"unknown cost term {sorted(unknown)[0]!r}; known: {', '.join(TERMS)}")
        if self.num_gpus > 1 and self.device.link_bandwidth is None:
            raise InvalidParameter(f"{self.device.name} has no link between devices in the table; use num_gpus 1")
        self.device.rate(self.dtype)

    def seconds(self, work: StepWork) -> float:
        return sum(self.terms(work).values())

    def terms(self, work: StepWork) -> dict[str, float]:
        """Seconds by term. Within «attention» memory and arithmetic overlap, so the larger one counts."""
        e, model, n = self.efficiency, self.model, self.num_gpus
        bandwidth, rate = self.device.bandwidth * n, self.device.rate(self.dtype) * n
        linear = self._product(model.num_layers * model.layer_matrix_parameters, work.num_tokens)
        linear += self._product(model.head_parameters, work.num_sampled)
        kv_bytes = work.kv_tokens_read * self._kv_bytes_per_token
        pairs = work.decode_pairs + work.prefill_pairs
        attention = max(
            kv_bytes / (bandwidth * e.attention_bandwidth),
            model.attention_flops(pairs) / (rate * e.attention_compute),
        )
        terms = {
            "linear": linear,
            "attention": attention,
            "all_reduce": self._all_reduce(work.num_tokens),
            "swap": self._swap(work.num_swapped_tokens),
            "overhead": e.step_s
            + e.request_s * work.num_requests
            + e.token_s * work.num_tokens
            + e.attention_call_s * work.num_attention_calls * model.num_layers,
        }
        return {name: 0.0 if name in self.switched_off else value for name, value in terms.items()}

    def _product(self, parameters: int, rows: float) -> float:
        """Seconds to multiply `rows` rows with weights that are streamed once.

        Loads and arithmetic overlap, but not wholly: √(memory² + compute²) is the larger of the two far from the ridge
        and 1.4 times it where they are equal, as measured times are (tests/test_hardware.py).
        """
        if not rows:
            return 0.0
        e, device, n = self.efficiency, self.device, self.num_gpus
        if rows > e.tile_tokens:
            rows = math.ceil(rows / e.tile_tokens) * e.tile_tokens
        memory = parameters * BYTES[self.dtype] / (device.bandwidth * n * e.bandwidth)
        compute = 2.0 * parameters * rows / (device.rate(self.dtype) * n * e.compute)
        return math.hypot(memory, compute)

    def _all_reduce(self, num_tokens: float, latency_s: float = 10e-6) -> float:
        """Two ring all-reduces a layer over hidden states (Shoeybi et al., Megatron-LM, 2019, section 3)."""
        n = self.num_gpus
        if n == 1:
            return 0.0
        size = num_tokens * self.model.hidden_size * BYTES[self.dtype]
        assert self.device.link_bandwidth is not None  # __post_init__ has seen to it
        return 2 * self.model.num_layers * (latency_s + 2 * (n - 1) / n * size / self.device.link_bandwidth)

    def _swap(self, num_tokens: int) -> float:
        """Copies before the step begins: each device moves its share of the KV over its own link to the host."""
        rate = self.device.host_bandwidth * self.num_gpus * HOST_LINK_SHARE
        return num_tokens * self._kv_bytes_per_token / rate

    @property
    def _kv_bytes_per_token(self) -> int:
        """On all devices together: with more devices than key/value heads, each head is kept several times."""
        copies = max(1, self.num_gpus // self.model.num_kv_heads)
        return copies * self.model.kv_bytes_per_token(self.dtype)

    @property
    def _usable_bytes(self) -> float:
        """Of one device, for weights and KV cache."""
        return self.device.memory_bytes * self.memory_utilization - self.workspace_bytes

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that fit beside weights and workspace: the memory budget of row 0.6."""
        left = self.num_gpus * self._usable_bytes - self.model.weight_bytes(self.dtype)
        return int(max(0.0, left) // self._kv_bytes_per_token)

    def check_fits(self) -> None:
        """Raise InvalidParameter unless weights and at least one full context fit."""
        context = min(self.model.max_position_embeddings, 2048)
        if self.kv_capacity_tokens >= context:
            return
        needed = self.model.weight_bytes(self.dtype) + context * self.model.kv_bytes_per_token(self.dtype)
        each, gib = self._usable_bytes, 2**30
        have = max(0.0, self.num_gpus * each)
        takes = f"it takes {math.ceil(needed / each)} of them" if each > 0 else "the workspace alone fills it"
        raise InvalidParameter(
            f"{self.model.name} in {self.dtype} does not fit {self.num_gpus} × {self.device.name}: "
            f"need {needed / gib:.1f} GiB (weights and {context:,} tokens of KV cache), "
            f"have {have / gib:.1f} GiB; {takes}"
        )

    def without(self, *terms: str) -> CostModel:
        return replace(self, switched_off=(*self.switched_off, *terms))


class RooflineRunner:
    """Runs a plan by asking the cost model how long it would take.

    Tokens are placeholders: lengths come from the workload. block_size: tokens of a KV block, as the scheduler has it.
    """

    def __init__(self, cost: CostModel, block_size: int = 16) -> None:
        self.cost, self.block_size = cost, block_size

    def run(self, plan: StepPlan) -> StepResult:
        token_ids = {r: 0 for r, n in plan.num_tokens.items() if n and n == r.num_tokens - r.num_computed_tokens}
        return StepResult(token_ids, self.cost.seconds(step_work(plan, len(token_ids), self.block_size)))
