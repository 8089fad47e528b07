"""The contract between the engine and whatever runs a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..scheduling.base import StepPlan


@dataclass(slots=True)
class StepResult:
    """What a step brought.

    token_ids: per row of the plan the sampled token, or None where its prompt is not complete yet or it has ended.
    seconds: how long the step took in virtual time; None where the engine's clock measures it.
    """

    token_ids: list[int | None]
    seconds: float | None = None


class Runner(Protocol):
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one forward pass for the plan. Must not change the requests."""
        ...
