"""The batching strategies: one file each, told apart by the plan that they make."""

from __future__ import annotations

from ..errors import UnknownName
from ..kv.blocks import BlockKV
from .base import Scheduler
from .chunked import ChunkedScheduler
from .config import ADMISSIONS, ORDERINGS, PREEMPTIONS, SchedulerConfig
from .continuous import ContinuousScheduler
from .dynamic import DynamicScheduler
from .plan import StepPlan, Swap, Wait, WaitReason
from .solo import SoloScheduler
from .static import StaticScheduler

STRATEGIES: dict[str, type[Scheduler]] = {
    cls.name: cls for cls in (SoloScheduler, StaticScheduler, DynamicScheduler, ContinuousScheduler, ChunkedScheduler)
}
DEFAULT_STRATEGIES = ("static", "dynamic", "continuous", "chunked")  # what a comparison runs unless told otherwise


def strategy(name: str) -> type[Scheduler]:
    """The scheduler class of that name. Raises UnknownName, which lists the known ones."""
    if name not in STRATEGIES:
        raise UnknownName("strategy", name, list(STRATEGIES))
    return STRATEGIES[name]


def make_scheduler(name: str, kv: BlockKV, config: SchedulerConfig) -> Scheduler:
    return strategy(name)(kv, config)


__all__ = [
    "ADMISSIONS",
    "DEFAULT_STRATEGIES",
    "ORDERINGS",
    "PREEMPTIONS",
    "STRATEGIES",
    "ChunkedScheduler",
    "ContinuousScheduler",
    "DynamicScheduler",
    "Scheduler",
    "SchedulerConfig",
    "SoloScheduler",
    "StaticScheduler",
    "StepPlan",
    "Swap",
    "Wait",
    "WaitReason",
    "make_scheduler",
    "strategy",
]
