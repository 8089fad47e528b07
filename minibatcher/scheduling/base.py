"""What every batching strategy shares: the queue, the slots, and the contract of a step's plan."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..errors import InvalidParameter, PlanError
from ..kv.blocks import BlockKV
from ..numeric import is_number
from ..request import Request, Status


class WaitReason(str, Enum):
    """Why the request at the head of the queue was not let in at this step. Those behind it wait for it."""

    SLOTS = "no free slot"
    KV = "not enough free KV blocks"
    BUDGET = "token budget spent"
    FILLING = "batch still filling"
    LAUNCHED = "batch already launched"


@dataclass(frozen=True)
class Wait:
    """The head of the queue waits: `need` and `have` are slots, blocks, tokens or requests, as the reason says."""

    request_id: str
    reason: WaitReason
    need: int = 1
    have: int = 0


@dataclass(frozen=True)
class SchedulerConfig:
    """The knobs of all strategies; each reads those that it has.

    max_num_seqs: slots, the most requests in one step.
    max_num_batched_tokens: token budget of a step (a bound on prompt packing for `continuous`).
    batch_timeout_s: `static` launches a batch that is not full once its oldest request has waited this long.
    max_queue_delay_s: the same for `dynamic`; 0 means never wait for company, as is the default of NVIDIA Triton
    Inference Server.
    bucket_by_length: `dynamic` fills a batch with the waiting prompts that are nearest in length to the oldest one.
    prefill_first: `chunked` serves prompts before decodes, to show what that costs.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    batch_timeout_s: float = 0.5
    max_queue_delay_s: float = 0.0
    bucket_by_length: bool = False
    prefill_first: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidParameter(f"{name} must be a whole number of at least 1, not {value!r}")
        for name in ("batch_timeout_s", "max_queue_delay_s"):
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise InvalidParameter(f"{name} must be a number of seconds, at least 0, not {value!r}")


@dataclass(slots=True)
class StepPlan:
    """What one forward pass will compute.

    num_tokens: for each request of the step, how many of its pending tokens it runs; 0 for one that has ended and only
    keeps its row in a fixed batch.
    width: None for a ragged step (rows of any length, packed); else every row is padded to `width` tokens.
    wake_at: with nobody in the step, the time at which it is worth asking again, if one is known.
    """

    num_tokens: dict[Request, int] = field(default_factory=dict)
    width: int | None = None
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    wait: Wait | None = None
    wake_at: float | None = None

    @property
    def num_useful_tokens(self) -> int:
        return sum(self.num_tokens.values())

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that the device works on, padding and finished rows included."""
        return self.num_useful_tokens if self.width is None else self.width * len(self.num_tokens)


class Scheduler(ABC):
    """Decides, before each step, how many tokens each request runs in it.

    Contract: `schedule` never gives a request more tokens than are pending, never holds more than `max_num_seqs`
    requests, and has KV memory allocated for every token that it plans. It reads no clock and no model: `now` comes in,
    a plan goes out. The engine runs the plan, moves `num_computed_tokens`, appends sampled tokens, then calls `update`.
    """

    name: str
    kv_layout = "paged"  # or "slots": the memory that the strategy was designed for
    splits_prompts = False  # no step computes more than max_num_batched_tokens, however long a prompt

    def __init__(self, kv: BlockKV, config: SchedulerConfig) -> None:
        self.kv, self.config = kv, config
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self._free_slots = list(range(config.max_num_seqs))

    @abstractmethod
    def schedule(self, now: float) -> StepPlan:
        """Plan the next step at time `now` (seconds). An empty plan means: nothing to do yet."""

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def update(self, ended: Sequence[Request]) -> None:
        """After a step: the requests that ended in it leave their slots, and their KV returns at once."""
        for request in ended:
            self._leave(request)

    def clear(self) -> None:
        """Forget everybody, whatever state an interrupt has left."""
        for request in (*self.waiting, *self.running):
            request.slot = None
        self.waiting.clear()
        self.running.clear()
        self.kv.clear()
        self._free_slots = list(range(self.config.max_num_seqs))

    def abort(self, request: Request) -> None:
        """Forget a request that the engine has just ended, wherever it is, if it has not left already."""
        if request.slot is not None:
            self.update([request])
        elif request in self.waiting:
            self.waiting.remove(request)

    def _admit(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Let a waiting request in if a slot and KV for `num_tokens` tokens are free; else note why not."""
        if not self._free_slots:
            plan.wait = Wait(request.request_id, WaitReason.SLOTS)
            return False
        if not self.kv.allocate(request.request_id, num_tokens):
            need = self.kv.missing_blocks(request.request_id, num_tokens)
            plan.wait = Wait(request.request_id, WaitReason.KV, need, self.kv.num_free_blocks)
            return False
        self.waiting.remove(request)  # searches from the head, where it nearly always stands
        request.status, request.slot = Status.RUNNING, heapq.heappop(self._free_slots)
        self.running.append(request)
        plan.admitted.append(request)
        return True

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.free(request.request_id)
        heapq.heappush(self._free_slots, request.slot)
        request.slot = None

    def _has_room(self, request: Request, num_tokens: int) -> bool:
        """Its last block has room for `num_tokens` more tokens; what most decodes find, so it asks nobody."""
        return 0 < request.num_computed_tokens % self.kv.block_size <= self.kv.block_size - num_tokens

    def _grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Make KV room for `num_tokens` more tokens, preempting the requests admitted last where blocks run short.

        False if `request` itself was the last one and had to go. The oldest request always gets its way, so a pool
        that holds any one request alone can never livelock.
        """
        total = request.num_computed_tokens + num_tokens
        if self.kv.allocate(request.request_id, total):
            return True
        while not self.kv.allocate(request.request_id, total):
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                break
        head = self.waiting[0]
        need = self.kv.blocks_for(head.num_tokens)
        plan.wait = Wait(head.request_id, WaitReason.KV, need, self.kv.num_free_blocks)
        return request.slot is not None

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Drop its KV and put it at the head of the queue: all its tokens are computed again later."""
        self._leave(request)
        self.waiting.appendleft(request)
        request.status, request.num_computed_tokens = Status.WAITING, 0
        plan.num_tokens.pop(request, None)
        if request in plan.admitted:  # let in for this very step: it has lost nothing
            plan.admitted.remove(request)
        else:
            request.num_preemptions += 1
            plan.preempted.append(request)


def check_plan(plan: StepPlan, scheduler: Scheduler) -> None:
    """Hold a plan against the contract of Scheduler. Raises PlanError with a sentence."""
    name, kv = scheduler.name, scheduler.kv
    if len(scheduler.running) > scheduler.config.max_num_seqs:
        limit = scheduler.config.max_num_seqs
        raise PlanError(f"the scheduler {name!r} runs {len(scheduler.running)} requests; max_num_seqs is {limit}")
    for request, num_tokens in plan.num_tokens.items():
        who = f"the scheduler {name!r} planned {num_tokens} tokens for request {request.request_id!r}"
        if request.slot is None:
            raise PlanError(f"{who}, which holds no slot; let it in first")
        if not request.finished and not 1 <= num_tokens <= request.num_pending_tokens:
            raise PlanError(f"{who}, which has {request.num_pending_tokens} pending")
        room = len(kv.table(request.request_id)) * kv.block_size
        if request.num_computed_tokens + num_tokens > room:
            have = request.num_computed_tokens
            raise PlanError(f"{who}, which has {have} tokens in a KV room of {room}; allocate room for them first")
