"""Admission control: for how much KV memory must a request find room before it is let in?

Too eager, and blocks run out under way: somebody is preempted, and computed again. Too timid, and slots stay idle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from ..kv.blocks import BlockKV
from ..request import Request
from .config import SchedulerConfig


class Admission(ABC):
    """A request is let in if the blocks that it needs now, and those promised to all, are free."""

    name: str

    @abstractmethod
    def target(self, request: Request) -> int:
        """Tokens in all for which it is promised room."""

    def growth(self, request: Request, num_tokens: int, kv: BlockKV) -> int:
        """Blocks beyond those of `num_tokens` tokens that the request is promised."""
        return max(0, kv.blocks_for(self.target(request)) - kv.blocks_for(num_tokens))

    def promised(self, running: Iterable[Request], kv: BlockKV) -> int:
        """Blocks promised to running requests, beyond those that they hold."""
        return sum(kv.missing_blocks(request.request_id, self.target(request)) for request in running)

    def ran_short(self) -> None:  # noqa: B027 - most learn nothing
        """Somebody could not grow, and a request had to go."""

    def stepped(self) -> None:  # noqa: B027
        """A step went by."""


class WorstCase(Admission):
    """Promises prompt + max_tokens. Nobody is ever preempted for memory; most of what is promised is never used."""

    name = "worst-case"

    def target(self, request: Request) -> int:
        return request.max_total_tokens


class Optimistic(Admission):
    """Promises a share of the tokens that are left up to max_tokens; the share falls with time and rises when it hurts.

    After SGLang's scheduler (`new_token_ratio` in schedule_policy.py and scheduler.py, 2024): it starts at 0.7, falls
    evenly to 0.1 over 600 steps, and jumps up again when a request had to be preempted: here half the way to 1.
    """

    name = "optimistic"
    START, LOWEST, FALL = 0.7, 0.1, 0.6 / 600

    def __init__(self) -> None:
        self.ratio = self.START

    def target(self, request: Request) -> int:
        left = request.max_total_tokens - request.num_tokens
        return request.num_tokens + int(self.ratio * left)

    def ran_short(self) -> None:
        self.ratio += (1 - self.ratio) / 2

    def stepped(self) -> None:
        self.ratio = max(self.LOWEST, self.ratio - self.FALL)


class AllocateAndPreempt(Admission):
    """Promises nothing, as vLLM does: a request is let in if the tokens that it has now fit. One that can't grow later
    has another one preempted, or itself."""

    name = "preempt"

    def target(self, request: Request) -> int:
        return request.num_tokens

    def growth(self, request: Request, num_tokens: int, kv: BlockKV) -> int:
        return 0

    def promised(self, running: Iterable[Request], kv: BlockKV) -> int:
        return 0  # as the sum would come to, at no cost


POLICIES: dict[str, type[Admission]] = {cls.name: cls for cls in (WorstCase, Optimistic, AllocateAndPreempt)}


def make_admission(config: SchedulerConfig) -> Admission:
    """The policy that the config names."""
    return POLICIES[config.admission]()
