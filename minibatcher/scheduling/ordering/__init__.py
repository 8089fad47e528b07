"""Order of service: one file each, behind one contract."""

from __future__ import annotations

from collections.abc import Callable

from ..config import SchedulerConfig
from .base import Ordering
from .fair_share import FairShare
from .fcfs import FirstComeFirstServed
from .priority import PriorityClasses
from .shortest_prompt import ShortestPromptFirst

QUEUES: dict[str, Callable[[SchedulerConfig], Ordering]] = {
    "fcfs": lambda config: FirstComeFirstServed(),
    "shortest-prompt": lambda config: ShortestPromptFirst(config.ageing_s),
    "priority": lambda config: PriorityClasses(config.ageing_s),
    "fair-share": lambda config: FairShare(),
}


def make_ordering(config: SchedulerConfig) -> Ordering:
    """An empty queue in the order that the config names."""
    return QUEUES[config.ordering](config)


__all__ = [
    "QUEUES",
    "FairShare",
    "FirstComeFirstServed",
    "Ordering",
    "PriorityClasses",
    "ShortestPromptFirst",
    "make_ordering",
]
