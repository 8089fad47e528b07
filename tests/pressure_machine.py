"""A machine that adds, aborts, steps and fails in any order, and after each move holds the engine to its promises.

test_state_machine.py runs it over every combination of knobs, test_pressure_mutants.py against broken rules.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
import zlib
from collections import Counter
from typing import NamedTuple

import pytest
from fakes import MemoryRunner, fake_engine, solo_answer
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from minibatcher.ahead import AheadEngine
from minibatcher.engine import Engine
from minibatcher.errors import OutOfMemory, RequestRefused
from minibatcher.recorder import TimelineRecorder
from minibatcher.request import Request, SamplingParams
from minibatcher.scheduling import ADMISSIONS, ORDERINGS, WaitReason

PAGED = [(name, engine) for name in ("continuous", "chunked") for engine in (Engine, AheadEngine)]
SLOTS = [(name, Engine) for name in ("solo", "static", "dynamic")]
PREEMPTION = ("recompute", "swap", "swap to a tiny pool")
STAGES = ("before the copies", "after the copies", "after the writes", "as the tokens come")
STORIES = [[(7 * i + 3 * i * i + 500 * k) % 1000 for i in range(60)] for k in range(2)]  # how prompts begin


class Combination(NamedTuple):
    """What one run of the machine keeps fixed; it draws pool, budget and all else."""

    strategy: str
    engine_class: type[Engine]
    admission: str
    ordering: str
    prefix_caching: bool
    preemption: str


def combinations(kinds: list, *choices) -> list[Combination]:
    return [Combination(*kind, *rest) for kind in kinds for rest in itertools.product(*choices)]


COMBINATIONS = [
    *combinations(SLOTS, ADMISSIONS, ORDERINGS, [False], ["recompute"]),
    *combinations(PAGED, ADMISSIONS, ORDERINGS, [False, True], PREEMPTION),
]
NEWCOMER = st.fixed_dictionaries(
    {
        "story": st.integers(0, 1),
        "head": st.integers(0, 12) | st.integers(0, 60),
        "tail": st.lists(st.integers(0, 1), max_size=2),
        "max_tokens": st.integers(1, 24),
        "stop_after": st.none() | st.integers(1, 24),
        "priority": st.integers(0, 3),
        "tenant": st.sampled_from("abc"),
    }
)


class DeviceFailed(RuntimeError):
    """What a broken step raises."""


class NoMemory(OutOfMemory):
    """What a step raises that asks for too much."""


class WatchedRunner(MemoryRunner):
    """Fails when told to, and looks at each plan as the device would: what may it write, whom did it let overtake?"""

    machine: PressureMachine
    fail_at: str | None = None
    fail_with: type[Exception] = DeviceFailed
    fail_in_a_swap = False

    def run(self, plan):
        self.machine.check_plan(plan)
        self.swapping = bool(plan.swaps)
        self._fail("before the copies")
        return super().run(plan)

    def _compute(self, plan):
        self._fail("after the copies")
        result = super()._compute(plan)
        self._fail("after the writes")
        if type(self.machine.engine) is Engine:
            self._fail("as the tokens come")
        return result

    def launch(self, plan):
        promise = super().launch(plan)
        result = promise.result()

        def late():
            self._fail("as the tokens come")
            return result

        promise.result = late
        return promise

    def _fail(self, stage: str) -> None:
        if self.fail_at == stage and (self.swapping or not self.fail_in_a_swap):
            self.fail_at = None
            raise self.fail_with(stage)

    def release(self) -> None:
        self.pool = [None] * len(self.pool)


class CountingRecorder(TimelineRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.ends: Counter[str] = Counter()

    def closed(self, request: Request) -> None:
        super().closed(request)
        self.ends[request.request_id] += 1


def inversions(scheduler, plan) -> list[tuple[str, list[str]]]:
    """Who waits for slots or KV that less urgent ones hold, were the plan carried out; and those less urgent ones."""
    if plan.wait.reason in (WaitReason.BUDGET, WaitReason.PREEMPTED) or plan.preempted:
        return []  # it waits for something else, or for the blocks that somebody more urgent has just needed
    kv, age, found = scheduler.kv, scheduler.config.ageing_s, []
    behind_head: list[Request] = []
    for request in scheduler.waiting:
        behind = [
            r
            for r in scheduler.running
            if request.priority < r.priority
            and request.arrival_time + request.priority * age < r.arrival_time + r.priority * age
        ]
        if request is scheduler.waiting.head:
            behind_head = behind
        elif set(behind) <= set(behind_head):
            continue  # it waits for the head, and that one may take as much as it may
        kept = [r for r in scheduler.running if r not in behind]
        owned = {block for r in kept for block in kv.table(r.request_id)}
        need = kv.blocks_for(request.num_tokens)
        if kv.shares_prefixes and request.num_computed_tokens == 0:
            need -= len(owned & set(kv.lookup(request.token_slice, request.num_tokens)))
        if kept:
            need += scheduler.admission.growth(request, request.num_tokens, kv)
            need += scheduler.admission.promised(kept, kv) + int(scheduler.config.watermark * kv.num_blocks)
        if behind and need <= kv.num_blocks - len(owned):
            found.append((request.request_id, [r.request_id for r in behind]))
    return found


class PressureMachine(RuleBasedStateMachine):
    combination: Combination

    @initialize(
        num_blocks=st.integers(3, 12) | st.integers(3, 40),
        block_size=st.sampled_from([1, 1, 2, 3, 4, 7, 16]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 40),
        watermark=st.sampled_from([0.0, 0.0, 0.1, 0.4]),
        ageing_s=st.sampled_from([0.05, 1.0, 30.0]),
        prefill_first=st.booleans(),
        bucket_by_length=st.booleans(),
        patience=st.sampled_from([0.0, 0.03]),
        swap_blocks=st.integers(1, 4),
        eos=st.sampled_from([(), tuple(range(60))]),
        keep_going=st.booleans(),
        newcomers=st.lists(NEWCOMER, min_size=2, max_size=6),
    )
    def build(self, num_blocks, block_size, patience, swap_blocks, eos, keep_going, newcomers, **knobs):
        c = self.combination
        if c.strategy in ("static", "dynamic", "solo"):
            self.longest = 64
        else:
            self.longest = min(64, num_blocks * block_size)
        self.engine = fake_engine(
            c.strategy,
            engine_class=c.engine_class,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=64,
            eos=eos,
            enable_prefix_caching=c.prefix_caching,
            admission=c.admission,
            ordering=c.ordering,
            preemption=c.preemption.split()[0],
            swap_tokens=swap_blocks * block_size if "tiny" in c.preemption else None,
            batch_timeout_s=patience,
            max_queue_delay_s=patience,
            **knobs,
        )
        self.engine.keep_going = keep_going
        self.engine.recorder = self.recorder = CountingRecorder()
        self.engine.reset()
        self.runner = self.engine.runner = WatchedRunner(self.engine.scheduler.kv)
        self.runner.machine = self
        scheduler = self.engine.scheduler
        schedule = scheduler.schedule
        scheduler.schedule = lambda now: self.check_choice(scheduler.running[:1], schedule(now))
        self.requests: list[Request] = []
        self.answers: dict[Request, list[int]] = {}  # the solo runs
        self.num_failed = self.num_shrunk = 0
        self.eos = eos
        self.add(newcomers)

    # what a client and a device can do

    @rule(newcomers=st.lists(NEWCOMER, min_size=1, max_size=4))
    def add(self, newcomers):
        for newcomer in newcomers:
            self.add_one(**newcomer)

    def add_one(self, story, head, tail, max_tokens, stop_after, priority, tenant):
        if self.longest < 2:  # little is left of the pool
            return
        max_tokens = min(max_tokens, self.longest - 1)
        room = self.longest - max_tokens
        prompt = [*STORIES[story][:head], *tail][:room] or [1]
        params = SamplingParams(max_tokens=max_tokens, stop_after=stop_after)
        request = self.engine.add(prompt, params, priority=priority, tenant=tenant)
        self.requests.append(request)
        self.answers[request] = solo_answer(prompt, min(max_tokens, stop_after or max_tokens), self.eos)

    @rule(beyond=st.integers(1, 5))
    def add_too_long(self, beyond):
        with pytest.raises(RequestRefused):
            self.engine.add([1] * self.longest, SamplingParams(max_tokens=beyond))

    @rule(which=st.integers(0, 99), swapped=st.booleans())
    def abort(self, which, swapped):
        live, host = list(self.engine.requests.values()), self.engine.scheduler.host
        if swapped and host is not None:
            live = [r for r in live if host.table(r.request_id)] or live
        if live:
            request = live[which % len(live)]
            assert self.engine.abort(request.request_id)
            assert request.finish_reason == "abort" and not self.engine.abort(request.request_id)

    @rule(n=st.integers(1, 8))
    def step(self, n):
        for _ in range(n):
            self.one_step()
            self.check()

    @rule(stage=st.sampled_from(STAGES), in_a_swap=st.booleans())
    def fail(self, stage, in_a_swap):
        """A step that breaks ends those that it computes for, and nobody else."""
        before = self.broken_step(stage, DeviceFailed, in_a_swap)
        hit = {r for r in before if r.finished}
        assert hit == before & self.planned
        assert {r.finish_reason for r in hit} <= {"error"}

    @rule(stage=st.sampled_from(STAGES), in_a_swap=st.booleans())
    def run_out_of_memory(self, stage, in_a_swap):
        """All are computed again in a smaller pool; those that it can't hold end, or those of the third such step."""
        kv = self.engine.scheduler.kv
        num_blocks = kv.num_blocks
        before = self.broken_step(stage, NoMemory, in_a_swap)
        hit = {r for r in before if r.finished}
        if kv.num_blocks == num_blocks:
            assert hit == before & self.planned
        else:
            assert kv.num_blocks == int(0.8 * num_blocks)
            assert hit == {r for r in before if kv.blocks_for(r.max_total_tokens) > kv.num_blocks}
            assert not self.engine.scheduler.running and kv.num_free_blocks == kv.num_blocks
            self.num_shrunk += 1
            self.longest = min(self.longest, kv.num_blocks * kv.block_size)
        assert {r.finish_reason for r in hit} <= {"error"}

    def broken_step(self, stage: str, error: type[Exception], in_a_swap: bool) -> set[Request]:
        """Break the next step, or soon one that swaps. Returns those that had not ended before; none, if it won't."""
        runner, self.planned = self.runner, set()
        runner.fail_at, runner.fail_with, runner.fail_in_a_swap = stage, error, in_a_swap
        before: set[Request] = set()
        for _ in range(12 if in_a_swap else 1):
            before = {r for r in self.requests if not r.finished}
            with contextlib.suppress(error), warnings.catch_warnings():  # raised or told, as the engine does
                warnings.simplefilter("ignore")
                self.one_step()
            if runner.fail_at is None:
                self.num_failed += 1
                return before
        runner.fail_at = None
        return set()

    @rule(seconds=st.sampled_from([0.01, 0.1, 2.0]))
    def wait(self, seconds):
        self.engine.clock.advance(seconds)

    def one_step(self) -> bool:
        """Whether there was anything to compute; if not, time goes on to when there will be."""
        engine = self.engine
        engine.step()
        if engine.idle and engine.scheduler.has_work():
            engine.clock.sleep_until(engine.next_moment())
        return not engine.idle

    # what must hold

    def check_plan(self, plan) -> None:
        """As the step begins: no more is planned than is pending, than the budget, than is owned by this one alone."""
        scheduler, kv = self.engine.scheduler, self.engine.scheduler.kv
        config, c = scheduler.config, self.combination
        self.planned = set(plan.num_tokens)
        owners = Counter(b for r in self.engine.requests.values() for b in kv.table(r.request_id))
        for request, n in plan.num_tokens.items():
            assert n == 0 if request.finished else 0 < n <= request.num_pending_tokens
            table, first = kv.table(request.request_id), request.num_computed_tokens
            for block in {table[p // kv.block_size] for p in range(first, first + n)}:
                assert owners[block] == 1, f"{request.request_id} writes into a block of others"
        if c.strategy == "chunked":
            assert plan.num_useful_tokens <= config.max_num_batched_tokens

    def check_choice(self, eldest: list[Request], plan):
        """As the step is planned: nobody overtakes for too long, and nobody is preempted without need."""
        scheduler, c = self.engine.scheduler, self.combination
        for request in plan.admitted:
            assert request in plan.num_tokens
            for other in scheduler.waiting:
                if other not in plan.preempted:
                    self.check_turn(request, other)
        if c.admission == "worst-case" and c.ordering != "priority":
            assert not plan.preempted, "worst-case has promised that nobody runs out of blocks"
        if c.ordering != "priority":
            assert not set(eldest) & set(plan.preempted), "who was let in first always gets its way"
        if scheduler.waiting:
            assert plan.wait.request_id == scheduler.waiting.head.request_id
            if c.strategy in ("chunked", "continuous") and c.ordering == "priority":
                inverted = inversions(scheduler, plan)
                assert not inverted, f"{inverted}: {plan.wait}"
        return plan

    def check_turn(self, first: Request, other: Request) -> None:
        """May `first` be let in for the first time while `other` waits?"""
        config, ordering = self.engine.scheduler.config, self.combination.ordering
        later = first.arrival_time - other.arrival_time
        if self.combination.strategy == "dynamic" and config.bucket_by_length:
            return
        if ordering == "fcfs" or (ordering == "fair-share" and first.tenant == other.tenant):
            assert self.requests.index(first) < self.requests.index(other)
        elif ordering == "priority":
            assert later <= (other.priority - first.priority) * config.ageing_s + 1e-9
        elif ordering == "shortest-prompt":
            longer = other.num_prompt_tokens - first.num_prompt_tokens
            assert later <= longer / 1000 * config.ageing_s + 1e-9

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler, kv = self.engine.scheduler, self.engine.scheduler.kv
        kv.check()
        assert kv.num_free_blocks + kv.num_cached_blocks + kv.num_used_blocks == kv.num_blocks
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        assert len(running) <= scheduler.config.max_num_seqs and len(waiting) == len(scheduler.waiting)
        slots = [r.slot for r in running]
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(scheduler.config.max_num_seqs))
        live = [r for r in self.requests if not r.finished]
        assert list(self.engine.requests.values()) == live
        places = Counter(running + waiting)
        assert all(places[r] == 1 for r in live), "a request is lost, or in two places"
        assert places.keys() - live <= (set(running) if scheduler.kv_layout == "slots" else set())
        assert all(r.slot is None for r in waiting)
        if waiting:
            assert scheduler.waiting.head is waiting[0]
        held = {r.request_id for r in running}
        assert kv.num_used_blocks == len({b for name in held for b in kv.table(name)}), "somebody else holds blocks"
        if scheduler.host is not None:
            scheduler.host.check()
            swapped = [r for r in waiting if scheduler.host.table(r.request_id)]
            assert scheduler.host.num_used_blocks == sum(len(scheduler.host.table(r.request_id)) for r in swapped)
        for request in self.requests:
            assert self.recorder.ends[request.request_id] == request.finished
            answer = self.answers[request]
            if request.finished and request.finish_reason in ("stop", "length"):
                assert request.output_token_ids == answer
            else:
                assert request.output_token_ids == answer[: request.num_output_tokens]
            assert request.num_tokens == request.num_prompt_tokens + len(request.output_token_ids)
            if request.finished:
                assert request.slot is None or scheduler.kv_layout == "slots"
                assert request.finish_reason in ("stop", "length", "abort", "error")

    def teardown(self) -> None:
        """Nobody new: all end within a number of steps, and all memory is free.

        In any len(live) + 1 steps in a row somebody that keeps it gets a token computed: every step but one that lets
        somebody in lets the first in order do so, and no step lets in a request that the next one has to preempt again
        unless the first in order moves on in between.
        """
        if sys.exc_info()[0] is not None or not hasattr(self, "engine"):
            return
        live = [r for r in self.requests if not r.finished]
        left = (len(live) + 1) * sum(r.max_total_tokens for r in live)
        idle = 0
        while self.engine.scheduler.has_work():
            if self.one_step():
                left, idle = left - 1, 0
            else:
                idle += 1
            self.check()
            assert left >= 0 and idle < 3, f"{len(self.engine.requests)} requests starve"
        kv = self.engine.scheduler.kv
        assert kv.num_used_blocks == 0 and all(r.finished for r in self.requests)
        assert self.num_failed or all(r.finish_reason in ("stop", "length", "abort") for r in self.requests)
        assert sum(self.recorder.ends.values()) == len(self.requests)


def run_machine(combination: Combination, max_examples: int, steps: int = 25, shrink: bool = True) -> None:
    """The same examples every time. Raises what the first broken promise raises."""

    class Machine(PressureMachine):
        pass

    Machine.combination = combination
    seed(zlib.crc32(repr(combination).encode()))(Machine)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
