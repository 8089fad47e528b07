"""The engine on the Triton kernels, interpreted: the same answers as on SDPA."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need Triton, which exists for Linux only")
torch = pytest.importorskip("torch")

import interpreter  # noqa: E402
from test_gpu_path import Replays  # noqa: E402

from minibatcher import Engine, SamplingParams, load_workload  # noqa: E402
from minibatcher.build import assemble_engine  # noqa: E402
from minibatcher.compare import run_comparison  # noqa: E402
from minibatcher.model.loader import load_model  # noqa: E402
from minibatcher.request import Request  # noqa: E402
from minibatcher.runners.graphs import DecodeGraphs  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are not interpreted")
interpreter.install()


@pytest.fixture(scope="module")
def bard():
    return load_model("bard", dtype="float32")


def test_a_comparison_on_triton_gives_the_hashes_of_sdpa(bard):
    bounds = "uniform:prompt_min=3,prompt_max=14,output_min=2,output_max=6,request_rate=inf"
    workload = load_workload(bounds, num_requests=4, seed=2)
    options = {"strategies": ["static", "continuous", "chunked"], "max_model_len": 24, "max_num_seqs": 3}
    options |= {"block_size": 4, "max_num_batched_tokens": 16}
    hashes = {}
    for attention in ("sdpa", "triton"):
        timelines = run_comparison(workload, model=bard, attention=attention, **options)
        hashes[attention] = [[r.output_hash for r in t.requests.values()] for t in timelines.values()]
        for timeline in timelines.values():
            name = {"sdpa": "sdpa", "triton": "triton (interpreted)"}[attention]
            assert timeline.header["attention"] == name and timeline.header["attention_why"]
    assert hashes["triton"] == hashes["sdpa"] == [hashes["sdpa"][0]] * 3
    assert len(set(hashes["sdpa"][0])) == 4


def test_padding_rows_of_a_graph_touch_nothing(bard):
    def serve(engine):
        todo = [
            Request(f"r{i}", list(range(3 + i, 9 + 3 * i)), SamplingParams(max_tokens=n, ignore_eos=True))
            for i, n in enumerate((2, 5, 3))
        ]
        engine.run(todo)
        return [r.output_token_ids for r in todo]

    options = {"strategy": "continuous", "max_model_len": 32, "max_num_seqs": 3, "block_size": 8}
    plain = serve(Engine.from_model(bard, attention="sdpa", **options))
    engine = assemble_engine(bard, attention="triton", **options)
    engine.runner.graphs = DecodeGraphs([4], max_blocks=4, device=bard.device, record=Replays())
    engine.runner.allocate()
    assert all(not k.any() and not v.any() for k, v in engine.runner.pool)
    assert serve(engine) == plain


def test_the_command_turns_the_interpreter_on_by_itself():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    texts = []
    for attention in ("sdpa", "triton"):
        command = [sys.executable, "-m", "minibatcher", "generate", "HAMLET:", "--attention", attention]
        done = subprocess.run(
            [*command, "--max-tokens", "3", "--max-model-len", "32", "--temperature", "0"],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1] != "HAMLET:\n"
