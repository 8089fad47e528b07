"""A step's plan: what one forward pass will compute, and why somebody waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ..request import Request


class WaitReason(str, Enum):
    """Why the request at the head of the queue was not let in at this step. Those behind it wait for it."""

    SLOTS = "no free slot"
    KV = "not enough free KV blocks"
    PROMISED = "free KV blocks are promised to running requests"
    WATERMARK = "free KV blocks are kept by the watermark"
    PREEMPTED = "preempted in this very step"
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


class Swap(NamedTuple):
    """KV to copy before a step computes: from device to host blocks if `out`, else back."""

    request: Request
    out: bool
    device_blocks: list[int]
    host_blocks: list[int]


@dataclass(slots=True)
class StepPlan:
    """What one forward pass will compute.

    num_tokens: for each request of the step, how many of its pending tokens it runs; 0 for one that has ended and only
    keeps its row in a fixed batch.
    swaps: copies to make first, in this order, since a block may be emptied by one and filled by the next.
    width: None for a ragged step (rows of any length, packed); else every row is padded to `width` tokens.
    wake_at: with nobody in the step, the time at which it is worth asking again, if one is known.
    """

    num_tokens: dict[Request, int] = field(default_factory=dict)
    width: int | None = None
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    wait: Wait | None = None
    wake_at: float | None = None

    @property
    def num_useful_tokens(self) -> int:
        return sum(self.num_tokens.values())

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that the device works on, padding and finished rows included."""
        return self.num_useful_tokens if self.width is None else self.width * len(self.num_tokens)
