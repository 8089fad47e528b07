"""GGUF files (llama.cpp's format): dequantised once into a Hugging Face folder in the user's cache.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; names and layout as llama.cpp's converter writes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from ..errors import MissingDependency, ModelError
from .config import SUPPORTED, ModelConfig
from .llama import rope_inverse_frequencies

_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4  # token types


def convert_gguf(path: Path) -> Path:
    """The folder with this file's contents, made now unless it is in the cache already.

    Quantised tensors become float16; float32, bfloat16 and float16 stay what they are. The cache is
    ~/.cache/minibatcher, or the folder that MINIBATCHER_CACHE names. Raises ModelError and MissingDependency.
    """
    try:
        import gguf
    except ImportError:
        raise MissingDependency(
            f"{str(path)!r} is a GGUF file; to read it, install the extra: pip install 'minibatcher[gguf]'"
        ) from None
    from .loader import fingerprint

    folder = _cache() / fingerprint({"converter": 1}, [path])
    if folder.exists():
        return folder
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # a damaged file makes numpy or the reader fail in many ways
        raise ModelError(f"{str(path)!r} is not a GGUF file, or damaged ({error}); fetch it again") from None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    raw = _config(fields, tensors)
    config = ModelConfig.from_hf(raw)
    tokenizer = _tokenizer(fields)

    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and moved there at the end, so that an interrupted run leaves nothing half done.
    making = Path(tempfile.mkdtemp(dir=folder.parent, prefix="making-"))
    try:
        save_file(dict(_weights(config, tensors)), making / "model.safetensors")
        tokenizer.save(str(making / "tokenizer.json"))
        template = fields.get("tokenizer.chat_template")
        (making / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
        (making / "config.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
        try:
            making.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was quicker, with the same result
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def _cache() -> Path:
    chosen = os.environ.get("MINIBATCHER_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "minibatcher"


def _config(fields: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """The metadata as a config.json."""
    architecture = fields.get("general.architecture")
    classes = {short: name for name, short in SUPPORTED.items()}
    if architecture not in classes:
        raise ModelError(f"unsupported GGUF architecture {architecture!r}; supported: {', '.join(classes)}")

    def get(name: str, default: Any = None) -> Any:
        value = fields.get(f"{architecture}.{name}", default)
        if value is None:
            raise ModelError(f"the GGUF file lacks {architecture}.{name}; it is not a complete model")
        return value

    heads, hidden_size = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden_size // heads)
    if get("expert_count", 0) or get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError("GGUF files with experts or with partly rotated heads are not supported")
    eos = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    raw = {
        "architectures": [classes[architecture]],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [i for i in eos if i is not None],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    scaling = get("rope.scaling.type", "none")
    if scaling != "none":
        raw["rope_scaling"] = {"rope_type": scaling, "factor": get("rope.scaling.factor", 1.0)}
    elif _ROPE_FACTORS in tensors:
        raw["rope_scaling"] = _llama3_scaling(raw, np.array(tensors[_ROPE_FACTORS].data))
    return raw


def _llama3_scaling(raw: dict[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """GGUF keeps the divisors that Llama 3's scaling comes to, not its settings. These are the released models'."""
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = rope_inverse_frequencies(ModelConfig.from_hf(raw))
    scaled = rope_inverse_frequencies(ModelConfig.from_hf({**raw, "rope_scaling": scaling}))
    if not torch.allclose(plain / torch.from_numpy(factors), scaled, rtol=1e-3):
        raise ModelError(
            "the GGUF file stretches its rotary frequencies in a way that is not supported (not Llama 3's)"
        )
    return scaling


def _weights(config: ModelConfig, tensors: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    from gguf.quants import dequantize

    kept = {"F32": torch.float32, "BF16": torch.bfloat16}
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    for name, tensor in tensors.items():
        if name == _ROPE_FACTORS:
            continue
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        part = name.split(".")[2] if name.startswith("blk.") else ""
        if config.architecture == "llama" and part in heads:
            values = _unpermute(values, heads[part])
        yield _checkpoint_name(name), values.to(kept.get(tensor.tensor_type.name, torch.float16)).contiguous()


def _checkpoint_name(name: str) -> str:
    if name in _OUTER_TENSORS:
        return _OUTER_TENSORS[name]
    blk, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, kind = rest.rpartition(".")
    if blk != "blk" or part not in _TENSORS:
        raise ModelError(f"the GGUF file holds a tensor {name!r}, which this architecture does not have")
    return f"model.layers.{layer}.{_TENSORS[part]}.{kind}"


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """llama.cpp lays the rows of a head out as interleaved pairs; the half-split rotation wants them in two halves."""
    pairs = weight.view(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _tokenizer(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    """The byte-level BPE that the metadata describes."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    before = _pre_tokenizers()
    if kind != "gpt2" or pre not in before:
        raise ModelError(
            f"the GGUF file has a tokenizer of kind {kind!r}, {pre!r}; supported: 'gpt2' with {', '.join(before)}. "
            "Use the model's Hugging Face folder instead"
        )
    try:
        names, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
        vocab = {name: i for i, name in enumerate(names)}
        result = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"the GGUF file's tokenizer is incomplete or damaged ({error}); fetch it again") from None
    result.pre_tokenizer = before[pre]
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([name for name, kind in zip(names, types) if kind == _CONTROL])
    added = [name for name, kind in zip(names, types) if kind == _USER_DEFINED]
    result.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in added])
    return result


def _pre_tokenizers() -> dict[str, pre_tokenizers.PreTokenizer]:
    """How text is cut before merging, by llama.cpp's names."""

    def by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return {
        "default": gpt2,
        "gpt-2": gpt2,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]),
        "llama-bpe": by_pattern(_LLAMA3_PATTERN),
        "qwen2": by_pattern(_LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")),
    }
