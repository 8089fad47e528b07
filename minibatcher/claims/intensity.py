"""Rows 0.2, 0.3, 3.5: arithmetic intensity of a step, and which limit of the roofline it meets.

Source: Williams et al., «Roofline: An Insightful Visual Performance Model for Multicore Architectures», CACM 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..hardware import device, model_spec
from ..runners.roofline import CostModel, StepWork
from ..utilisation import step_bytes

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Intensity:
    """One step on one machine. bytes_read: weights once, and KV cache. ridge, intensity: FLOPs per byte.

    seconds: by the cost model, with its efficiencies and overheads. tokens_per_s: output tokens of the step / seconds.
    """

    num_decodes: int
    context_tokens: int
    prefill_tokens: int
    flops: float
    bytes_read: float
    intensity: float
    ridge: float
    seconds: float
    tokens_per_s: float

    @property
    def compute_bound(self) -> bool:
        """Arithmetic at its peak takes longer than memory at its peak; else the step is bandwidth-bound."""
        return self.intensity > self.ridge


def step_intensity(
    cost: CostModel, *, num_decodes: int = 0, context_tokens: int = 1_000, prefill_tokens: int = 0
) -> Intensity:
    """A step of `num_decodes` sequences with `context_tokens` each in the cache, and `prefill_tokens` of one prompt.

    Without decodes the prompt is whole and brings a token, beside them it is a first chunk and brings none. Intensity
    counts FLOPs and bytes of the whole step: linear layers and attention.
    """
    work = StepWork(
        num_tokens=num_decodes + prefill_tokens,
        num_sampled=num_decodes or 1,
        num_requests=num_decodes + (prefill_tokens > 0),
        num_attention_calls=num_decodes + (prefill_tokens > 0),
        kv_tokens_read=num_decodes * context_tokens + prefill_tokens,
        decode_pairs=num_decodes * context_tokens,
        prefill_pairs=prefill_tokens * (prefill_tokens + 1) / 2,
    )
    model, seconds = cost.model, cost.seconds(work)
    flops = model.linear_flops(work.num_tokens, work.num_sampled)
    flops += model.attention_flops(work.decode_pairs + work.prefill_pairs)
    bytes_read = step_bytes(work, cost)
    return Intensity(
        num_decodes,
        context_tokens if num_decodes else 0,
        prefill_tokens,
        flops,
        bytes_read,
        flops / bytes_read,
        cost.device.ridge(cost.dtype),
        seconds,
        work.num_sampled / seconds,
    )


def decode_intensity(
    cost: CostModel, batch_sizes: Sequence[int] = BATCH_SIZES, *, context_tokens: int = 1_000
) -> list[Intensity]:
    """Row 0.2: decode steps against batch size. All share one stream of the weights, each reads its own KV cache."""
    return [step_intensity(cost, num_decodes=b, context_tokens=context_tokens) for b in batch_sizes]


def prefill_intensity(
    cost: CostModel, prompt_lengths: Sequence[int] = (16, 64, 128, 256, 512, 1024, 4096)
) -> list[Intensity]:
    """Row 0.3: the prefill of one prompt alone, against its length."""
    return [step_intensity(cost, prefill_tokens=n) for n in prompt_lengths]


def mixed_intensity(
    cost: CostModel,
    chunk_sizes: Sequence[int] = (0, 64, 128, 256, 512, 1024),
    *,
    num_decodes: int = 30,
    context_tokens: int = 1_000,
) -> list[Intensity]:
    """Row 3.5: a step of decodes with a chunk of prefill beside them, against the chunk's size (0: decodes alone).

    The decodes' bytes are the same in each; the chunk's FLOPs come on top, for hardly a byte more.
    """
    return [
        step_intensity(cost, num_decodes=num_decodes, context_tokens=context_tokens, prefill_tokens=c)
        for c in chunk_sizes
    ]


@dataclass(frozen=True)
class SharedStream:
    """A chunk of prefill and a step of decodes, in one forward pass and in two. Seconds by the cost model."""

    chunk_tokens: int
    num_decodes: int
    together_s: float
    decodes_alone_s: float
    chunk_alone_s: float

    @property
    def saved_share(self) -> float:
        """Of the two passes' time, what one pass saves."""
        return 1 - self.together_s / (self.decodes_alone_s + self.chunk_alone_s)


def shared_stream(
    cost: CostModel,
    chunk_sizes: Sequence[int] = (64, 128, 256, 512, 1024, 4096),
    *,
    num_decodes: int = 30,
    context_tokens: int = 1_000,
) -> list[SharedStream]:
    """Row 3.5: what it saves that both phases share one stream of the weights (Sarathi's "piggybacking")."""
    alone = step_intensity(cost, num_decodes=num_decodes, context_tokens=context_tokens).seconds
    return [
        SharedStream(
            m.prefill_tokens,
            num_decodes,
            m.seconds,
            alone,
            step_intensity(cost, prefill_tokens=m.prefill_tokens).seconds,
        )
        for m in mixed_intensity(cost, chunk_sizes, num_decodes=num_decodes, context_tokens=context_tokens)
    ]


@dataclass(frozen=True)
class PhaseBounds:
    """Where the two phases of one model on one machine meet the ridge.

    prefill_ridge_tokens: the shortest prompt, alone, whose prefill is compute-bound. decode_ridge_batch: the smallest
    decode batch at this context that is compute-bound; None where no batch is, because each sequence's own KV cache
    brings too few FLOPs a byte. max_batch: sequences of this context that fit the memory.
    """

    model: str
    device: str
    num_gpus: int
    context_tokens: int
    ridge: float
    prefill_ridge_tokens: int | None
    decode_ridge_batch: int | None
    max_batch: int

    @property
    def decode_compute_bound_reachable(self) -> bool:
        """Whether a decode batch that fits the memory can be compute-bound at all."""
        return self.decode_ridge_batch is not None and self.decode_ridge_batch <= self.max_batch


PHASE_CONFIGURATIONS = (
    ("llama-3.1-70b", "h100", 4),
    ("llama-3.1-70b", "h100", 8),
    ("llama-3.1-8b", "h100", 1),
    ("llama-3.1-8b", "h200", 1),
    ("llama-3.1-8b", "l4", 1),
    ("llama-2-13b", "a100-80", 1),
    ("llama-2-7b", "l4", 1),
    ("qwen2.5-0.5b", "t4", 1),
    ("qwen2.5-7b", "a10", 1),
)


def phase_bounds(
    configurations: Sequence[tuple[str, str, int]] = PHASE_CONFIGURATIONS,
    contexts: Sequence[int] = (128, 1_000, 8_000),
    *,
    dtype: str = "float16",
) -> list[PhaseBounds]:
    """Row 0.3: in which configurations a prefill is bandwidth-bound or a decode compute-bound.

    By data-sheet peaks: a prompt shorter than prefill_ridge_tokens is bandwidth-bound, a batch larger than
    decode_ridge_batch compute-bound. Configurations: (model, device, number of devices). Contexts that a model does not
    have are left out.
    """
    rows = []
    for model_name, device_name, num_gpus in configurations:
        cost = CostModel(device(device_name), model_spec(model_name), num_gpus=num_gpus, dtype=dtype)
        prefill = _first(lambda n: step_intensity(cost, prefill_tokens=n).compute_bound)  # noqa: B023 (used at once)
        for context in contexts:
            if context > cost.model.max_position_embeddings:
                continue
            batch = _first(
                lambda b: step_intensity(cost, num_decodes=b, context_tokens=context).compute_bound  # noqa: B023
            )
            rows.append(
                PhaseBounds(
                    model_name,
                    device_name,
                    num_gpus,
                    context,
                    cost.device.ridge(dtype),
                    prefill,
                    batch,
                    cost.kv_capacity_tokens // context,
                )
            )
    return rows


def _first(holds, limit: int = 1 << 24) -> int | None:
    """The smallest n of at least 1 for which `holds(n)`, which stays true once it is; None if none up to `limit`."""
    if not holds(limit):
        return None
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
