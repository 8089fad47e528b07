"""The ways in which a CPU computes a step: the same answers by PyTorch, by prepacked weights and by compiled loops."""

import gc
import os
import stat
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minibatcher.attention import RaggedBatch, reference, store_kv
from minibatcher.build import build_engine
from minibatcher.compiled import library as libraries
from minibatcher.compiled.model import PARTS, CompiledModel, obstacle
from minibatcher.cpu_path import choose_cpu_path
from minibatcher.errors import DeviceError, InvalidParameter, UnknownName
from minibatcher.kernels.random_model import TINY, random_model
from minibatcher.model.loader import load_model
from minibatcher.model.prepacked import PrepackedLinear
from minibatcher.request import Request, SamplingParams

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(libraries.find_compiler() is None, reason="there is no C++ compiler here")
TARGETS = [None] + (["-march=x86-64-v3", "-march=x86-64"] if libraries.platform.machine() == "x86_64" else [])
QWEN2 = TINY | {"model_type": "qwen2", "tie_word_embeddings": False}
QWEN3 = TINY | {"model_type": "qwen3", "head_dim": 32}


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory):
    """One for all tests here, so that nothing is compiled twice and nothing is left behind."""
    before = os.environ.get("MINIBATCHER_CACHE")
    os.environ["MINIBATCHER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    libraries.library.cache_clear()
    yield
    libraries.library.cache_clear()
    if before is None:
        del os.environ["MINIBATCHER_CACHE"]
    else:
        os.environ["MINIBATCHER_CACHE"] = before


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def tiny(dtype=torch.float32, **changes):
    config = TINY | {"num_hidden_layers": 2} | changes
    model = random_model(config, "tiny", CPU, dtype)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.model.named_parameters():
        if parameter.dim() == 1:  # weights of norms that are all 1, and biases of 0, would hide that they are used
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + (0 if name.endswith("bias") else 0.5))
        else:
            parameter.mul_(5)  # else attention is nearly uniform whatever it does
    return model


class Step:
    """Requests of `query_lens` new tokens in contexts of `context_lens`, in a shuffled pool of random contents."""

    def __init__(self, model, query_lens, context_lens, block_size=16, newest=None):
        generator = torch.Generator().manual_seed(0)
        config = model.config
        counts = [-(-length // block_size) for length in context_lens]
        blocks = torch.randperm(sum(counts) + 3, generator=generator)
        tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            tables[row, :count] = blocks[sum(counts[:row]) :][:count]
        places = [torch.arange(c - q, c) for q, c in zip(query_lens, context_lens)]
        mapping = torch.cat([t.long()[p // block_size] * block_size + p % block_size for t, p in zip(tables, places)])
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        self.positions = torch.cat(places)
        self.token_ids = torch.randint(config.vocab_size, (len(mapping),), generator=generator)
        lengths = torch.tensor(context_lens, dtype=torch.int32)
        self.batch = RaggedBatch(mapping, starts, lengths, tables, list(query_lens), list(context_lens))
        self.newest = (starts[1:] - 1).long() if newest is None else torch.tensor(newest, dtype=torch.int64)
        shape = (2, len(blocks), block_size, config.num_kv_heads, config.head_dim)
        pool = [torch.randn(shape, generator=generator).to(model.dtype) for _ in range(config.num_layers)]
        self.pool = [(layer[0], layer[1]) for layer in pool]

    @torch.inference_mode()
    def by_the_formula(self, model):
        """Logits and pool as PyTorch and the reference attention make them."""
        pool = [(k.clone(), v.clone()) for k, v in self.pool]

        def attend(layer, q, k, v):
            store_kv(k, v, *pool[layer], self.batch.slot_mapping)
            return reference.ragged_attention(q, *pool[layer], self.batch, model.config.head_dim**-0.5)

        hidden = model.model(self.token_ids, self.positions, attend)
        return model.model.logits(hidden[self.newest]), pool

    def compiled(self, compiled):
        pool = [(k.clone(), v.clone()) for k, v in self.pool]
        logits, best = compiled.step(self.token_ids, self.positions, self.batch, self.newest, pool)
        assert torch.equal(best, logits.argmax(-1))
        return logits, pool


def assert_same_step(model, step, target=None, tolerance=2e-4):
    expected, pool = step.by_the_formula(model)
    got, stored = step.compiled(CompiledModel(model.model, model.dtype, target))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(stored, pool):
        for mine, other in zip(ours, theirs):
            torch.testing.assert_close(mine.float(), other.float(), rtol=tolerance, atol=tolerance)


CONFIGS = {
    "grouped heads": {},
    "one key head": {"num_key_value_heads": 1},
    "no grouping": {"num_key_value_heads": 4},
    "qwen2: biases, own head": QWEN2,
    "qwen3: norms of heads": QWEN3,
    "odd widths": {"hidden_size": 80, "intermediate_size": 144, "head_dim": 48, "vocab_size": 77},
    "head of 64": {"head_dim": 64},
    "head of 128": {"head_dim": 128},
    "llama 3 rotation": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@needs_compiler
@pytest.mark.parametrize("name", CONFIGS)
def test_a_mixed_step_is_that_of_the_formula(name):
    model = tiny(**CONFIGS[name])
    assert_same_step(model, Step(model, [1, 7, 1, 40, 1], [33, 7, 1, 90, 300]))


@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_width_of_vectors_computes_the_same(target, dtype):
    model = tiny(dtype)
    tolerance = 2e-4 if dtype == torch.float32 else 0.15
    if target == "-march=x86-64-v3" and not torch.cpu._is_avx2_supported():
        pytest.skip("this processor has no AVX2")
    assert_same_step(model, Step(model, [1, 13, 1], [70, 20, 16]), target, tolerance)


@needs_compiler
@pytest.mark.parametrize("block_size", [1, 5, 16, 512])
def test_blocks_of_any_size(block_size):
    model = tiny()
    assert_same_step(model, Step(model, [1, 9, 1], [40, 130, 1], block_size))


@needs_compiler
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 12, 13, 25, 97, 200])
def test_any_number_of_rows_and_threads(num_threads, rows, threads):
    """Tiles of every height, one block of rows and several, decodes with all heads together and apart."""
    threads(num_threads)
    model = tiny()
    assert_same_step(model, Step(model, [1] * rows, [3 + r % 40 for r in range(rows)]))
    assert_same_step(model, Step(model, [rows], [rows + 2]))


@needs_compiler
def test_a_long_context_is_rescaled_on_the_way():
    """Longer than one stretch of a decode and one task of a chunk, with scores that grow along the keys."""
    model = tiny()
    step = Step(model, [1, 150], [700, 400])
    for k, _ in step.pool:
        k *= torch.linspace(0.1, 3, k.shape[0])[:, None, None, None]
    assert_same_step(model, step)


@needs_compiler
@pytest.mark.parametrize("switch", libraries.SWITCHES)
def test_nothing_that_can_be_turned_off_changes_an_answer(switch):
    model = tiny()
    for newest in ([0, 40], []):
        step = Step(model, [1, 40, 1], [33, 90, 12], newest=newest)
        expected, pool = step.by_the_formula(model)
        got, stored = step.compiled(CompiledModel(model.model, model.dtype, without=(switch,)))
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(stored, pool, rtol=2e-4, atol=2e-4)


@needs_compiler
@pytest.mark.parametrize("newest", [[], [0], [3, 11]])
def test_only_the_logits_that_are_wanted(newest):
    model = tiny()
    assert_same_step(model, Step(model, [1, 20], [9, 30], newest=newest))


@needs_compiler
def test_of_equal_logits_the_first_is_best():
    model = tiny(tie_word_embeddings=False)
    model.model.lm_head.weight[:] = model.model.lm_head.weight[0]
    step = Step(model, [1, 5], [9, 30])
    compiled = CompiledModel(model.model, model.dtype)
    _, best = compiled.step(step.token_ids, step.positions, step.batch, step.newest, step.pool)
    assert best.tolist() == [0, 0]


@needs_compiler
def test_banned_tokens_do_not_come_though_they_are_best():
    wanted = [("To be", SamplingParams(max_tokens=12, min_tokens=12, temperature=0, stop_token_ids=tuple(range(400))))]
    fast, timeline = outputs(wanted, cpu_path="compiled")
    assert fast == outputs(wanted)[0]
    assert min(timeline.requests["r0"].output_token_ids[:-1]) >= 400


@needs_compiler
def test_the_time_of_each_part_is_told():
    model = tiny()
    compiled = CompiledModel(model.model, model.dtype)
    compiled.seconds = torch.zeros(len(PARTS), dtype=torch.float64)
    Step(model, [1, 20], [9, 30]).compiled(compiled)
    assert (compiled.seconds > 0).all()


def requests(**options):
    texts = ["KING:\nWhat says", "Enter two", "FIRST LORD:\nMy gracious lord, the", "O", "To be", "Once more unto"]
    return [(text, SamplingParams(max_tokens=8 + 5 * i, seed=i, **options)) for i, text in enumerate(texts)]


def outputs(wanted, **options):
    engine = build_engine("bard", **{"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 96} | options)
    engine.run([Request(f"r{i}", engine.encode(text), params) for i, (text, params) in enumerate(wanted)])
    return {name: record.output_hash for name, record in engine.timeline.requests.items()}, engine.timeline


@pytest.mark.parametrize("path", ["prepacked", pytest.param("compiled", marks=needs_compiler)])
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "static"},
        {"strategy": "dynamic"},
        {"strategy": "continuous"},
        {"strategy": "chunked"},
        {"strategy": "chunked", "kv_cache_tokens": 64, "block_size": 4},
        {"strategy": "continuous", "kv_cache_tokens": 64, "block_size": 4, "preemption": "swap"},
        {"strategy": "chunked", "enable_prefix_caching": True},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_answers_do_not_depend_on_the_path(path, options):
    plain, _ = outputs(requests(temperature=0), **options)
    fast, timeline = outputs(requests(temperature=0), cpu_path=path, **options)
    assert fast == plain
    assert timeline.header["cpu_path"] == path
    if "kv_cache_tokens" in options:
        assert any(step.preempted for step in timeline.steps)


@needs_compiler
def test_sampled_answers_do_not_depend_on_it_either():
    wanted = requests(temperature=0.9, top_k=40)
    assert outputs(wanted, cpu_path="compiled")[0] == outputs(wanted)[0]


@needs_compiler
def test_engines_on_a_model_share_its_packed_weights():
    model = load_model("bard")
    assert choose_cpu_path("compiled", model).compiled is choose_cpu_path("auto", model).compiled
    assert choose_cpu_path("prepacked", model).model is choose_cpu_path("prepacked", model).model


@needs_compiler
def test_engines_on_a_model_may_step_in_threads():
    """Steps use the model's one workspace: none may begin before another has ended."""
    model = tiny()
    compiled = CompiledModel(model.model, model.dtype)
    steps = [Step(model, [1, size], [9, 60 + size]) for size in (90, 40, 7, 60)]
    expected = [step.compiled(compiled)[0] for step in steps]

    def repeat(step):
        return [step.compiled(compiled)[0] for _ in range(40)]

    with ThreadPoolExecutor(len(steps)) as pool:
        for logits, got in zip(expected, pool.map(repeat, steps)):
            for each in got:
                torch.testing.assert_close(each, logits, rtol=2e-4, atol=2e-4)


@needs_compiler
def test_an_engine_that_is_dropped_takes_its_pool_with_it():
    model = load_model("bard")
    engine = build_engine(model, cpu_path="compiled", max_num_seqs=2, max_model_len=64)
    engine.run([Request("r", engine.encode("To be"), SamplingParams(max_tokens=3))])
    pool = weakref.ref(engine.runner.pool[0][0])
    del engine
    gc.collect()
    assert pool() is None


@needs_compiler
def test_compiled_brings_its_own_attention():
    _, timeline = outputs(requests()[:1], cpu_path="compiled")
    assert timeline.header["attention"] == "compiled"
    with pytest.raises(InvalidParameter, match="brings its own attention, so attention 'sdpa'"):
        build_engine("bard", cpu_path="compiled", attention="sdpa")


def test_a_prepacked_product_is_the_plain_one():
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(size, generator=generator) for size in ((40, 48), (40,), (9, 48)))
    torch.testing.assert_close(PrepackedLinear(weight, bias)(x), torch.nn.functional.linear(x, weight, bias))


def test_obstacles_are_sentences():
    config = tiny().config
    assert obstacle(config, torch.float32, CPU) is None
    assert obstacle(config, torch.float16, CPU) == "it serves float32 and bfloat16, not float16"
    assert "for CPUs, and the model is on cuda" in obstacle(config, torch.float32, torch.device("cuda"))
    assert "not 24" in obstacle(tiny(head_dim=24).config, torch.float32, CPU)
    assert (
        obstacle(tiny(hidden_size=72, head_dim=16).config, torch.float32, CPU)
        == "hidden_size must be a multiple of 16, not 72"
    )


def test_what_is_asked_for_is_never_replaced():
    model = load_model("bard", dtype="float16")
    for path in ("compiled", "prepacked"):
        with pytest.raises(DeviceError, match="float32 and bfloat16"):
            choose_cpu_path(path, model)
    assert choose_cpu_path("auto", model).name == "plain"
    with pytest.raises(UnknownName, match="turbo"):
        choose_cpu_path("turbo", model)


def test_without_a_compiler_auto_takes_prepacked_weights(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    model = load_model("bard")
    chosen = choose_cpu_path("auto", model)
    assert chosen.name == "prepacked"
    assert "no C++ compiler" in chosen.why
    with pytest.raises(DeviceError, match=r"there is no C\+\+ compiler here"):
        choose_cpu_path("compiled", model)


def test_prepacked_weights_ask_for_no_compiler(monkeypatch):
    monkeypatch.setattr("minibatcher.cpu_path.library", lambda *_: pytest.fail("compiled for nothing"))
    chosen = choose_cpu_path("prepacked", load_model("bard"))
    assert (chosen.name, chosen.why) == ("prepacked", "asked for by name")


@pytest.fixture
def compiler_that_fails(monkeypatch, tmp_path):
    script = tmp_path / "broken-c++"
    script.write_text("#!/bin/sh\necho 'x.cpp:1: error: out of ideas' >&2\nexit 1\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("MINIBATCHER_CACHE", str(tmp_path / "cache"))
    libraries.library.cache_clear()
    yield
    libraries.library.cache_clear()


def test_a_compiler_that_fails_is_quoted(compiler_that_fails):
    with pytest.raises(DeviceError, match=r"could not compile the C\+\+ library .*out of ideas"):
        libraries.library(torch.float32)
    assert list(libraries.cache_folder().iterdir()) == []


@needs_compiler
def test_a_library_leaves_the_floats_of_the_process_alone():
    """A library built with -ffast-math would make every subnormal number of this process 0 as soon as it is loaded."""
    code = (
        "import torch; from minibatcher.compiled.library import library; "
        "[library(dtype) for dtype in (torch.float32, torch.bfloat16)]; print(5e-324 * float('1') > 0, 2.0 ** -1074)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == "True 5e-324\n"


@needs_compiler
def test_a_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIBATCHER_CACHE", str(tmp_path))
    libraries.library.cache_clear()
    libraries.library(torch.float32)
    (made,) = tmp_path.iterdir()
    libraries.library.cache_clear()
    monkeypatch.setattr(libraries, "_compile", lambda *_: pytest.fail("compiled again"))
    libraries.library(torch.float32)
    assert list(tmp_path.iterdir()) == [made]
    libraries.library.cache_clear()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIBATCHER_CACHE", str(tmp_path / "file"))
    libraries.library.cache_clear()
    with pytest.raises(DeviceError, match=r"nowhere to keep the C\+\+ library .*MINIBATCHER_CACHE"):
        libraries.library(torch.bfloat16)
    libraries.library.cache_clear()


@needs_compiler
def test_a_damaged_library_is_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIBATCHER_CACHE", str(tmp_path))
    libraries.library.cache_clear()
    libraries.library(torch.float32)
    (made,) = tmp_path.iterdir()
    folder = tmp_path / "other"  # by its old name the system would find the one that is loaded
    folder.mkdir()
    (folder / made.name).write_bytes(made.read_bytes()[:100])
    monkeypatch.setenv("MINIBATCHER_CACHE", str(folder))
    libraries.library.cache_clear()
    libraries.library(torch.float32)
    assert (folder / made.name).stat().st_size == made.stat().st_size
    libraries.library.cache_clear()


def test_a_compiler_that_makes_no_library_is_named(monkeypatch, tmp_path):
    script = tmp_path / "idle-c++"
    script.write_text("#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done\necho nothing > $1\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("MINIBATCHER_CACHE", str(tmp_path / "cache"))
    libraries.library.cache_clear()
    with pytest.raises(DeviceError, match=r"idle-c\+\+ made a library that can't be loaded"):
        libraries.library(torch.float32)
    libraries.library.cache_clear()


def test_without_a_home_the_cache_folder_is_asked_for(monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    for name in ("MINIBATCHER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(libraries.Path, "home", none)
    with pytest.raises(DeviceError, match="set MINIBATCHER_CACHE to a folder"):
        libraries.cache_folder()


def test_only_paths_that_can_serve_are_advised():
    with pytest.raises(DeviceError, match=r"use the plain path$"):
        choose_cpu_path("compiled", load_model("bard", dtype="float16"))


def test_a_sentence_names_the_compiled_path_once(compiler_that_fails):
    with pytest.raises(DeviceError) as caught:
        choose_cpu_path("compiled", load_model("bard"))
    assert str(caught.value).count("compiled CPU path") == 1
