"""Models to measure with: Llama shapes with random weights, as a Hugging Face folder and as a GGUF file.

Speed does not depend on what the weights say, so nothing has to be downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import MissingDependency, ModelError, UnknownName


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # No end of sequence, so that nothing ends early. Without the nulls transformers fills in its own ids.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


SHAPES = {
    "15M": _llama(288, 6, 9, 9, 768, 32000),
    "110M": _llama(768, 12, 12, 12, 2048, 32000),
    "360M": _llama(960, 32, 15, 5, 2560, 49152),  # as SmolLM2-360M
}
_ATTENTION_MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_LAYER_MATRICES = (*_ATTENTION_MATRICES, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def shape_config(shape: str | Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a shape's name, or of a mapping that changes some of the smallest shape's values."""
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise UnknownName("shape", shape, list(SHAPES))
        return dict(SHAPES[shape])
    config = SHAPES["15M"] | dict(shape)
    return config | {"head_dim": config["hidden_size"] // config["num_attention_heads"]} | dict(shape)


def write_model(shape: str | Mapping[str, Any], folder: str | Path, seed: int = 0, deviation: float = 0.06) -> Path:
    """Write config.json and float32 model.safetensors, weights from a normal distribution around 0. Returns the folder.

    shape: see shape_config. deviation: with much less, as 0.02, a greedy output is one token over and over, and so
    proves nothing; very small models need more, as 0.15. Raises UnknownName.
    """
    import torch
    from safetensors.torch import save_file

    config = shape_config(shape)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(size) if len(size) == 1 else torch.empty(size).normal_(0, deviation, generator=generator)
        for name, size in tensor_sizes(config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def tensor_sizes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and size of each tensor of such a checkpoint."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    matrices = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (inner, hidden), (inner, hidden), (hidden, inner)]
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        sizes |= {f"{prefix}{name}.weight": size for name, size in zip(_LAYER_MATRICES, matrices)}
        sizes |= {f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    sizes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        sizes["lm_head.weight"] = (config["vocab_size"], hidden)
    return sizes


def write_gguf(folder: str | Path, file: str | Path, dtype: str) -> Path:
    """Write a folder's weights as one GGUF file for llama.cpp; matrices in dtype ("float32" or "bfloat16").

    The file appears only when it is whole. Its vocabulary is a stand-in without special tokens: requests are token ids,
    and no token may end them. Raises ModelError for what is no plain Llama, MissingDependency without gguf.
    """
    try:
        import gguf
    except ImportError:
        raise MissingDependency("to write a GGUF file, install the extra: pip install 'minibatcher[gguf]'") from None
    from safetensors import safe_open

    folder, file = Path(folder), Path(file)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _check_plain(config, folder)
    # llama.cpp computes with norms in float32 whatever the rest is in.
    kinds = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}
    types = {"float32": gguf.LlamaFileType.ALL_F32, "bfloat16": gguf.LlamaFileType.MOSTLY_BF16}
    if dtype not in kinds:
        raise UnknownName("precision", dtype, list(kinds))
    partial = file.with_name(file.name + ".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_file_type(types[dtype])
    _describe(writer, config)
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:  # numpy has no bfloat16
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            values = tensors.get_tensor(name).float().numpy()
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                values = _interleave(values, config["head_dim"])
            kind = kinds["float32" if values.ndim == 1 else dtype]
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.replace(file)


def _check_plain(config: Mapping[str, Any], folder: Path) -> None:
    if config.get("model_type") != "llama" or config.get("rope_scaling"):
        raise ModelError(f"{str(folder)!r} is no plain Llama without RoPE scaling; give a model that write_model wrote")


def _describe(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    # Of llama.cpp's kinds of vocabulary this one alone has no beginning or end of sequence by default.
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(["\\n", *(f"t{i}" for i in range(1, config["vocab_size"]))])


def _interleave(weight: Any, head_dim: int) -> Any:
    """Rows in llama.cpp's order: it rotates neighbours in a head, Hugging Face's models rows half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(rows // head_dim, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _GGUF_OUTER:
        return f"{_GGUF_OUTER[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_LAYER[part]}.weight"
