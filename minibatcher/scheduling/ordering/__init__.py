"""Order of service: one file each, behind one contract."""

from __future__ import annotations

from ...errors import UnknownName
from ..config import SchedulerConfig
from .base import Ordering
from .fair_share import FairShare
from .fcfs import FirstComeFirstServed
from .priority import PriorityClasses
from .shortest_prompt import ShortestPromptFirst


def make_ordering(config: SchedulerConfig) -> Ordering:
    """The queue that the config names. Raises UnknownName."""
    if config.ordering == "fcfs":
        return FirstComeFirstServed()
    if config.ordering == "shortest-prompt":
        return ShortestPromptFirst(config.ageing_s)
    if config.ordering == "priority":
        return PriorityClasses(config.ageing_s)
    if config.ordering == "fair-share":
        return FairShare()
    raise UnknownName("ordering", config.ordering, ["fcfs", "shortest-prompt", "priority", "fair-share"])


__all__ = [
    "FairShare",
    "FirstComeFirstServed",
    "Ordering",
    "PriorityClasses",
    "ShortestPromptFirst",
    "make_ordering",
]
