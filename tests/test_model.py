import json
import math
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from minibatcher.attention import RaggedBatch, choose_attention, store_kv
from minibatcher.errors import DeviceError, MissingDependency, ModelError, UnknownName
from minibatcher.model.config import ModelConfig
from minibatcher.model.llama import LlamaModel, rope_cos_sin, rope_inverse_frequencies, rotate
from minibatcher.model.loader import checkpoint_places, fingerprint, load_model, resolve_dtype

TINY = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "llama": ("Llama", {}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-head-dim": ("Llama", {"head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 20}),
}


def hf_model(variant):
    """A transformers model with random weights, norms and biases included, so that none goes unseen."""
    transformers = pytest.importorskip("transformers")
    family, changes = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**TINY, **changes})
    torch.manual_seed(len(variant))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


@pytest.fixture
def folder(tmp_path):
    """A small complete checkpoint in transformers 4's form, made without transformers."""
    return write_checkpoint(tmp_path / "model")


def write_checkpoint(path, **changes):
    path.mkdir()
    raw = {**TINY, "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, "eos_token_id": 1, **changes}
    torch.manual_seed(5)
    model = LlamaModel(ModelConfig.from_hf(raw))
    save_file(
        {name: tensor.contiguous() for name, tensor in checkpoint_places(model).items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps(raw))
    return path


def run(model, token_ids, *, splits=(), backend="sdpa"):
    """Logits of all tokens [n, vocab_size], computed in steps that end at `splits`, over a scattered cache."""
    config, size, n = model.config, 8, len(token_ids)
    dtype = model.embed_tokens.weight.dtype
    table = torch.randperm(-(-n // size) + 2, generator=torch.Generator().manual_seed(1))
    shape = (len(table), size, config.num_kv_heads, config.head_dim)
    pool = [
        (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)) for _ in model.layers
    ]
    attention = choose_attention(backend, "cpu", dtype)
    out = []
    for start, stop in zip((0, *splits), (*splits, n)):
        positions = torch.arange(start, stop)
        slots = table[positions // size] * size + positions % size
        batch = RaggedBatch(
            slots,
            torch.tensor([0, stop - start], dtype=torch.int32),
            torch.tensor([stop], dtype=torch.int32),
            table[None].int(),
            [stop - start],
            [stop],
        )

        def attend(layer, q, k, v, batch=batch):
            store_kv(k, v, *pool[layer], batch.slot_mapping)
            return attention.ragged(q, *pool[layer], batch, config.head_dim**-0.5)

        out.append(model.logits(model(torch.tensor(token_ids[start:stop]), positions, attend)))
    return torch.cat(out)


def tokens(n, vocab_size=96):
    return torch.randint(0, vocab_size, (n,), generator=torch.Generator().manual_seed(n)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant, tmp_path):
    reference = hf_model(variant)
    reference.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    ids = tokens(150)  # longer than the original context of the scaled RoPE
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].float()
    got = run(loaded.model, ids)
    assert got.dtype == torch.float32 and expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    in_pieces = run(loaded.model, ids, splits=(70, 71, 72, 140), backend="reference")
    torch.testing.assert_close(in_pieces, expected, atol=1e-4, rtol=0)
    assert loaded.config.num_parameters == sum(p.numel() for p in loaded.model.parameters())
    assert loaded.config.num_parameters == reference.num_parameters()


@pytest.mark.parametrize("variant", ["llama", "llama-mha-tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shards", ["one file", "sharded"])
def test_saved_folders_load(variant, dtype, shards, tmp_path):
    reference = hf_model(variant).to(getattr(torch, dtype))
    reference.save_pretrained(tmp_path, max_shard_size="40KB" if shards == "sharded" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "sharded")
    loaded = load_model(tmp_path, dtype=dtype)
    assert loaded.dtype == getattr(torch, dtype)
    state = reference.state_dict()
    for name, tensor in checkpoint_places(loaded.model).items():
        assert tensor.dtype == loaded.dtype and torch.equal(tensor, state[name]), name
    exact = load_model(tmp_path)  # float32
    ids = tokens(30)
    # Read again: .to(bfloat16) above rounded also the reference's rotary frequencies.
    reference = type(reference).from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(run(exact.model, ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_near(folder, dtype):
    ids = tokens(40)
    exact, rough = run(load_model(folder).model, ids), run(load_model(folder, dtype=dtype).model, ids)
    assert rough.dtype == torch.float32 and 0 < (exact - rough).abs().max() < 0.05 * exact.abs().max()


def test_the_bundled_model_speaks():
    loaded = load_model()
    assert loaded.name == "bard" and loaded.tokenizer is not None and loaded.config.eos_token_ids
    assert loaded.model.embed_tokens.weight.dtype == torch.float32
    ids = loaded.tokenizer.encode("ROMEO: I will not go to the king, my lord, for he is dead.\n")
    logits = run(loaded.model, ids)
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item()
    assert loss < 0.8 * math.log(loaded.config.vocab_size)


def test_rotation_depends_on_distance_alone():
    config = ModelConfig.from_hf({**TINY, "model_type": "llama"})
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(i, j):
        frequencies = rope_inverse_frequencies(config)
        a, b = (rope_cos_sin(torch.tensor([p]), frequencies) for p in (i, j))
        return (rotate(q, *a) * rotate(k, *b)).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), atol=1e-4, rtol=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_a_folder_without_a_tokenizer(folder):
    loaded = load_model(folder)
    assert loaded.tokenizer is None and loaded.source == str(folder) and loaded.device.type == "cpu"
    assert loaded.config.eos_token_ids == (1,)


def test_fingerprint(folder, tmp_path):
    first = load_model(folder).fingerprint
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert load_model(copy).fingerprint == first and len(first) == 12
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, copy / "model.safetensors")
    assert load_model(copy).fingerprint != first


def test_fingerprint_of_a_large_file_sees_its_end(tmp_path):
    file = tmp_path / "w.safetensors"
    found = set()
    for end in (b"a", b"b"):
        file.write_bytes(bytes(300_000) + end)
        found |= {fingerprint({}, [file]), fingerprint({"vocab_size": 3}, [file])}
    assert len(found) == 4


def test_both_forms_of_rope_settings():
    old = {"rope_theta": 5000.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    older = {**old, "rope_scaling": {**{k: v for k, v in LLAMA3.items() if k.startswith(("f", "l", "h", "o"))}}}
    older["rope_scaling"]["type"] = "llama3"
    new = {"rope_parameters": LLAMA3}
    configs = [ModelConfig.from_hf({**TINY, "model_type": "llama", **form}) for form in (old, older, new)]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].rope_theta == 5000.0 and configs[0].rope_scaling["factor"] == 8.0
    assert ModelConfig.from_hf({**TINY, "model_type": "llama"}).rope_scaling is None


def test_eos_of_both_files():
    raw = {**TINY, "model_type": "llama", "eos_token_id": 5}
    assert ModelConfig.from_hf(raw, {"eos_token_id": [7, 5]}).eos_token_ids == (7, 5)
    assert ModelConfig.from_hf({**raw, "eos_token_id": None}).eos_token_ids == ()


def test_kv_bytes_per_token():
    opt_13b = ModelConfig("llama", 50272, 5120, 20480, 40, 40, 40, 128)
    assert opt_13b.kv_bytes_per_token(2) == 800 * 1024
    assert replace(opt_13b, num_kv_heads=8).kv_bytes_per_token(4) == 320 * 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["OPTForCausalLM"]}, r"OPTForCausalLM.*supported: LlamaForCausalLM, Qwen2.*Qwen3"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"architectures": None}, "none named"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "low_freq_factor"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_key_value_heads": 4}, "6 heads do not share 4"),
        ({"num_hidden_layers": 0}, "num_layers.*not 0"),
        ({"head_dim": 7}, "even"),
    ],
)
def test_configurations_that_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf({**TINY, "architectures": ["LlamaForCausalLM"], **changes})


def test_incomplete_configuration():
    with pytest.raises(ModelError, match="lacks 'vocab_size'"):
        ModelConfig.from_hf({"model_type": "llama", "num_attention_heads": 2})


def test_no_such_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no model 'bart'.*'bard'.*org/name"):
        load_model("bart")
    with pytest.raises(ModelError, match=r"no file '.*missing\.gguf'"):
        load_model("some/missing.gguf")
    (tmp_path / "weights.safetensors").touch()
    with pytest.raises(ModelError, match="neither a folder nor"):
        load_model("weights.safetensors")


def test_hub_id_without_the_hub_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match=r"minibatcher\[hub\]"):
        load_model("some-org/some-model")


def test_hub_trouble_is_a_sentence(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*args, **kwargs):
        raise OSError("no route to host\nand a traceback")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"'some-org/some-model'.*no route to host\); check") as caught:
        load_model("some-org/some-model")
    assert "\n" not in str(caught.value)


def test_hub_id(monkeypatch, folder):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **kwargs: str(folder))
    loaded = load_model("some-org/some-model")
    assert loaded.name == "some-org/some-model" and loaded.source == str(folder)


def damage_no_config(folder):
    (folder / "config.json").unlink()


def damage_config(folder):
    (folder / "config.json").write_text('{"vocab_size": ')


def damage_config_type(folder):
    (folder / "config.json").write_text("[1]")


def damage_no_weights(folder):
    (folder / "model.safetensors").unlink()


def damage_bin_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def damage_truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def damage_empty(folder):
    (folder / "model.safetensors").write_bytes(b"")


def damage_missing_shard(folder):
    damage_no_weights(folder)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def damage_index(folder):
    damage_no_weights(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def damage_missing_tensor(folder):
    change_weights(folder, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))


def damage_unexpected_tensor(folder):
    change_weights(folder, lambda w: w.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(48)}))


def damage_shape(folder):
    change_weights(folder, lambda w: w.update({"model.norm.weight": torch.zeros(47)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_no_config, "no config.json"),
        (damage_config, "config.json' is damaged"),
        (damage_config_type, "holds a list"),
        (damage_no_weights, "no model.safetensors"),
        (damage_bin_only, "convert it to safetensors"),
        (damage_truncated, "damaged or cut short"),
        (damage_empty, "damaged or cut short"),
        (damage_missing_shard, "lacks weight files.*00001-of-00002.*00002-of-00002"),
        (damage_index, "lists no weights"),
        (damage_missing_tensor, r"lack 1 tensors: model\.layers\.1\.mlp\.up_proj\.weight"),
        (damage_unexpected_tensor, r"hold 1 tensors .*model\.layers\.1\.self_attn\.q_proj\.bias"),
        (damage_shape, r"'model\.norm\.weight'.*\[47\].*\[48\]"),
    ],
)
def test_damaged_folders(folder, damage, message):
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_devices_and_dtypes(folder):
    with pytest.raises(UnknownName, match=r"int8.*float32"):
        load_model(folder, dtype="int8")
    with pytest.raises(DeviceError, match="not a device"):
        load_model(folder, device="gpu please")
    with pytest.raises(DeviceError, match="not supported"):
        load_model(folder, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no CUDA GPU"):
            load_model(folder, device="cuda")


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_auto_dtype_on_a_gpu(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_dtype("auto", torch.device("cuda")) is expected
    assert resolve_dtype("auto", torch.device("cpu")) is torch.float32
