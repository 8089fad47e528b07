"""The benchmark's whole way on a CPU: tiny shapes, a timer that runs the launch and says what it likes."""

import sys
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the kernels need Triton, which exists for Linux only")

from minibatcher.attention import triton_support  # noqa: E402
from minibatcher.hardware import ModelSpec  # noqa: E402
from minibatcher.kernels import bench, bench_engine, compare_engines, goals, peers  # noqa: E402
from minibatcher.kernels.cases import Shape, random_case, reference  # noqa: E402
from minibatcher.kernels.random_model import LLAMA_1B, TINY, random_model  # noqa: E402
from minibatcher.timeline import RowRecord, StepRecord, Timeline  # noqa: E402

CPU = torch.device("cpu")
HEADS = (4, 2, 16, 8)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not triton_support.is_interpreted(), reason="a GPU runs the benchmark itself"
)


class FakeTimer:
    """Runs what it is given once, and says 1 ms, 2 ms, 3 ms, ..."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, run) -> float:
        run()
        self.calls += 1
        return self.calls / 1000


def measure(todo):
    return list(bench.measure(FakeTimer(), CPU, torch.float32, todo, copy_bytes=8000, matrix_sizes=(8, 16)))


def test_every_job_is_timed_and_its_speed_is_a_share_of_this_device_s_rates():
    todo = bench.jobs((2,), (24,), prompt=16, num_decodes=2, heads=HEADS)
    plan, device, *rows = measure(todo)
    assert plan == {"total": 1 + len(rows)}
    assert device["copy_bytes_per_s"] == 8000 / 0.001
    assert device["matrix_flop_per_s"] == max(2 * 8**3 / 0.002, 2 * 16**3 / 0.003)
    assert [row["kind"] for row in rows] == ["prefill", "decode", "mixed", "store"]
    calls = 3
    for row in rows:
        assert row["seconds"] == pytest.approx((calls + 1) / 1000)
        assert row["share_of_copy"] == pytest.approx(row["bytes"] / row["seconds"] / device["copy_bytes_per_s"])
        assert row["share_of_matrix"] == pytest.approx(row["flops"] / row["seconds"] / device["matrix_flop_per_s"])
        calls += 1 + sum("seconds" in peer for peer in row["peers"].values())
    prefill, decode, mixed, store = rows
    assert decode["bytes"] == 2 * 24 * 2 * 2 * 16 * 4  # requests, tokens, K and V, heads, head size, float32
    assert prefill["flops"] == 4 * 4 * 4 * 16 * (16 * 17 // 2)  # prompts; FLOPs of a pair, heads, head size; pairs
    assert mixed["flops"] == 4 * 4 * 16 * (2 * 16 + 15 + 16)  # two decodes, a chunk of two
    assert store["flops"] == 0 and store["peers"] == {}
    assert prefill["peers"]["sdpa"]["seconds"] > 0 and decode["peers"]["sdpa"]["seconds"] > 0
    assert "equal length" in mixed["peers"]["sdpa"]["failure"]


def test_the_goals_own_cases_come_first_and_all_that_was_asked_is_there():
    todo = bench.jobs()
    assert [job.kind for job in todo[:2]] == ["prefill", "decode"]
    decodes = {(len(j.shape.query_lens), j.shape.context_lens[0]) for j in todo if j.kind == "decode"}
    assert decodes == {(n, m) for n in (16, 64, 128, 256) for m in (2048, 8192)}
    (mixed,) = (job for job in todo if job.kind == "mixed")
    assert mixed.shape.query_lens == (*[1] * 32, 512)


def test_a_job_that_fails_costs_no_other(monkeypatch):
    def broken(*args):
        raise RuntimeError("no such kernel")

    launchers = bench.launchers()
    monkeypatch.setattr(bench, "launchers", lambda: launchers | {"decode_attention": broken})
    rows = measure(bench.jobs((2,), (24,), prompt=16, num_decodes=2, heads=HEADS))[2:]
    assert [row["kind"] for row in rows if "failure" in row] == ["decode"]
    assert all("seconds" in row for row in rows if row["kind"] != "decode")


def test_a_job_without_room_is_skipped_and_no_failure(monkeypatch):
    from minibatcher.kernels.report import failures

    monkeypatch.setattr(bench, "_lacks_memory", lambda job, *_: "needs 26 GiB" if job.kind == "decode" else None)
    rows = measure(bench.jobs((2,), (24,), prompt=16, num_decodes=2, heads=HEADS))[1:]
    assert [row["kind"] for row in rows if row.get("skipped") == "needs 26 GiB"] == ["decode"]
    assert all("seconds" in row for row in rows[1:] if row["kind"] != "decode")
    assert failures({"sections": {"bench": {"error": None, "rows": rows}}}) == []


def test_a_lost_gpu_ends_the_section(monkeypatch):
    def lost(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bench, "launchers", lambda: dict.fromkeys(["ragged_attention", "decode_attention"], lost))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure(bench.jobs((2,), (24,), prompt=16, num_decodes=2, heads=HEADS))


@pytest.mark.parametrize("shape", [Shape((1,) * 3, (21,) * 3, *HEADS), Shape((13,) * 2, (13,) * 2, *HEADS)], ids=str)
def test_sdpa_beside_us_computes_the_same(shape):
    case = random_case(shape, torch.float32, CPU, seed=3)
    out = peers.sdpa(case)()
    if out.shape[2] == shape.query_lens[0] > 1:
        out = out.transpose(1, 2)
    torch.testing.assert_close(out.reshape(case.q.shape).double(), reference(case), atol=1e-5, rtol=1e-5)


def test_the_engine_s_step_against_its_roofline():
    run = bench_engine.EngineRun(batch=3, prompt=9, output=5)
    plan, *rows = bench_engine.measure(FakeTimer(), CPU, torch.float32, TINY, run, copy_bytes=8000)
    assert plan == {"total": 2} and [row["variant"] for row in rows] == ["Triton", "SDPA"]
    for row in rows:
        assert "failure" not in row and row["batch"] == 3
        assert 9 < row["mean_context"] <= 9 + 5
        spec = ModelSpec.from_hf(TINY, "tiny")
        step = spec.linear_bytes("float32") + 3 * row["mean_context"] * spec.kv_bytes_per_token("float32")
        assert row["roofline_seconds"] == pytest.approx(step / (8000 / 0.001))
        assert row["share_of_roofline"] == pytest.approx(row["roofline_seconds"] / row["seconds"])


def test_only_steps_in_which_all_decode_count():
    def step(index, start, duration, *tokens):
        rows = [RowRecord(i, str(i), "decode", n, 10 * (index + 1) + i) for i, n in enumerate(tokens)]
        return StepRecord(index, start, duration, rows, None, sum(tokens), 0, None, [], [], [], 0, 0, 0)

    timeline = Timeline("measured", {})
    # From end to end of full steps: 1, 2, 5 (the host took 0.5 before the step of 1.5).
    timeline.steps += [
        step(0, 0.0, 9.0, 5, 1),
        step(1, 9.0, 7.0, 1, 1),
        step(2, 16.0, 1.0, 1, 1),
        step(3, 17.5, 1.5, 1, 1),
        step(4, 19.0, 5.0, 1, 1),
        step(5, 24.0, 0.1, 1),
    ]
    assert bench_engine.decode_step(timeline, 2) == (2.0, [40, 41])


def test_the_large_model_has_a_billion_parameters_and_finite_logits():
    assert 1.2e9 < ModelSpec.from_hf(LLAMA_1B, "1b").num_parameters < 1.3e9
    model = random_model(TINY, "tiny", CPU, torch.float32)
    assert all(parameter.isfinite().all() for parameter in model.model.parameters())
    assert model.model.layers[0].mlp.down_proj.weight.std() == pytest.approx(0.02, rel=0.1)
    assert model.model.norm.weight.unique().tolist() == [1.0]


def run(attention, strategy, **hashes):
    return {"attention": attention, "strategy": strategy, "hashes": hashes}


def test_answers_are_compared_with_the_first_run_s():
    same = [run("sdpa", "static", a="x", b="y"), run("triton", "chunked", a="x", b="y")]
    assert compare_engines.answers(same) == {"kind": "answers", "runs": 2, "identical": True, "different": []}
    odd = compare_engines.answers([*same, run("triton", "static", a="x", b="z")])
    assert odd["identical"] is False and odd["different"] == ["triton static"]
    failed = compare_engines.answers([*same, {"attention": "triton", "strategy": "static", "failure": "…"}])
    assert failed["identical"] is False
    assert compare_engines.answers(same[:1])["identical"] is False  # nothing was compared


def report(*rows, trial=False):
    return {"trial": trial, "sections": {"bench": {"rows": list(rows)}}}


def decode(requests, context, share):
    return {"kind": "decode", "num_requests": requests, "context": context, "share_of_copy": share}


def test_goals_take_the_worst_of_the_kernels_and_the_best_engine():
    rows = [
        decode(16, 2048, 0.3),  # too few requests for the goal
        decode(64, 1024, 0.4),  # too short
        decode(64, 2048, 0.91),
        decode(256, 8192, 0.87),
        {"kind": "decode", "num_requests": 128, "context": 8192, "failure": "no memory"},
        {"kind": "prefill", "context": 4096, "share_of_matrix": 0.41},
        {"kind": "engine", "share_of_roofline": 0.5},
        {"kind": "engine", "share_of_roofline": 0.72},
    ]
    judged = {row["name"]: (row["value"], row["met"]) for row in goals.judge(report(*rows))}
    assert judged == {"decode": (0.87, True), "prefill": (0.41, False), "engine": (0.72, True)}
    nothing = (None, None)
    assert all((r["value"], r["met"]) == nothing for r in goals.judge(report(*rows, trial=True)))
    assert all((r["value"], r["met"]) == nothing for r in goals.judge(report()))


class FakeWrapper:
    """flashinfer's interface as documented, computed request by request."""

    def __init__(self, workspace, layout, **options) -> None:
        assert layout == "NHD" and workspace.dtype == torch.uint8

    def plan(self, *args, causal=False, q_data_type, sm_scale) -> None:
        # A decode's plan has no query offsets: one query a request.
        *offsets, self.indptr, self.indices, self.last, self.heads, self.kv_heads, self.size, self.page = args
        self.offsets = offsets[0].tolist() if offsets else list(range(len(self.indptr)))
        self.scale = sm_scale
        assert causal == bool(offsets)

    def run(self, q, caches):
        out = torch.empty_like(q)
        for r, last in enumerate(self.last.tolist()):
            pages = self.indices[self.indptr[r] : self.indptr[r + 1]].long()
            length = (len(pages) - 1) * self.page + last
            assert 1 <= last <= self.page and caches[0].shape[1:] == (self.page, self.kv_heads, self.size)
            k, v = (cache[pages].flatten(0, 1)[:length].transpose(0, 1) for cache in caches)
            rows = q[self.offsets[r] : self.offsets[r + 1]].transpose(0, 1)
            mask = torch.ones(rows.shape[1], length, dtype=torch.bool).tril(length - rows.shape[1])
            attend = torch.nn.functional.scaled_dot_product_attention
            got = attend(rows[None], k[None], v[None], attn_mask=mask, scale=self.scale, enable_gqa=True)[0]
            out[self.offsets[r] : self.offsets[r + 1]] = got.transpose(0, 1)
        return out


@pytest.mark.parametrize(
    "shape",
    [Shape((1,) * 3, (21, 8, 9), *HEADS), Shape((13, 1, 5), (13, 20, 16), *HEADS)],
    ids=str,
)
def test_flashinfer_is_given_the_same_requests(shape, monkeypatch):
    library = types.SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FakeWrapper, BatchPrefillWithPagedKVCacheWrapper=FakeWrapper
    )
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    case = random_case(shape, torch.float32, CPU, seed=5)
    torch.testing.assert_close(peers.flashinfer(case)().double(), reference(case), atol=1e-5, rtol=1e-5)
