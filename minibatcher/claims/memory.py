"""Rows 0.5, 0.6: bytes of KV cache a token, and how many sequences fit beside the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidParameter
from ..hardware import BYTES, ModelSpec, device, model_spec
from ..runners.roofline import CostModel

MODELS = ("opt-13b", "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-14b")
MACHINES = (("t4", 1), ("l4", 1), ("rtx-4090", 1), ("a100-80", 1), ("h100", 1), ("h100", 4), ("h100", 8), ("h200", 8))


@dataclass(frozen=True)
class KVSize:
    """Bytes of keys and values a token. num_heads / num_kv_heads says how much GQA saves."""

    model: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    kv_hidden_size: int
    bytes_per_token: int
    bytes_without_gqa: int

    @property
    def gqa_factor(self) -> float:
        return self.bytes_without_gqa / self.bytes_per_token


def kv_size(model: ModelSpec, dtype: str = "float16") -> KVSize:
    """Row 0.5: 2 x hidden size of K/V x layers x bytes (Kwon et al., PagedAttention, SOSP 2023, section 3)."""
    hidden = model.num_kv_heads * model.head_dim
    size = 2 * model.num_layers * BYTES[dtype]
    without = size * model.num_heads * model.head_dim
    return KVSize(model.name, model.num_layers, model.num_heads, model.num_kv_heads, hidden, size * hidden, without)


def kv_sizes(models: Sequence[str] = MODELS, dtype: str = "float16") -> list[KVSize]:
    """Row 0.5 for several shipped models."""
    return [kv_size(model_spec(name), dtype) for name in models]


@dataclass(frozen=True)
class Concurrency:
    """The memory budget of one model on one machine, in bytes, and the sequences of `context_tokens` that it holds.

    kv_bytes is what is left of usable_bytes; below zero the model does not fit and max_sequences is 0.
    """

    model: str
    device: str
    num_gpus: int
    context_tokens: int
    usable_bytes: int
    weight_bytes: int
    workspace_bytes: int
    kv_bytes: int
    max_sequences: int


def concurrency(
    models: Sequence[str] = MODELS,
    machines: Sequence[tuple[str, int]] = MACHINES,
    *,
    context_tokens: int = 2_000,
    dtype: str = "float16",
) -> list[Concurrency]:
    """Row 0.6: weights + KV cache of active sequences + workspace must fit; so many sequences run at once.

    machines: (device, number of them). The share of memory that may be used and the workspace are CostModel's.
    Raises InvalidParameter, UnknownName.
    """
    if type(context_tokens) is not int or context_tokens < 1:
        raise InvalidParameter(f"context_tokens must be a whole number of at least 1, not {context_tokens!r}")
    rows = []
    for name in models:
        for device_name, num_gpus in machines:
            cost = CostModel(device(device_name), model_spec(name), num_gpus=num_gpus, dtype=dtype)
            usable = int(num_gpus * cost.device.memory_bytes * cost.memory_utilization)
            weights, workspace = cost.model.weight_bytes(dtype), num_gpus * cost.workspace_bytes
            sequences = cost.kv_capacity_tokens // context_tokens
            kv_bytes = usable - weights - workspace
            rows.append(
                Concurrency(
                    name, device_name, num_gpus, context_tokens, usable, weights, workspace, kv_bytes, sequences
                )
            )
    return rows
