"""Figures of devices and models against published ones, and the formulas against counting."""

import csv
import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from minibatcher.errors import DeviceError, InvalidParameter, ModelError, UnknownName
from minibatcher.hardware import ALIASES, Device, ModelSpec, device, devices, model_spec, model_specs
from minibatcher.model.config import ModelConfig
from minibatcher.runners.roofline import CostModel, Efficiency, StepWork

torch = pytest.importorskip("torch")

# Weights in the published checkpoints: the safetensors count that huggingface.co shows (for Llama-2 without the rotary
# frequencies that its files also hold, 64 a layer).
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
}
# Without embeddings, from the model cards of Qwen3 (their safetensors hold the tied table of the small ones twice).
PUBLISHED_NON_EMBEDDING = {
    "qwen3-0.6b": 0.44e9,
    "qwen3-1.7b": 1.4e9,
    "qwen3-4b": 3.6e9,
    "qwen3-8b": 6.95e9,
    "qwen3-14b": 13.2e9,
    "qwen3-32b": 31.2e9,
}
DEVICES = ("t4", "l4", "a10", "rtx-4090", "rtx-5090", "rtx-pro-6000", "a100-40", "a100-80", "h100", "h200", "b200")
MODELS = (*PUBLISHED, *PUBLISHED_NON_EMBEDDING, "opt-13b", "bard")


# Devices


def test_devices_have_every_figure_and_its_source():
    assert tuple(devices()) == DEVICES
    for name, each in devices().items():
        assert each.name == name and len(each.source) > 30 and not each.measured
        assert 16 * 2**30 <= each.memory_bytes <= 180 * 2**30
        assert 300e9 <= each.bandwidth <= 8e12 and 16e9 <= each.link_bandwidth <= 900e9
        assert 1 < each.rate("float16") / each.rate("float32") < 31
        # A step of one token is memory-bound everywhere, one of a thousand nowhere.
        assert 100 < each.ridge("float16") < 500
    assert [name for name in DEVICES if "bfloat16" not in device(name).flops] == ["t4"]
    halved = [name for name in DEVICES if "halved" in device(name).source]
    assert halved == ["l4", "h100", "h200", "b200"]  # their data sheets give the rate with sparsity only


def test_device_names():
    assert device("A100") is device("a100-80") is devices()["a100-80"]
    assert set(ALIASES.values()) <= set(DEVICES)
    with pytest.raises(UnknownName, match=r"unknown hardware 'h1000'; known: t4, l4, a10, .*, b200"):
        device("h1000")
    with pytest.raises(InvalidParameter, match="t4 has no bfloat16 rate; it computes in float16, float32"):
        device("t4").rate("bfloat16")


def test_ridge():
    assert device("a100-80").ridge("bfloat16") == pytest.approx(312e12 / 2039e9)


# Models


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_checkpoint(name: str):
    assert model_spec(name).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED_NON_EMBEDDING)
def test_parameters_without_embeddings(name: str):
    spec = model_spec(name)
    embeddings = spec.head_parameters * (1 if spec.tie_word_embeddings else 2)
    assert spec.num_parameters - embeddings == pytest.approx(PUBLISHED_NON_EMBEDDING[name], rel=0.01)


def test_opt_13b():
    opt = model_spec("opt-13b")
    # Zhang et al., «OPT», 2022, table 1: 40 layers, 40 heads, hidden 5120; what the paper rounds to 13B.
    assert opt.num_parameters == pytest.approx(12.85e9, rel=0.01)
    hidden, inner = 5120, 4 * 5120
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 2 * 2 * hidden
    assert opt.num_parameters == 40 * layer + 2 * hidden + (50272 + 2050) * hidden
    # Kwon et al., «PagedAttention», SOSP 2023, section 3: 2 × 5120 × 40 × 2 bytes, 800 KB.
    assert opt.kv_bytes_per_token("float16") == 819_200


def test_kv_bytes():
    assert model_spec("llama-3.1-8b").kv_bytes_per_token("bfloat16") == 131_072
    assert model_spec("llama-3.1-8b").kv_bytes_per_token("float32") == 262_144
    assert model_spec("llama-2-7b").kv_bytes_per_token("float16") == 2 * 32 * 4096 * 2


def test_the_table_is_complete_and_says_where_it_is_from():
    assert set(model_specs()) == set(MODELS)
    assert all(spec.source for spec in model_specs().values())


def table() -> dict[str, dict]:
    path = Path(__file__).resolve().parents[1] / "minibatcher" / "models.json"
    return {name: row["config"] for name, row in json.loads(path.read_text(encoding="utf-8")).items()}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "opt-13b"])
def test_spec_agrees_with_the_configuration_that_the_engine_reads(name: str):
    spec, config = model_spec(name), ModelConfig.from_hf(table()[name])
    assert spec.num_parameters == config.num_parameters
    assert spec.kv_bytes_per_token("bfloat16") == config.kv_bytes_per_token(2)
    assert spec.max_position_embeddings == config.max_position_embeddings


def test_bundled_model_is_in_the_table_as_it_is():
    folder = Path(__file__).resolve().parents[1] / "minibatcher" / "model" / "bard"
    if not (folder / "model.safetensors").is_file():
        pytest.skip("the bundled model is not in this checkout")
    spec, read = model_spec("bard"), model_spec(str(folder))
    assert replace(read, name="", source="") == replace(spec, name="", source="")
    with open(folder / "model.safetensors", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    sizes = [math.prod(entry["shape"]) for key, entry in header.items() if key != "__metadata__"]
    assert spec.num_parameters == sum(sizes)


CONFIG = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


def test_from_hf_fills_in_what_old_configurations_leave_out():
    spec = ModelSpec.from_hf({k: v for k, v in CONFIG.items() if k != "num_key_value_heads"}, "tiny")
    assert (spec.num_kv_heads, spec.head_dim, spec.tie_word_embeddings) == (6, 4, False)
    assert ModelSpec.from_hf(CONFIG | {"head_dim": 16}, "tiny").head_dim == 16
    assert ModelSpec.from_hf(CONFIG | {"head_dim": None}, "tiny").head_dim == 4
    assert not ModelSpec.from_hf(CONFIG | {"model_type": "gpt_neox"}, "tiny").gated_mlp


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": ...}, "the config.json of tiny lacks 'hidden_size'"),
        ({"num_attention_heads": 0}, "whole number"),
        ({"vocab_size": -5}, "vocab_size must be a whole number of at least 1, not -5"),
        ({"num_hidden_layers": 2.5}, "num_layers must be a whole number of at least 1, not 2.5"),
        ({"hidden_size": "24"}, "whole number"),
        ({"num_local_experts": 8}, "tiny is a mixture of experts"),
    ],
)
def test_from_hf_refuses(change: dict, sentence: str):
    config = {key: value for key, value in (CONFIG | change).items() if value is not ...}
    with pytest.raises(ModelError, match=sentence):
        ModelSpec.from_hf(config, "tiny")


def test_model_spec_reads_files_and_lists_names(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert model_spec(str(tmp_path)).name == tmp_path.name
    assert model_spec(str(tmp_path / "config.json")).intermediate_size == 40
    assert model_spec("Qwen3-8B") is model_spec("qwen3-8b")
    with pytest.raises(UnknownName, match=r"unknown model spec 'gpt-5'; known: opt-13b, .*, a folder with config.json"):
        model_spec("gpt-5")
    for text in ("{", "[1]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            model_spec(str(tmp_path))


# Formulas against counting. Sizes are all different, so that a wrong one shows.

TINY = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
FAMILIES = [(kind, tied) for kind in ("llama", "qwen2", "qwen3") for tied in (False, True)]


def tiny(kind: str, tied: bool):
    from minibatcher.model.llama import LlamaModel

    config = TINY | {"model_type": kind, "tie_word_embeddings": tied}
    return ModelSpec.from_hf(config, "tiny"), LlamaModel(ModelConfig.from_hf(config))


@pytest.mark.parametrize(("kind", "tied"), FAMILIES)
def test_parameters_and_bytes_of_a_real_model(kind: str, tied: bool):
    spec, model = tiny(kind, tied)
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())
    assert spec.weight_bytes("float32") == sum(p.numel() * p.element_size() for p in model.parameters())
    linears = [m.weight for m in model.layers.modules() if isinstance(m, torch.nn.Linear)]
    head = model.embed_tokens.weight if tied else model.lm_head.weight
    assert spec.linear_bytes("bfloat16") == 2 * sum(w.numel() for w in [*linears, head])


@pytest.mark.parametrize(("kind", "tied"), FAMILIES)
def test_linear_flops_of_a_real_step(kind: str, tied: bool):
    from torch.utils.flop_counter import FlopCounterMode

    spec, model = tiny(kind, tied)
    num_tokens, sampled = 7, torch.tensor([2, 6])
    with FlopCounterMode(display=False) as counter:
        hidden = model(torch.arange(num_tokens), torch.arange(num_tokens), lambda layer, q, k, v: q)
        model.logits(hidden[sampled])
    assert spec.linear_flops(num_tokens, len(sampled)) == counter.get_total_flops()


def test_attention_flops_and_kv_bytes_of_a_causal_prefill():
    from torch.utils.flop_counter import FlopCounterMode

    spec, model = tiny("llama", False)
    stored = []

    def attend(layer, q, k, v):
        stored.append((k, v))
        k, v = (x.repeat_interleave(3, dim=1).transpose(0, 1) for x in (k, v))  # [heads, T, head_dim]
        rows = []
        for i in range(len(q)):  # each query sees the keys up to its own, no more
            weights = (q[i, :, None] @ k[:, : i + 1].mT).softmax(-1)
            rows.append((weights @ v[:, : i + 1])[:, 0])
        return torch.stack(rows)

    num_tokens = 5
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(num_tokens), torch.arange(num_tokens), attend)
    pairs = sum(range(1, num_tokens + 1))
    assert counter.get_total_flops() - spec.linear_flops(num_tokens, 0) == spec.attention_flops(pairs)
    assert num_tokens * spec.kv_bytes_per_token("float32") == sum(k.nbytes + v.nbytes for k, v in stored)


def test_formulas_by_hand():
    spec = ModelSpec.from_hf(TINY | {"model_type": "llama", "tie_word_embeddings": True}, "tiny")
    # q 24×60, k and v 24×20 each, o 60×24, gate, up, down 24×44 each
    assert spec.layer_matrix_parameters == 1440 + 480 + 480 + 1440 + 3 * 1056 == 7008
    assert spec.head_parameters == 24 * 37 == 888
    assert spec.num_parameters == 3 * (7008 + 48) + 888 + 24 == 22080
    assert spec.kv_bytes_per_token("float16") == 2 * 2 * 10 * 3 * 2 == 240
    assert spec.linear_flops(5, 2) == 2 * (3 * 7008 * 5 + 888 * 2)
    assert spec.attention_flops(15) == 15 * 3 * 6 * (2 * 10 + 2 * 10)


# The cost of matrix products and of tensor parallelism

TOY = Device("toy", 10**6, bandwidth=1e6, flops={"float16": 1e8}, link_bandwidth=1e5)
PLAIN = Efficiency(bandwidth=1, compute=1, tile_tokens=1, step_s=0, request_s=0)


def linear_seconds(cost: CostModel, num_tokens: int, num_sampled: int = 0) -> float:
    return cost.terms(StepWork(num_tokens, num_sampled, 1, 0, 0, 0))["linear"]


def test_products_by_hand():
    spec = ModelSpec.from_hf(TINY | {"model_type": "llama"}, "tiny")
    cost = CostModel(TOY, spec, dtype="float16", efficiency=PLAIN)
    memory, compute = 3 * 7008 * 2 / 1e6, 2 * 3 * 7008 / 1e8
    assert linear_seconds(cost, 1) == pytest.approx(memory, rel=1e-3)  # far below the ridge, 100 tokens
    assert linear_seconds(cost, 100) == pytest.approx(memory * 2**0.5)
    assert linear_seconds(cost, 10_000) == pytest.approx(10_000 * compute, rel=1e-3)
    head = linear_seconds(cost, 40, 3) - linear_seconds(cost, 40)
    assert head == pytest.approx(math.hypot(888 * 2 / 1e6, 2 * 888 * 3 / 1e8))
    half = replace(cost, efficiency=replace(PLAIN, bandwidth=0.5))
    assert linear_seconds(half, 1) == pytest.approx(2 * memory, rel=1e-3)


def test_products_compute_whole_tiles():
    spec = ModelSpec.from_hf(TINY | {"model_type": "llama"}, "tiny")
    tiled = CostModel(TOY, spec, dtype="float16", efficiency=replace(PLAIN, tile_tokens=16))
    plain = replace(tiled, efficiency=PLAIN)
    for tokens, computed in ((1, 1), (15, 15), (16, 16), (17, 32), (32, 32), (33, 48), (200, 208)):
        assert linear_seconds(tiled, tokens) == linear_seconds(plain, computed)
    for wrong in (0, -1, 1.5):
        with pytest.raises(InvalidParameter, match="tile_tokens"):
            Efficiency(tile_tokens=wrong)


def test_tensor_parallelism_by_hand():
    spec = ModelSpec.from_hf(TINY | {"model_type": "llama"}, "tiny")
    one, two = (CostModel(TOY, spec, n, "float16", PLAIN) for n in (1, 2))
    work = StepWork(num_tokens=20, num_sampled=2, num_requests=2, kv_tokens_read=30, decode_pairs=10, prefill_pairs=190)
    assert one.terms(work)["all_reduce"] == 0
    assert two.terms(work)["linear"] == pytest.approx(one.terms(work)["linear"] / 2)
    assert two.terms(work)["attention"] == pytest.approx(one.terms(work)["attention"] / 2)
    sent = 2 * 1 / 2 * 20 * 24 * 2  # a ring sends twice (n - 1)/n of 20 hidden states of 24 float16
    assert two.terms(work)["all_reduce"] == pytest.approx(2 * 3 * (10e-6 + sent / 1e5))
    with pytest.raises(InvalidParameter, match="4 devices can't share the 6 heads of tiny evenly"):
        CostModel(TOY, spec, 4, "float16", PLAIN)


def test_more_devices_than_key_value_heads_keep_copies():
    spec = model_spec("llama-3.1-8b")  # 8 key/value heads
    eight, sixteen = (CostModel(device("h100"), spec, n) for n in (8, 16))
    work = StepWork(num_tokens=1, num_sampled=1, num_requests=1, kv_tokens_read=10**6, decode_pairs=0, prefill_pairs=0)
    assert sixteen.terms(work)["attention"] == pytest.approx(eight.terms(work)["attention"])
    assert sixteen.kv_capacity_tokens == pytest.approx(eight.kv_capacity_tokens, rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {"bandwidth": 0},
        {"bandwidth": "x"},
        {"flops": [1]},
        {"flops": {"float16": -1}},
        {"memory_bytes": True},
        {"name": None},
    ],
)
def test_a_device_needs_figures(changes):
    with pytest.raises(InvalidParameter, match="figures that are numbers above 0"):
        replace(TOY, **changes)


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan"), "x", True])
def test_shares_and_utilization_are_bounded(share):
    spec = model_spec("llama-3.1-8b")
    with pytest.raises(InvalidParameter, match="memory_utilization must be in"):
        CostModel(device("h100"), spec, memory_utilization=share)
    with pytest.raises(InvalidParameter, match="efficiency bandwidth must be in"):
        Efficiency(bandwidth=share)


def test_a_workspace_that_fills_the_device_is_said():
    cost = CostModel(device("h100"), model_spec("llama-3.1-8b"), memory_utilization=0.02)
    with pytest.raises(InvalidParameter, match="the workspace alone fills it"):
        cost.check_fits()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"moe_num_experts": 8}, "mixture of experts"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"num_key_value_heads": 4}, "do not divide evenly"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_configurations_that_would_be_misread_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_hf(TINY | {"model_type": "llama"} | changes, "tiny")


# Measured operator times. Source: Vidur (github.com/microsoft/vidur, MIT licence, Microsoft Corporation), A100 80 GB,
# Llama-3-8B: medians in milliseconds of attn_pre_proj, attn_post_proj, mlp_up_proj and mlp_down_proj, summed.

OPERATORS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
VIDUR_A100_MS = {
    1: 0.276,
    64: 0.324,
    128: 0.377,
    264: 0.775,
    320: 0.7875,
    384: 0.797,
    416: 1.013,
    512: 0.994,
    640: 1.3965,
    1024: 2.175,
    2048: 4.183,
    4096: 7.839,
    8192: 15.6315,
    16384: 31.555,
    32768: 62.755,
}


def one_layer(num_gpus: int = 1, **changes) -> CostModel:
    spec = replace(model_spec("llama-3.1-8b"), num_layers=1)  # the same shapes as Llama-3-8B's
    return CostModel(device("a100-80"), spec, num_gpus, efficiency=replace(Efficiency(), **changes))


def test_linear_layers_agree_with_measured_times():
    for num_tokens, milliseconds in VIDUR_A100_MS.items():
        assert linear_seconds(one_layer(), num_tokens) * 1e3 == pytest.approx(milliseconds, rel=0.15), num_tokens


def test_without_tiles_a_roofline_misses_just_past_a_tile():
    plain = linear_seconds(one_layer(tile_tokens=1), 264) * 1e3
    assert plain < 0.8 * VIDUR_A100_MS[264]
    assert plain < VIDUR_A100_MS[128] * 264 / 128  # as if 264 tokens cost no more than their share


def test_linear_layers_agree_with_the_whole_measured_profile(shared_dir: Path):
    path = shared_dir / "gpu-profiles" / "compute_a100_meta-llama_Meta-Llama-3-8B_mlp.csv"
    if not path.is_file():
        pytest.skip("no measured profile in shared/")
    errors: dict[int, list[float]] = {1: [], 2: [], 4: [], 8: []}
    costs = {n: one_layer(n) for n in errors}
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            num_tokens, gpus = int(row["num_tokens"]), int(row["num_tensor_parallel_workers"])
            if num_tokens > 256:
                measured = sum(float(row[f"time_stats.{operator}.median"]) for operator in OPERATORS) / 1e3
                errors[gpus].append(abs(linear_seconds(costs[gpus], num_tokens) / measured - 1))
    assert {n: len(found) for n, found in errors.items()} == dict.fromkeys(errors, 421)
    assert max(errors[1]) < 0.15 and max(errors[2]) < 0.15
    # Slices of four and eight GPUs are too narrow to fill each GPU with tiles below some 700 tokens.
    for gpus in (4, 8):
        assert median(errors[gpus]) < 0.05 and max(errors[gpus]) < 0.3


# This machine


def test_measure_counts_bytes_and_operations(monkeypatch: pytest.MonkeyPatch):
    from minibatcher import measure

    # Every run takes a second: figures are then the counts themselves.
    monkeypatch.setattr(measure, "_timed", lambda run, device: run() is None or 1.0)
    monkeypatch.setitem(measure.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(measure.SIZES, "cpu", (16, 24))
    lines: list[str] = []
    found = measure.measure_device(dtypes=("float32", "bfloat16"), seconds=1000, progress=lines.append)
    assert found.bandwidth == 1 << 20
    cpu = torch.device("cpu")
    assert measure._copy_bandwidth(cpu, 1 << 21, 1) == 1 << 21  # a half read, a half written
    assert measure._read_bandwidth(cpu, torch.bfloat16, 1 << 21, 1) == 1 << 21
    assert found.flops == {"float32": 2 * 24**3, "bfloat16": 2 * 24**3}
    assert found.measured and found.link_bandwidth is None and "torch" in found.source
    assert len(lines) == 5


def test_measure_this_machine(monkeypatch: pytest.MonkeyPatch):
    from minibatcher import measure

    monkeypatch.setitem(measure.COPY_BYTES, "cpu", 64 << 20)  # small and short: a test of plausibility
    monkeypatch.setitem(measure.SIZES, "cpu", (256, 512))
    found = measure.measure_device(dtypes=("float32",), seconds=0.1)
    assert 1e9 < found.bandwidth < 1e12
    assert 1e9 < found.flops["float32"] < 1e13
    assert found.memory_bytes > 2**30
    with pytest.raises(InvalidParameter, match="this-machine has no float16 rate"):
        found.rate("float16")


def test_measure_refuses():
    from minibatcher.measure import measure_device

    with pytest.raises(InvalidParameter, match="int8"):
        measure_device(dtypes=("float32", "int8"))
    with pytest.raises(InvalidParameter, match="dtypes"):
        measure_device(dtypes=())
    with pytest.raises(InvalidParameter, match="seconds"):
        measure_device(seconds=0)
    for name in ("abacus", "meta"):
        with pytest.raises(DeviceError, match=name):
            measure_device(name)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no CUDA device"):
            measure_device("cuda")
