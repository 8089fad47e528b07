"""What every batching strategy shares: the queue, the slots, and the contract of a step's plan."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace

from ..errors import PlanError
from ..kv.blocks import BlockKV
from ..request import Request, Status
from .admission import make_admission
from .config import SchedulerConfig
from .ordering import make_ordering
from .plan import StepPlan, Swap, Wait, WaitReason


class Scheduler(ABC):
    """Decides, before each step, how many tokens each request runs in it.

    Contract: `schedule` never gives a request more tokens than are pending, never holds more than `max_num_seqs`
    requests, and has KV memory allocated for every token that it plans. It reads no clock and no model: `now` comes in,
    a plan goes out. The engine runs the plan, moves `num_computed_tokens`, appends sampled tokens, then calls
    `computed` and `update`; or `abandon`, if the step failed.

    waiting: the queue, in the order of service that `config.ordering` names. admission: how much KV a request must
    find. host: blocks in host memory for requests that are swapped out, if `config.preemption` is "swap".
    """

    name: str
    kv_layout = "paged"  # or "slots": the memory that the strategy was designed for
    splits_prompts = False  # no step computes more than max_num_batched_tokens, however long a prompt

    def __init__(self, kv: BlockKV, config: SchedulerConfig) -> None:
        self.kv, self.config = kv, config
        self.waiting = make_ordering(config)
        self.admission = make_admission(config)
        self.running: list[Request] = []  # in order of admission
        self.host = _host_pool(kv, config) if self.kv_layout == "paged" else None
        self._free_slots = list(range(config.max_num_seqs))

    @abstractmethod
    def schedule(self, now: float) -> StepPlan:
        """Plan the next step at time `now` (seconds). An empty plan means: nothing to do yet."""

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def computed(self, plan: StepPlan, sampled: Collection[Request]) -> None:
        """After a step: what it computed can be shared, and those who got a token have been served."""
        if self.kv.shares_prefixes:
            for request, num_tokens in plan.num_tokens.items():
                if num_tokens > 1 or request.num_computed_tokens % self.kv.block_size == 0:  # a block may be full
                    self.kv.publish(request.request_id, request.token_slice, request.num_computed_tokens)
        self.waiting.served(sampled)
        self.admission.stepped()

    def update(self, ended: Sequence[Request]) -> None:
        """After a step: the requests that ended in it leave their slots, and their KV returns at once."""
        for request in ended:
            self._leave(request)

    def abandon(self, plan: StepPlan) -> None:
        """A step failed before its copies were made for sure: what it swapped out is lost and computed again."""
        for swap in plan.swaps:
            if swap.out and not swap.request.finished:
                self._forget_kv(swap.request)

    def restart(self, plan: StepPlan, num_blocks: int, requests: Sequence[Request]) -> None:
        """The device has run out of memory in a step: all lose their KV there, and wait for a pool of `num_blocks`.

        requests: all that have not ended, in order of submission. What lies in host memory stays there.
        """
        self.abandon(plan)
        lost = {*self.running, *plan.num_tokens}  # who was to end with the step may have left already
        for request in list(self.running):
            self._leave(request)
        for request in reversed(requests):
            if request not in lost or request.finished or request in self.waiting:
                continue
            if request in plan.admitted and not request.num_preemptions:
                request.num_computed_tokens = 0
            else:
                request.num_preemptions += 1
                self._forget_kv(request)
            self.waiting.put_back(request)
            request.status = Status.WAITING
        self.kv.resize(num_blocks)
        if self.kv_layout == "slots" and num_blocks < self.config.max_num_seqs:
            self.config = replace(self.config, max_num_seqs=num_blocks)
            self._free_slots = list(range(num_blocks))

    def clear(self) -> None:
        """Forget everybody and all that was learnt of them, whatever state an interrupt has left."""
        for request in self.running:  # the queue may be torn
            request.slot = None
        self.waiting, self.admission = make_ordering(self.config), make_admission(self.config)
        self.running.clear()
        self.kv.clear()
        if self.host is not None:
            self.host.clear()
        self._free_slots = list(range(self.config.max_num_seqs))

    def abort(self, request: Request) -> None:
        """Forget a request that the engine has just ended, wherever it is, if it has not left already."""
        if request.slot is not None:
            self.update([request])
        elif request in self.waiting:
            self.waiting.remove(request)
            if self.host is not None:
                self.host.free(request.request_id)

    def _admit(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Let a waiting request in with KV room for `num_tokens` tokens, or note why not.

        Afterwards `num_computed_tokens` says how much is there already: swapped in, or found in the prefix cache.
        """
        if request in plan.preempted:
            plan.wait = Wait(request.request_id, WaitReason.PREEMPTED)
            return False
        plan.wait = self._obstacle(request, num_tokens)
        if plan.wait and not self._make_way(request, num_tokens, plan):
            return False
        self.waiting.take(request)
        self._give_kv(request, num_tokens, plan)
        request.status, request.slot = Status.RUNNING, heapq.heappop(self._free_slots)
        self.running.append(request)
        plan.admitted.append(request)
        plan.wait = None
        return True

    def _give_kv(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        """KV room for `num_tokens` tokens: with what was swapped out, or with what the prefix cache holds of them."""
        name = request.request_id
        if request.num_computed_tokens == 0:
            found = self.kv.start(name, request.token_slice, num_tokens)
            request.num_computed_tokens = found
            if request.num_preemptions:
                request.num_lost_tokens -= min(found, request.num_lost_tokens)
            else:
                request.num_cached_tokens = min(found, request.num_prompt_tokens)
            return
        self.kv.allocate(name, num_tokens)
        if self.host is not None and (host_blocks := self.host.table(name)):
            plan.swaps.append(Swap(request, False, self.kv.table(name)[: len(host_blocks)], list(host_blocks)))
            self.host.free(name)

    def _obstacle(self, request: Request, num_tokens: int, without: Collection[Request] = ()) -> Wait | None:
        """What keeps a waiting request out; None if nothing does. `without`: running requests, as if they were gone."""
        name, gone = request.request_id, [r.request_id for r in without]
        if not self._free_slots and not gone:
            return Wait(name, WaitReason.SLOTS)
        tokens = request.token_slice if request.num_computed_tokens == 0 else None
        need = self.kv.demand(name, num_tokens, tokens, gone)
        have = self.kv.num_available_blocks + self.kv.released_by(gone)
        if need > have:
            return Wait(name, WaitReason.KV, need, have)
        if len(self.running) == len(without):  # nobody else is left, and who is alone may have it all
            return None
        need += self.admission.growth(request, num_tokens, self.kv)
        need += self.admission.promised((r for r in self.running if r not in without), self.kv)
        if need > have:
            return Wait(name, WaitReason.PROMISED, need, have)
        need += int(self.config.watermark * self.kv.num_blocks)
        if need > have:
            return Wait(name, WaitReason.WATERMARK, need, have)
        return None

    def _make_way(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Preempt running requests that `request` outranks, the last in order first, if that is enough to let it in."""
        outranked = [r for r in reversed(self.waiting.in_order(self.running)) if self.waiting.outranks(request, r)]
        if not outranked or self._obstacle(request, num_tokens, outranked):
            return False
        enough = next(n for n in range(1, len(outranked) + 1) if not self._obstacle(request, num_tokens, outranked[:n]))
        for victim in outranked[:enough]:
            self._preempt(victim, plan)
        return True

    def _leave(self, request: Request) -> None:
        slot, request.slot = request.slot, None
        self.running.remove(request)
        self.kv.free(request.request_id)
        heapq.heappush(self._free_slots, slot)  # type: ignore[misc]  # whoever runs has a slot

    def _has_room(self, request: Request, num_tokens: int) -> bool:
        """Its last block has room for `num_tokens` more tokens; what most decodes find, so it asks nobody."""
        return 0 < request.num_computed_tokens % self.kv.block_size <= self.kv.block_size - num_tokens

    def _grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Make KV room for `num_tokens` more tokens, preempting the last in order where blocks run short.

        False if `request` itself was the last and had to go. The first in order always gets its way, so a pool that
        holds any one request alone can never livelock.
        """
        total = request.num_computed_tokens + num_tokens
        while request.slot is not None and not self.kv.allocate(request.request_id, total):
            self.admission.ran_short()
            self._preempt(self.waiting.in_order(self.running)[-1], plan)
            head, have = self.waiting.head, self.kv.num_available_blocks
            plan.wait = Wait(head.request_id, WaitReason.KV, self.kv.blocks_for(head.num_tokens), have)
        return request.slot is not None

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Take its slot and its KV, and put it back in the queue: later it is swapped in, or computed again."""
        plan.num_tokens.pop(request, None)
        if request in plan.admitted:  # let in for this very step
            plan.admitted.remove(request)
            plan.swaps = [swap for swap in plan.swaps if swap.request is not request]
            if request.num_preemptions:  # what it had got back is lost again
                request.num_lost_tokens += request.num_computed_tokens
            request.num_computed_tokens = 0
        else:
            request.num_preemptions += 1
            plan.preempted.append(request)
            if not self._swap_out(request, plan):
                self._forget_kv(request)
        self._leave(request)
        self.waiting.put_back(request)
        request.status = Status.WAITING

    def _swap_out(self, request: Request, plan: StepPlan) -> bool:
        """Have its KV copied to host memory, if there is room for it."""
        name, num_tokens = request.request_id, request.num_computed_tokens
        if self.host is None or not self.host.allocate(name, num_tokens):
            return False
        host_blocks = self.host.table(name)
        plan.swaps.append(Swap(request, True, self.kv.table(name)[: len(host_blocks)], list(host_blocks)))
        return True

    def _forget_kv(self, request: Request) -> None:
        """All its tokens are to be computed again."""
        if self.host is not None:
            self.host.free(request.request_id)
        request.num_lost_tokens += request.num_computed_tokens
        request.num_computed_tokens = 0


def _host_pool(kv: BlockKV, config: SchedulerConfig) -> BlockKV | None:
    num_blocks = kv.num_blocks if config.swap_tokens is None else config.swap_tokens // kv.block_size
    return BlockKV(num_blocks, kv.block_size) if config.preemption == "swap" and num_blocks else None


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
