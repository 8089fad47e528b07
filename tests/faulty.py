"""Engines that fail as told, and what must hold of the requests afterwards."""

from __future__ import annotations

from collections import Counter

from fakes import MemoryRunner, Promise, fake_engine, solo_answer

from minibatcher.ahead import AheadEngine
from minibatcher.engine import Engine
from minibatcher.request import Request, SamplingParams
from minibatcher.stepping import Output

ENGINES = [
    *((name, Engine) for name in ("solo", "static", "dynamic", "continuous", "chunked")),
    *((name, AheadEngine) for name in ("continuous", "chunked")),
]
PAGED = [pair for pair in ENGINES if pair[0] in ("continuous", "chunked")]
SETUPS = {
    "plain": {},
    "short": {"num_blocks": 9},
    "prefix": {"num_blocks": 9, "enable_prefix_caching": True},
    "swap": {"num_blocks": 9, "preemption": "swap"},
    "prefix and swap": {"num_blocks": 9, "enable_prefix_caching": True, "preemption": "swap", "swap_tokens": 24},
    "priority": {"num_blocks": 9, "ordering": "priority", "preemption": "swap"},
    "fair share": {"num_blocks": 9, "ordering": "fair-share", "admission": "optimistic"},
}
CASES = [
    (name, engine_class, setup)
    for name, engine_class in ENGINES
    for setup in (SETUPS if (name, engine_class) in PAGED else ["plain"])
]


class Faulty(MemoryRunner):
    """Fails as told. faults: number of the call (from 1) → (where, exception).

    where: "before" or "after" the tokens are written, or "result", when they are asked for.
    """

    def __init__(self, kv, faults=()) -> None:
        super().__init__(kv)
        self.faults, self.num_calls, self.failed, self.released = dict(faults), 0, [], []

    def run(self, plan):
        return self.launch(plan).result()

    def launch(self, plan) -> Promise:
        self.num_calls += 1
        where, error = self.faults.get(self.num_calls, (None, None))
        if where == "before":
            self._fail(plan, error)
        promise = Promise(super().run(plan))
        if where == "after":
            self._fail(plan, error)
        if where == "result":
            promise.result = lambda: self._fail(plan, error)
        return promise

    def _fail(self, plan, error):
        self.failed.append(list(plan.num_tokens))
        raise error

    def release(self) -> None:
        """What was in the pool is gone, and the new one is as large as `kv` says."""
        self.released.append(self.kv.num_blocks)
        self.pool = [None] * (self.kv.num_blocks * self.kv.block_size)


def requests(n: int = 7) -> list[Request]:
    """They begin alike, so that there is something to share."""
    return [
        Request(
            f"r{i}",
            [1, 2, 3, 4, 5, 6, 7, 8, i % 3],
            SamplingParams(max_tokens=3 + 2 * i),
            priority=i % 3,
            tenant=f"t{i % 2}",
        )
        for i in range(n)
    ]


def faulty_engine(name, engine_class=Engine, faults=(), **options) -> Engine:
    knobs = {"max_num_seqs": 3, "block_size": 4, "max_model_len": 32, "batch_timeout_s": 0.0} | options
    engine = fake_engine(name, engine_class=engine_class, **knobs)
    engine.runner = Faulty(engine.scheduler.kv, faults)
    return engine


def answer(request: Request) -> list[int]:
    return solo_answer(list(request.prompt_token_ids), request.params.max_tokens)


def serve(engine: Engine, todo: list[Request], submit: bool = True) -> Counter:
    """Step until all have ended, checking after each; returns how often each has ended, as its callback was told."""
    ends: Counter = Counter()

    def heard(output: Output) -> None:
        ends[output.request_id] += output.finish_reason is not None

    for request in todo if submit else ():
        engine.submit(request, heard)
    for _ in range(2000):
        if not engine.scheduler.has_work():
            return ends
        engine.step()
        engine.scheduler.kv.check()
        if engine.idle:
            engine._wait()
    raise AssertionError("it never ends")


def check_whole(engine: Engine) -> None:
    scheduler = engine.scheduler
    scheduler.kv.check()
    assert not scheduler.has_work() and not engine.requests and scheduler.kv.num_used_blocks == 0
    assert not engine._callbacks and not engine._detokenizers
    assert scheduler.host is None or scheduler.host.num_used_blocks == 0
    assert sorted(scheduler._free_slots) == list(range(scheduler.config.max_num_seqs))


def check_usable(engine: Engine) -> None:
    check_whole(engine)
    engine.runner.faults = {}
    at_once = Request("at once", [3, 1], SamplingParams(max_tokens=4))  # without a reset
    serve(engine, [at_once])
    assert at_once.output_token_ids == answer(at_once)
    again = requests(5)
    engine.run(again)
    assert [r.output_token_ids for r in again] == [answer(r) for r in again]
    check_whole(engine)


def check_others(engine: Engine, todo: list[Request], failed: list[Request], ends: Counter) -> None:
    """`failed` ended with an error, having got right tokens until then; the others are served as if nothing was."""
    for request in todo:
        record = engine.timeline.requests[request.request_id]
        assert record.finish_reason == request.finish_reason and record.error == request.error
        if request in failed:
            assert request.finish_reason == "error" and request.error
            assert request.output_token_ids == answer(request)[: request.num_output_tokens]
        else:
            assert request.finish_reason == "length" and request.error is None
            assert request.output_token_ids == answer(request)
    assert ends == {request.request_id: 1 for request in todo}
