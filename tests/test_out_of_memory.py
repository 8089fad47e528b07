"""A device that runs out of memory: everybody is computed again in a smaller pool, and gets the same answer."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from faulty import (
    CASES,
    ENGINES,
    PAGED,
    SETUPS,
    check_others,
    check_usable,
    check_whole,
    faulty_engine,
    requests,
    serve,
)

from minibatcher.engine import Engine
from minibatcher.errors import OutOfMemory
from minibatcher.kv import BlockKV, PrefixKV, SlotKV
from minibatcher.request import Request, SamplingParams


@pytest.mark.parametrize("name, engine_class, setup", CASES)
@pytest.mark.parametrize("where", ["before", "after", "result"])
def test_out_of_memory_makes_the_pool_smaller_and_changes_no_answer(name, engine_class, setup, where):
    for call in (1, 2, 4, 7, 11):
        faults = {call: (where, OutOfMemory("20 GiB")), call + 1: (where, OutOfMemory("19 GiB"))}
        options = SETUPS[setup] | ({"num_blocks": 14} if "num_blocks" in SETUPS[setup] else {})
        engine = faulty_engine(name, engine_class, faults, max_num_seqs=4, **options | {"max_model_len": 24})
        before = engine.scheduler.kv.num_blocks
        todo = requests(6)
        with pytest.warns(RuntimeWarning, match="the KV pool shrinks from .* blocks: OutOfMemory: ") as told:
            ends = serve(engine, todo)
        assert f"shrinks from {before} to {int(0.8 * before)} blocks: OutOfMemory: 20 GiB" in str(told[0].message)
        check_others(engine, todo, [], ends)
        after = engine.scheduler.kv.num_blocks
        assert engine.runner.released == [int(0.8 * before), after] and after == int(0.8 * int(0.8 * before))
        told = engine.timeline.header["kv_shrunk"]
        sizes = [before, int(0.8 * before), after]
        assert [(t["from_blocks"], t["to_blocks"]) for t in told] == list(pairwise(sizes))
        assert told[0]["error"] == "20 GiB" and told[0]["time_s"] <= engine.clock.now()
        if name in ("static", "dynamic"):
            assert engine.scheduler.config.max_num_seqs == after
        assert all(len(step.rows) <= engine.timeline.num_slots for step in engine.timeline.steps)
        check_usable(engine)
        assert engine.timeline.header["num_blocks"] == after


@pytest.mark.parametrize("name, engine_class", PAGED)
def test_who_no_longer_fits_is_told_and_the_others_go_on(name, engine_class):
    engine = faulty_engine(name, engine_class, {4: ("before", OutOfMemory("20 GiB"))}, num_blocks=8, preemption="swap")
    todo = [*requests(5), Request("big", [5] * 10, SamplingParams(max_tokens=20))]
    with pytest.warns(RuntimeWarning, match="the KV pool shrinks from 8 to 6 blocks: OutOfMemory: 20 GiB"):
        ends = serve(engine, todo)
    assert "the device ran out of memory; request 'big' can never fit the KV pool" in todo[-1].error
    assert "need 8 blocks, have 6" in todo[-1].error
    check_others(engine, todo, todo[-1:], ends)
    check_whole(engine)


@pytest.mark.parametrize("name, engine_class", PAGED)
def test_who_arrives_later_and_no_longer_fits_does_not_end_the_run(name, engine_class):
    faults = {4: ("before", OutOfMemory("20 GiB"))}
    engine = faulty_engine(name, engine_class, faults, num_blocks=8)
    big = Request("big", [5] * 10, SamplingParams(max_tokens=20), arrival_time=0.05)
    todo = [*requests(5), big, Request("last", [7], SamplingParams(max_tokens=3), arrival_time=0.06)]
    with pytest.warns(RuntimeWarning, match="the KV pool shrinks from 8 to 6 blocks"):
        engine.run(todo)
    assert big.error.startswith("request 'big' can never fit the KV pool") and "need 8 blocks, have 6" in big.error
    check_others(engine, todo, [big], Counter(r.request_id for r in todo))
    check_usable(engine)


@pytest.mark.parametrize("kv", [BlockKV(8, 4), PrefixKV(8, 4), SlotKV(8, 32)])
def test_only_an_empty_pool_changes_its_size(kv):
    kv.allocate("a", 9)
    with pytest.raises(RuntimeError, match="1 requests still own KV blocks; free them before resize"):
        kv.resize(4)
    kv.free("a")
    kv.resize(4)
    kv.check()
    assert kv.num_free_blocks == kv.num_blocks == 4


@pytest.mark.parametrize("name, engine_class", ENGINES)
@pytest.mark.parametrize("keep_going", [False, True])
def test_after_three_such_steps_in_a_row_their_requests_end(name, engine_class, keep_going):
    faults = {call: ("before", OutOfMemory("20 GiB")) for call in (3, 4, 5, 6)}
    engine = faulty_engine(name, engine_class, faults, max_num_seqs=4, keep_going=keep_going)
    todo, raised = requests(), 0
    for request in todo:
        engine.submit(request)
    with pytest.warns(RuntimeWarning):
        while engine.scheduler.has_work():
            try:
                engine.step()
            except OutOfMemory:
                raised += 1
    assert raised == (0 if keep_going else 2)
    failed = [r for r in todo if r.error]
    assert set(failed) == {r for rows in engine.runner.failed[2:] for r in rows}
    assert {r.error for r in failed} == {"the step failed: OutOfMemory: 20 GiB"}
    assert len(engine.timeline.header["kv_shrunk"]) == 2
    check_others(engine, todo, failed, Counter(r.request_id for r in todo))
    check_usable(engine)


def test_a_good_step_between_begins_the_count_anew():
    faults = {call: ("before", OutOfMemory("20 GiB")) for call in (2, 3, 5, 6, 8)}
    engine = faulty_engine("chunked", faults=faults)
    with pytest.warns(RuntimeWarning):
        ends = serve(engine, todo := requests())
    check_others(engine, todo, [], ends)
    assert len(engine.timeline.header["kv_shrunk"]) == 5


def test_a_pool_of_one_block_can_not_shrink():
    engine = faulty_engine("static", faults={1: ("before", OutOfMemory("20 GiB"))}, max_num_seqs=1)
    engine.submit(request := requests(1)[0])
    with pytest.raises(OutOfMemory):
        engine.step()
    assert request.finish_reason == "error" and engine.scheduler.kv.num_blocks == 1
    check_usable(engine)


# The real runners


@pytest.fixture(scope="module")
def bard():
    pytest.importorskip("torch")
    from minibatcher import load_model

    return load_model("bard")


REAL = [
    {"strategy": "static", "max_num_seqs": 3},
    {"strategy": "continuous", "enable_prefix_caching": True, "preemption": "swap", "kv_cache_tokens": 128},
    {"strategy": "chunked", "plan_ahead": True, "kv_cache_tokens": 160},
]


@pytest.mark.parametrize("options", REAL)
def test_a_model_that_runs_out_of_memory_answers_as_ever_from_a_smaller_pool(bard, options):
    import torch

    def serve_all(engine: Engine) -> list[list[int]]:
        todo = [
            Request(
                f"r{i}", engine.encode("ROMEO: what is"[: 10 + i]), SamplingParams(max_tokens=8 + i, ignore_eos=True)
            )
            for i in range(4)
        ]
        engine.run(todo)
        return [request.output_token_ids for request in todo]

    options = {"max_model_len": 64, "batch_timeout_s": 0.0, "keep_going": False, **options}
    expected = serve_all(Engine.from_model(bard, **options))
    engine = Engine.from_model(bard, **options)
    launch, calls, before = engine.runner._launch, [], engine.scheduler.kv.num_blocks
    says = {
        3: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        7: RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    }

    def short(plan):
        calls.append(plan)
        if len(calls) in says:
            raise says[len(calls)]
        assert len(engine.runner.pool[0][0]) == engine.scheduler.kv.num_blocks
        return launch(plan)

    engine.runner._launch = short
    with pytest.warns(RuntimeWarning, match="the KV pool shrinks from .* blocks: OutOfMemory: "):
        assert serve_all(engine) == expected
    told = engine.timeline.header["kv_shrunk"]
    assert [t["from_blocks"] for t in told] == [before, int(0.8 * before)]
    assert "20 GiB" in told[0]["error"] and "DefaultCPUAllocator" in told[1]["error"]
    assert len(engine.runner.pool[0][0]) == int(0.8 * int(0.8 * before))
    check_whole(engine)


def test_what_is_out_of_memory_and_what_is_not(bard):
    import torch

    engine = Engine.from_model(bard, max_model_len=64, strategy="chunked")
    engine.submit(Request("r0", [1, 2, 3], SamplingParams(max_tokens=2)))
    plan = engine.scheduler.schedule(0.0)
    for error, kind in [
        (torch.OutOfMemoryError("CUDA"), OutOfMemory),
        (MemoryError(), OutOfMemory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), OutOfMemory),
        (RuntimeError("CUDA error: out of memory"), OutOfMemory),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
        (ValueError("out of memory"), ValueError),
    ]:
        engine.runner._launch = lambda plan, error=error: (_ for _ in ()).throw(error)
        with pytest.raises(kind) as info:
            engine.runner.launch(plan)
        assert type(info.value) is kind
        assert kind is not OutOfMemory or info.value.__context__ is None  # which would hold the step's tensors
    engine.runner.release()
    engine.scheduler.kv.num_blocks = 2**45
    with pytest.raises(OutOfMemory, match=r"a KV pool of .* GiB does not fit on cpu"):
        engine.runner.allocate()


def test_graphs_of_the_old_pool_are_dropped_with_it(bard):
    engine = Engine.from_model(bard, max_model_len=64, strategy="chunked")
    engine.runner.graphs = object()
    engine.runner.release()
    assert engine.runner.graphs is None and "pool" not in vars(engine.runner)
