"""The contract between the engine and whatever runs a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..request import Request, TokenLogprob
from ..scheduling.plan import StepPlan


@dataclass(slots=True)
class StepResult:
    """What a step brought.

    token_ids: the sampled token of each request whose pending tokens are all computed now.
    seconds: how long the step took in virtual time; None where the engine's clock measures it.
    num_computed_tokens: tokens that the device worked on; None where it is as many as the plan says. A CUDA graph of a
    fixed size computes more.
    logprobs: of the sampled tokens, for the requests that ask for them (SamplingParams.logprobs).
    """

    token_ids: dict[Request, int]
    seconds: float | None = None
    num_computed_tokens: int | None = None
    logprobs: dict[Request, TokenLogprob] = field(default_factory=dict)


class Runner(Protocol):
    def run(self, plan: StepPlan) -> StepResult:
        """Make the plan's swaps, in their order, then compute one forward pass. Must not change the requests.

        Raises OutOfMemory where the device has no room for it. A runner that has `release()` is then told to give its
        KV pool's memory back, and finds a smaller pool in the next plan.
        """
        ...


class OnItsWay(Protocol):
    """A step that the device may still be working on."""

    @property
    def requests(self) -> Sequence[Request]:
        """Those that get a token."""
        ...

    def result(self) -> StepResult:
        """Wait for it."""
        ...


class LaunchingRunner(Runner, Protocol):
    """A runner that need not be waited for."""

    def launch(self, plan: StepPlan) -> OnItsWay:
        """As `run`, but returns at once."""
        ...
