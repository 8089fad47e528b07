"""Devices and models as figures: what a step costs from first principles. Plain arithmetic, no torch.

Every figure of the shipped tables (devices.json, models.json) stands there with its source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from .errors import InvalidParameter, ModelError, UnknownName
from .numeric import is_number

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIASES = {"a100": "a100-80", "4090": "rtx-4090", "rtx4090": "rtx-4090", "5090": "rtx-5090", "rtx5090": "rtx-5090"}
# Decoders whose MLP is two matrices (up, down). The others of today have a third, the gate.
PLAIN_MLP = {"opt", "gpt_neox", "phi", "starcoder2"}


@dataclass(frozen=True)
class Device:
    """One accelerator, or one machine's CPU.

    memory_bytes: in the table the data sheet's GB × 2³⁰ (a driver shows up to 7 % less where error correction is on).
    bandwidth: bytes/s of device memory. flops: dense FLOP/s by dtype, without sparsity; float32 is true float32, not
    TF32. link_bandwidth: bytes/s to its neighbours in each direction, over NVLink where it has one, else over PCIe;
    None if unknown. source: where from. measured: True where the figures are measured rates, so that nothing of a data
    sheet's optimism is in them. host_bandwidth: bytes/s to and from host memory, in each direction; that of PCIe 4.0
    x16 unless told.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    link_bandwidth: float | None = None
    source: str = ""
    measured: bool = False
    host_bandwidth: float = 32e9

    def __post_init__(self) -> None:
        rates = self.flops.values() if isinstance(self.flops, Mapping) else [None]
        link = () if self.link_bandwidth is None else (self.link_bandwidth,)
        figures = (self.memory_bytes, self.bandwidth, self.host_bandwidth, *rates, *link)
        if not isinstance(self.name, str) or not all(is_number(figure) and figure > 0 for figure in figures):
            raise InvalidParameter(f"a device needs a name and figures that are numbers above 0, not {self!r}")

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
    """The shapes of a dense decoder, as far as they decide bytes and FLOPs.

    gated_mlp: three matrices a layer (gate, up, down) as in Llama, else two as in OPT. qkv_bias, qk_norm: as in Qwen2
    and Qwen3. biases: linear layers and norms have biases (OPT). learned_positions: rows of a position table, 0 with
    rotary embeddings.
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
    qk_norm: bool = False
    biases: bool = False
    learned_positions: int = 0
    source: str = ""

    @property
    def layer_matrix_parameters(self) -> int:
        """Weights of one layer's matrix products: QKV, output, MLP."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (
            self.hidden_size * (2 * q + 2 * kv)
            + (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size
        )

    @property
    def head_parameters(self) -> int:
        """Weights of the output projection to the vocabulary, tied or not."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """All weights, norms and biases included."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norm = self.hidden_size * (2 if self.biases else 1)
        layer = self.layer_matrix_parameters + 2 * norm
        if self.qkv_bias or self.biases:
            layer += q + 2 * kv
        if self.qk_norm:
            layer += 2 * self.head_dim
        if self.biases:
            layer += 2 * self.hidden_size + self.intermediate_size
        tables = self.vocab_size * (1 if self.tie_word_embeddings else 2) + self.learned_positions
        return self.num_layers * layer + tables * self.hidden_size + norm

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
        """From a Hugging Face config.json of any dense decoder with these fields (Llama, Qwen, Mistral, OPT, ...).

        Raises ModelError where a size is missing or no positive whole number, and for a mixture of experts, whose steps
        read only a part of its weights.
        """
        if config.get("kv_lora_rank"):
            raise ModelError(f"{name} has latent attention (kv_lora_rank), whose KV cache is not modelled")
        for key in config:
            if "expert" in key and config[key]:
                raise ModelError(f"{name} is a mixture of experts ({key}); only dense models can be simulated")
        kind = config.get("model_type")
        opt = kind == "opt"
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            spec = cls(
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
                gated_mlp=kind not in PLAIN_MLP,
                qkv_bias=kind == "qwen2",
                qk_norm=kind == "qwen3",
                biases=opt,
                learned_positions=config["max_position_embeddings"] + 2 if opt else 0,  # OPT's table starts at 2
                source=source,
            )
        except KeyError as error:
            raise ModelError(f"the config.json of {name} lacks {error.args[0]!r}") from None
        except (TypeError, ZeroDivisionError):
            raise ModelError(f"the config.json of {name}: sizes must be whole numbers of at least 1") from None
        for field in fields(cls):
            size = getattr(spec, field.name)
            if field.type == "int" and field.name != "learned_positions" and (type(size) is not int or size < 1):
                what = f"{field.name} must be a whole number of at least 1, not {size!r}"
                raise ModelError(f"the config.json of {name}: {what}")
        if spec.num_heads % spec.num_kv_heads or not (config.get("head_dim") or hidden % heads == 0):
            raise ModelError(
                f"the config.json of {name}: hidden_size {hidden}, {spec.num_heads} heads and {spec.num_kv_heads} "
                "key/value heads do not divide evenly"
            )
        if type(spec.tie_word_embeddings) is not bool:
            raise ModelError(f"the config.json of {name}: tie_word_embeddings must be true or false")
        return spec


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
    """A shipped device, by its name or an alias. Raises UnknownName, which lists the known ones."""
    name = name.lower()
    name = ALIASES.get(name, name)
    if name not in devices():
        raise UnknownName("hardware", name, [*devices(), "this-machine"])
    return devices()[name]


def model_spec(name: str) -> ModelSpec:
    """A shipped model by name, or the model of a folder or config.json on disk. Raises UnknownName, ModelError."""
    if name.lower() in model_specs():
        return model_specs()[name.lower()]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if Path(name).is_dir() and not path.is_file():
        raise ModelError(f"the folder {name} holds no config.json")
    if not path.is_file():
        raise UnknownName("model spec", name, [*model_specs(), "a folder with config.json"])
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"can't read {path}: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no model configuration")
    return ModelSpec.from_hf(config, path.resolve().parent.name, str(path))


def _table(name: str) -> dict[str, Any]:
    return json.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))
