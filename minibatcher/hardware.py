"""Devices and models as figures: what a step costs from first principles. Plain arithmetic, no torch.

Every figure of the shipped tables (devices.json, models.json) stands there with its source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from .errors import InvalidParameter, ModelError, UnknownName

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Device:
    """One accelerator, or one machine's CPU.

    memory_bytes; bandwidth: bytes/s of device memory; flops: dense FLOP/s by dtype, without sparsity;
    link_bandwidth: bytes/s to its neighbours in each direction, None if it has no fast link. source: where from.
    measured: True where the figures are measured rates, so that nothing of a data sheet's optimism is in them.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    link_bandwidth: float | None = None
    source: str = ""
    measured: bool = False

    def rate(self, dtype: str) -> float:
        """Dense FLOP/s in this dtype. Raises InvalidParameter where the device cannot compute in it."""
        if dtype not in self.flops:
            raise InvalidParameter(f"{self.name} has no {dtype} rate; it computes in {', '.join(self.flops)}")
        return self.flops[dtype]

    def ridge(self, dtype: str) -> float:
        """FLOPs per byte above which arithmetic, not memory, is the limit (Williams et al., «Roofline», 2009)."""
        return self.rate(dtype) / self.bandwidth


@dataclass(frozen=True)
class ModelSpec:
    """The shapes of a decoder, as far as they decide bytes and FLOPs.

    gated_mlp: three matrices a layer (gate, up, down) as in Llama, else two as in OPT. learned_positions: rows of a
    position table, 0 with rotary embeddings. biases: linear layers have biases (OPT).
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    gated_mlp: bool = True
    qkv_bias: bool = False
    biases: bool = False
    learned_positions: int = 0
    source: str = ""

    @property
    def layer_matrix_parameters(self) -> int:
        """Weights of one layer's matrix products: QKV, output, MLP."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden_size * (2 * q + 2 * kv) + (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        """Weights of the output projection to the vocabulary, tied or not."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """All weights; norms and biases are counted roughly, they are far below one per cent."""
        norms = (2 * self.num_layers + 1) * self.hidden_size * (2 if self.biases else 1)
        embeddings = self.head_parameters * (1 if self.tie_word_embeddings else 2) + self.learned_positions * self.hidden_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        bias = 0
        if self.qkv_bias or self.biases:
            bias += q + 2 * kv
        if self.biases:
            bias += 2 * self.hidden_size + self.intermediate_size
        return self.num_layers * (self.layer_matrix_parameters + bias) + embeddings + norms

    def weight_bytes(self, dtype: str) -> int:
        return self.num_parameters * BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values of all layers: 2 × K/V size × layers × bytes (Kwon et al., SOSP 2023, section 3)."""
        return 2 * self.num_kv_heads * self.head_dim * self.num_layers * BYTES[dtype]

    def linear_flops(self, num_tokens: float, num_sampled: float) -> float:
        """Matrix products of a step: two FLOPs a weight and token, the head for sampled tokens only."""
        return 2.0 * (self.num_layers * self.layer_matrix_parameters * num_tokens + self.head_parameters * num_sampled)

    def linear_bytes(self, dtype: str) -> float:
        """Weights that a step streams from memory, once, however many tokens it has."""
        return (self.num_layers * self.layer_matrix_parameters + self.head_parameters) * BYTES[dtype]

    def attention_flops(self, num_pairs: float) -> float:
        """Attention over `num_pairs` (query, key) pairs a layer: QKᵀ and PV, two FLOPs a multiply-add."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim * num_pairs

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str, source: str = "") -> ModelSpec:
        """From a Hugging Face config.json of any decoder with these fields (Llama, Qwen, Mistral, OPT, ...).

        Raises ModelError where a size is missing.
        """
        try:
            opt = config.get("model_type") == "opt"
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            return cls(
                name=name,
                num_layers=config["num_hidden_layers"],
                hidden_size=hidden,
                intermediate_size=config["ffn_dim"] if opt else config["intermediate_size"],
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                vocab_size=config["vocab_size"],
                max_position_embeddings=config["max_position_embeddings"],
                tie_word_embeddings=config.get("tie_word_embeddings", opt),
                gated_mlp=not opt,
                qkv_bias=config.get("model_type") == "qwen2",
                biases=opt,
                learned_positions=config["max_position_embeddings"] + 2 if opt else 0,
                source=source,
            )
        except KeyError as error:
            raise ModelError(f"the config.json of {name} lacks {error.args[0]!r}") from None


@cache
def devices() -> dict[str, Device]:
    """The shipped devices by name."""
    return {name: Device(name, **figures) for name, figures in _table("devices.json").items()}


@cache
def model_specs() -> dict[str, ModelSpec]:
    """The shipped models by name."""
    rows = _table("models.json")
    return {name: ModelSpec.from_hf(row["config"], name, row["source"]) for name, row in rows.items()}


def device(name: str) -> Device:
    """A shipped device. Raises UnknownName, which lists the known ones."""
    if name.lower() not in devices():
        raise UnknownName("hardware", name, [*devices()])
    return devices()[name.lower()]


def model_spec(name: str) -> ModelSpec:
    """A shipped model by name, or the model of a folder or config.json on disk. Raises UnknownName, ModelError."""
    if name.lower() in model_specs():
        return model_specs()[name.lower()]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UnknownName("model spec", name, [*model_specs(), "a folder with config.json"])
    try:
        return ModelSpec.from_hf(json.loads(path.read_text(encoding="utf-8")), path.resolve().parent.name, str(path))
    except ValueError as error:
        raise ModelError(f"can't read {path}: {error}") from None


def _table(name: str) -> dict[str, Any]:
    return json.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))
