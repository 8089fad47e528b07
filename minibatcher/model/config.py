"""The architecture of a checkpoint, read from its config.json. No torch here: simulators use it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError

SUPPORTED = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-family decoder.

    qkv_bias: the query, key and value projections have a bias (Qwen2). qk_norm: each head's query and key pass an
    RMSNorm before rotation (Qwen3). rope_scaling: None, or a dict with `rope_type` "linear" or "llama3".
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """From a Hugging Face config.json (of transformers 4 or 5) and, if there is one, generation_config.json.

        Raises ModelError for an architecture or a feature that is not supported, and for missing or odd values.
        """
        architecture = _architecture(config)
        try:
            heads = config["num_attention_heads"]
            rope_theta, rope_scaling = _rope(config)
            result = cls(
                architecture=architecture,
                vocab_size=config["vocab_size"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                rope_theta=rope_theta,
                rope_scaling=rope_scaling,
                rms_norm_eps=config.get("rms_norm_eps", 1e-6),
                max_position_embeddings=config.get("max_position_embeddings", 2048),
                tie_word_embeddings=config.get("tie_word_embeddings", False),
                qkv_bias=architecture == "qwen2",
                qk_norm=architecture == "qwen3",
                bos_token_id=config.get("bos_token_id"),
                eos_token_ids=_eos(config, generation or {}),
                pad_token_id=config.get("pad_token_id"),
            )
        except KeyError as error:
            raise ModelError(f"config.json lacks {error.args[0]!r}; it is not a complete model configuration") from None
        result._check()
        return result

    def _check(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        for name in (*sizes, "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"config.json: {name} must be a whole number of at least 1, not {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: {self.num_heads} heads do not share {self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(f"config.json: head_dim must be even for rotary embeddings, not {self.head_dim}")

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Bytes of KV cache that one token takes: keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_element

    @property
    def num_parameters(self) -> int:
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        attention += (q_size + 2 * kv_size) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    model_type = config.get("model_type")
    for name in names:
        if name in SUPPORTED:
            break
    else:
        if names or model_type not in SUPPORTED.values():
            found = ", ".join(names) or model_type or "none named"
            raise ModelError(f"unsupported architecture ({found}); supported: {', '.join(SUPPORTED)}")
        name = next(name for name, short in SUPPORTED.items() if short == model_type)
    # Refuse what would load and then compute something else.
    refused = {
        "quantization_config": "quantised weights",
        "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "use_sliding_window": "sliding-window attention",
    }
    for key, what in refused.items():
        if config.get(key):
            raise ModelError(
                f"config.json asks for {what} ({key}), which is not supported; use a checkpoint without it"
            )
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise ModelError("config.json asks for sliding-window attention (layer_types), which is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act {config['hidden_act']!r} is not supported; supported: 'silu'")
    return SUPPORTED[name]


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and scaling: two keys in transformers 4, one (`rope_parameters`) in transformers 5."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    partial = scaling.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"config.json: partial_rotary_factor {partial} is not supported; heads are rotated as a whole")
    kind = scaling.pop("type", None)
    kind = scaling.setdefault("rope_type", kind or "default")
    if kind == "default":
        return float(theta), None
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in needed:
        raise ModelError(f"RoPE scaling {kind!r} is not supported; supported: default, linear, llama3")
    for key in needed[kind]:
        if not isinstance(scaling.get(key), (int, float)):
            raise ModelError(f"RoPE scaling {kind!r} needs a number for {key!r}, not {scaling.get(key)!r}")
    return float(theta), scaling


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """All ids that end a text. generation_config.json often names more of them (end of turn) than config.json."""
    ids: list[int] = []
    for source in (generation, config):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))
