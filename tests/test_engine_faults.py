"""What goes wrong is said in a sentence, costs nobody else anything, and leaves the engine usable."""

from __future__ import annotations

import signal
import sys

import pytest
from fakes import MemoryRunner, fake_engine, solo_answer

from minibatcher.ahead import AheadEngine
from minibatcher.clock import VirtualClock
from minibatcher.engine import Engine
from minibatcher.errors import InvalidParameter, PlanError
from minibatcher.kv import BlockKV
from minibatcher.request import Request, SamplingParams
from minibatcher.scheduling import STRATEGIES, ContinuousScheduler, SchedulerConfig, StepPlan


def requests(n: int = 5) -> list[Request]:
    return [Request(f"r{i}", [i, 7, i + 3], SamplingParams(max_tokens=4 + 3 * i)) for i in range(n)]


def check_usable(engine: Engine) -> None:
    engine.scheduler.kv.check()
    assert not engine.scheduler.has_work() and not engine.requests and engine.scheduler.kv.num_used_blocks == 0
    again = requests()
    engine.run(again)
    assert [r.output_token_ids for r in again] == [solo_answer(r.prompt_token_ids, r.params.max_tokens) for r in again]


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_interrupt_waits_for_the_step_to_end(name):
    engine = fake_engine(name, max_num_seqs=3)
    run, steps = engine.runner.run, []

    def interrupted(plan):
        steps.append(plan)
        if len(steps) == 4:
            signal.raise_signal(signal.SIGINT)
        return run(plan)

    engine.runner.run = interrupted
    rows = requests()
    timeline = engine.run(rows)
    engine.runner.run = run
    assert timeline.header["interrupted"] and len(timeline.steps) == len(steps) == 4
    submitted = [timeline.requests[r.request_id] for r in rows if r.request_id in timeline.requests]
    assert all(record.finish_reason in ("length", "abort") for record in submitted)
    for row in rows:
        assert row.output_token_ids == solo_answer(row.prompt_token_ids, 99)[: row.num_output_tokens]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    check_usable(engine)


SHARING = {"enable_prefix_caching": True, "preemption": "swap", "ordering": "fair-share", "num_blocks": 6}


@pytest.mark.parametrize(
    "name, engine_class, options",
    [
        ("static", Engine, {}),
        ("chunked", Engine, {}),
        ("chunked", AheadEngine, {}),
        ("chunked", Engine, SHARING),
        ("continuous", AheadEngine, SHARING),
    ],
)
@pytest.mark.parametrize("line", range(1, 400, 9))
def test_a_second_interrupt_anywhere_leaves_the_engine_usable(name, engine_class, options, line):
    """An impatient user interrupts between any two lines of engine, scheduler and record."""
    options = {"max_num_seqs": 2, "num_blocks": 8, "max_model_len": 24, **options}
    engine = fake_engine(name, engine_class=engine_class, **options)
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if "minibatcher" not in frame.f_code.co_filename or "interrupt" in frame.f_code.co_filename:
            return None
        if event == "line" and len(engine.timeline.steps) >= 2:
            seen += 1
            if seen == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        timeline = engine.run(requests())
    finally:
        sys.settrace(None)
    assert timeline.header["interrupted"]
    assert all(record.finish_reason in ("length", "abort") for record in timeline.requests.values())
    check_usable(engine)


def test_a_runner_that_fails_costs_only_its_step():
    engine = fake_engine("chunked", max_num_seqs=2)
    for row in requests(3):
        engine.submit(row)
    engine.step()
    run = engine.runner.run
    engine.runner.run = lambda plan: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.runner.run = run
    assert {n: r.finish_reason for n, r in engine.timeline.requests.items()} == {
        "r0": "error",
        "r1": "error",
        "r2": None,
    }
    while engine.scheduler.has_work():
        engine.step()
    assert engine.timeline.requests["r2"].finish_reason == "length"
    engine.reset()
    check_usable(engine)


def test_streams_side_by_side_lose_nothing():
    torch = pytest.importorskip("torch")
    from minibatcher import LLM

    torch.set_num_threads(1)
    llm = LLM("bard", max_model_len=128)
    params = [SamplingParams(max_tokens=25, temperature=0.9, seed=seed, ignore_eos=True) for seed in (1, 2)]
    alone = [done.text for done in llm.generate(["ROMEO:", "JULIET: I"], params)]
    for strategy in ("static", "continuous"):
        engine = LLM("bard", max_model_len=128, strategy=strategy, batch_timeout_s=0.0).engine
        streams = [engine.stream(p, q) for p, q in zip(["ROMEO:", "JULIET: I"], params)]
        texts = ["", ""]
        while any(stream is not None for stream in streams):
            for i, stream in enumerate(streams):
                if stream is not None:
                    piece = next(stream, None)
                    texts[i] += piece or ""
                    if piece is None:
                        streams[i] = None
        assert texts == alone


def test_a_request_is_served_only_once():
    engine = fake_engine("chunked")
    rows = requests()
    engine.run(rows)
    with pytest.raises(InvalidParameter, match="'r0' has been served before"):
        engine.run(rows)
    check_usable(engine)


def test_ids_are_unique_and_given_where_missing():
    engine = fake_engine("chunked")
    short = SamplingParams(max_tokens=2)
    engine.add([1], short, request_id="request-0")
    assert engine.add([1], short).request_id == "request-1"
    with pytest.raises(InvalidParameter, match="there is a request 'request-0' already"):
        engine.add([1], short, request_id="request-0")
    with pytest.raises(InvalidParameter, match="unique within a run"):
        fake_engine("chunked").run([Request("a", [1], short), Request("a", [2], short)])


@pytest.mark.parametrize("prompt", [[5.7], ["a"], [None], 3.5])
def test_prompts_are_whole_numbers(prompt):
    engine = fake_engine("chunked")
    with pytest.raises(InvalidParameter, match="sequence of whole numbers"):
        engine.add(prompt)
    assert not engine.requests


def test_token_ids_must_be_known_to_the_model():
    engine = fake_engine("chunked")
    engine.vocab_size = 1000
    for bad in ([1000], [-1], [5.0]):
        with pytest.raises(InvalidParameter, match=r"request 'x': .* is no token id; this model knows 0 to 999"):
            engine.submit(Request("x", bad))
    with pytest.raises(InvalidParameter, match="stop_token_ids of request 'x': 5000 is no token id"):
        engine.submit(Request("x", [1], SamplingParams(stop_token_ids=(5000,))))
    with pytest.raises(InvalidParameter, match="bans every token"):
        engine.submit(Request("x", [1], SamplingParams(stop_token_ids=tuple(range(1000)), min_tokens=2)))


def test_nobody_starves_behind_buckets_that_do_not_fit():
    engine = fake_engine("dynamic", max_num_seqs=4, max_model_len=64, bucket_by_length=True)
    engine.scheduler.kv = engine.runner.kv = BlockKV(1, 64)  # room for one request only
    long = Request("long", [3] * 50, SamplingParams(max_tokens=2))
    engine.submit(Request("s0", [1] * 4, SamplingParams(max_tokens=2)))
    engine.submit(long)
    for i in range(1, 40):
        engine.submit(Request(f"s{i}", [1] * 4, SamplingParams(max_tokens=2)))
    for _ in range(8):
        engine.step()
    assert long.finished


class Careless(ContinuousScheduler):
    """Breaks the contract in the way that `how` says."""

    name = "careless"
    how = ""

    def schedule(self, now: float) -> StepPlan:
        if self.how == "sleepy":
            return StepPlan()
        plan = super().schedule(now)
        first = next(iter(plan.num_tokens))
        if self.how == "greedy":
            plan.num_tokens[first] += 1
        elif self.how == "zero":
            plan.num_tokens[first] = 0
        elif self.how == "stranger":
            plan.num_tokens[Request("stranger", [1, 2])] = 2
        elif self.how == "homeless":
            self.kv.free(first.request_id)
        elif self.how == "crowded":
            self.running.extend(Request(f"x{i}", [1]) for i in range(9))
        return plan


@pytest.mark.parametrize(
    "how, message",
    [
        ("greedy", "planned 4 tokens for request 'r0', which has 3 pending"),
        ("zero", "planned 0 tokens for request 'r0', which has 3 pending"),
        ("stranger", "planned 2 tokens for request 'stranger', which holds no slot"),
        ("homeless", "planned 3 tokens for request 'r0', which has 0 tokens in a KV room of 0"),
        ("crowded", "runs 12 requests; max_num_seqs is 3"),
        ("sleepy", "has 5 waiting and 0 running requests, but plans nothing and names no time to wake at"),
    ],
)
def test_a_scheduler_that_breaks_its_contract_is_told(how, message):
    kv = BlockKV(64, 4)
    scheduler = Careless(kv, SchedulerConfig(max_num_seqs=3))
    scheduler.how = how
    engine = Engine(scheduler, MemoryRunner(kv), VirtualClock(), max_model_len=64)
    with pytest.raises(PlanError, match=f"the scheduler 'careless' {message}"):
        engine.run(requests())
