"""A model without arithmetic, for tests without one: it stores token ids as its «KV» and reads them back."""

from __future__ import annotations

import random
import zlib

from minibatcher.clock import VirtualClock
from minibatcher.engine import Engine
from minibatcher.kv import BlockKV, PrefixKV, SlotKV
from minibatcher.limits import Limits
from minibatcher.request import Request, SamplingParams
from minibatcher.runners.base import StepResult
from minibatcher.scheduling import SchedulerConfig, make_scheduler, strategy
from minibatcher.timeline import Timeline


def next_token(token_ids: list[int]) -> int:
    """The one right continuation of a token sequence, which depends on every token in it."""
    return zlib.crc32(bytes(str(token_ids), "ascii")) % 1000


class MemoryRunner:
    """Writes each planned token into the pool through the block table, then answers from what the pool holds.

    As in a model, what it writes for a token depends on all before it. A lost block, a block of two requests that do
    not begin alike, a token computed too early or never: each changes the answer.
    """

    def __init__(self, kv: BlockKV, seconds_per_token: float = 0.001, seconds_per_step: float = 0.0) -> None:
        self.kv, self.seconds_per_token, self.seconds_per_step = kv, seconds_per_token, seconds_per_step
        self.pool: list[tuple[int, int] | None] = [None] * (kv.num_blocks * kv.block_size)  # token, what came before
        self.host: dict[int, list[tuple[int, int] | None]] = {}

    def _place(self, request, position: int) -> int:
        block = self.kv.table(request.request_id)[position // self.kv.block_size]
        return block * self.kv.block_size + position % self.kv.block_size

    def _copy(self, swap) -> None:
        size = self.kv.block_size
        for device, host in zip(swap.device_blocks, swap.host_blocks, strict=True):
            here = slice(device * size, (device + 1) * size)
            if swap.out:
                self.host[host] = self.pool[here]
            else:
                self.pool[here] = self.host[host]

    def run(self, plan) -> StepResult:
        for swap in plan.swaps:
            self._copy(swap)
        return self._compute(plan)

    def _compute(self, plan) -> StepResult:
        for request, num_tokens in plan.num_tokens.items():
            first = request.num_computed_tokens
            before = hash(self.pool[self._place(request, first - 1)]) if first else 0
            for position, token in enumerate(request.token_slice(first, first + num_tokens), first):
                self.pool[self._place(request, position)] = entry = (token, before)
                before = hash(entry)
        token_ids = {}
        for request, num_tokens in plan.num_tokens.items():
            if num_tokens and num_tokens == request.num_pending_tokens:
                token_ids[request] = next_token(self._read(request))
        return StepResult(token_ids, self.seconds_per_step + self.seconds_per_token * plan.num_computed_tokens)

    def _read(self, request) -> list[int]:
        """Its tokens as the pool holds them; -1 for one that was computed after others than these."""
        tokens, before = [], 0
        for position in range(request.num_tokens):
            entry = self.pool[self._place(request, position)]
            tokens.append(entry[0] if entry and entry[1] == before else -1)
            before = hash(entry)
        return tokens

    def launch(self, plan) -> Promise:
        return Promise(self.run(plan))


class Promise:
    """A step on its way: who gets a token is known, which one is told later."""

    def __init__(self, result: StepResult) -> None:
        self.requests, self.result = list(result.token_ids), lambda: result


class StubRunner:
    """Computes nothing, in no time to speak of: every token is 0, and time is what the plan would take."""

    def __init__(self, seconds_per_token: float = 0.0001, seconds_per_step: float = 0.01) -> None:
        self.seconds_per_token, self.seconds_per_step = seconds_per_token, seconds_per_step

    def run(self, plan) -> StepResult:
        token_ids = {r: 0 for r, n in plan.num_tokens.items() if n and n == r.num_tokens - r.num_computed_tokens}
        return StepResult(token_ids, self.seconds_per_step + self.seconds_per_token * plan.num_computed_tokens)

    def launch(self, plan) -> Promise:
        return Promise(self.run(plan))


def stub_engine(name: str, *, recorder=None, num_blocks: int = 10_000, max_model_len: int = 4_096, **options) -> Engine:
    """A fake_engine for much traffic, on a StubRunner."""
    engine = fake_engine(name, num_blocks=num_blocks, max_model_len=max_model_len, **options)
    engine.runner = StubRunner()
    if recorder is not None:
        engine.recorder = recorder
        engine.reset()
    return engine


def fake_engine(
    name: str,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    eos=(),
    header=None,
    seconds_per_token: float = 0.001,
    seconds_per_step: float = 0.0,
    engine_class: type[Engine] = Engine,
    enable_prefix_caching: bool = False,
    limits: Limits | None = None,
    keep_going: bool = False,
    **knobs,
) -> Engine:
    config = SchedulerConfig(**knobs)
    if strategy(name).kv_layout == "slots":
        kv: BlockKV = SlotKV(config.max_num_seqs, max_model_len)
    else:
        kv = (PrefixKV if enable_prefix_caching else BlockKV)(num_blocks, block_size)
    runner = MemoryRunner(kv, seconds_per_token, seconds_per_step)
    scheduler = make_scheduler(name, kv, config)
    return engine_class(
        scheduler,
        runner,
        VirtualClock(),
        max_model_len=max_model_len,
        eos_token_ids=eos,
        header=header,
        limits=limits,
        keep_going=keep_going,
    )


def fake_requests(n: int, seed: int = 0, rate: float = 20.0, longest: int = 120) -> list[Request]:
    """`n` requests with long-tailed output lengths, arriving as a Poisson process of `rate` a second."""
    rng, now, made = random.Random(seed), 0.0, []
    for i in range(n):
        output = min(longest, 1 + int(rng.lognormvariate(3.0, 0.9)))
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(5, 60))]
        made.append(Request(f"r{i}", prompt, params, arrival_time=now))
        now += rng.expovariate(rate)
    return made


def fake_run(
    name: str, todo: list[Request], *, max_num_seqs: int = 4, num_blocks: int = 200, budget: int = 64
) -> Timeline:
    """The timeline of serving `todo` with strategy `name`; a step takes 8 ms and 0.1 ms for each token computed."""
    engine = fake_engine(
        name,
        num_blocks=num_blocks,
        block_size=16,
        max_model_len=num_blocks * 16 // max_num_seqs,
        header={"workload": "fake", "seed": 0, "model": "none"},
        seconds_per_token=0.0001,
        seconds_per_step=0.008,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        batch_timeout_s=0.2,
        max_queue_delay_s=0.01,
    )
    return engine.run(todo)


def solo_answer(prompt: list[int], max_tokens: int, eos=()) -> list[int]:
    tokens, out = list(prompt), []
    while len(out) < max_tokens and not (out and out[-1] in eos):
        out.append(next_token(tokens))
        tokens.append(out[-1])
    return out
