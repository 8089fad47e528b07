"""The batching strategies: one file each, told apart by the plan that they make.

A file that is laid beside them is found by itself: a Scheduler with a `name` of its own is a strategy of that name.
"""

from __future__ import annotations

import re
from importlib import import_module
from pkgutil import iter_modules

from ..errors import InvalidParameter, UnknownName
from ..kv.blocks import BlockKV
from .base import Scheduler
from .chunked import ChunkedScheduler
from .config import ADMISSIONS, ORDERINGS, PREEMPTIONS, SchedulerConfig
from .continuous import ContinuousScheduler
from .dynamic import DynamicScheduler
from .plan import StepPlan, Swap, Wait, WaitReason
from .solo import SoloScheduler
from .static import StaticScheduler

IN_BOOK = (
    SoloScheduler,
    StaticScheduler,
    DynamicScheduler,
    ContinuousScheduler,
    ChunkedScheduler,
)  # as it teaches them
DEFAULT_STRATEGIES = ("static", "dynamic", "continuous", "chunked")  # what a comparison runs unless told otherwise


def _found() -> dict[str, type[Scheduler]]:
    """Name → class: the book's, then those of the other files here. Raises InvalidParameter for what can't be one."""
    found: dict[str, type[Scheduler]] = {cls.name: cls for cls in IN_BOOK}
    for module in sorted(f"{__name__}.{info.name}" for info in iter_modules(__path__)):
        for cls in vars(import_module(module)).values():
            if not isinstance(cls, type) or not issubclass(cls, Scheduler) or cls.__module__ != module:
                continue
            if "name" in vars(cls) and found.setdefault(_checked(cls).name, cls) is not cls:
                where = f"{found[cls.name].__module__} and {module}"
                raise InvalidParameter(f"two strategies are called {cls.name!r}, in {where}; rename one")
    return found


def _checked(cls: type[Scheduler]) -> type[Scheduler]:
    """The class. Raises InvalidParameter for one without a usable name, or with a method still to be written."""
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise InvalidParameter(
            f'{cls.__name__} needs a name for tables and files, without blanks: name = "..." in its class body'
        )
    if missing := sorted(cls.__abstractmethods__):
        raise InvalidParameter(f"{cls.__name__} is no strategy yet: it has no method {' and no '.join(missing)}")
    return cls


STRATEGIES = _found()


def strategy(name: str | type[Scheduler]) -> type[Scheduler]:
    """The scheduler class of that name; or the class itself, if it is one. Raises UnknownName with those known."""
    if isinstance(name, type) and issubclass(name, Scheduler):
        return _checked(name)
    if name not in STRATEGIES:
        raise UnknownName("strategy", name, list(STRATEGIES))
    return STRATEGIES[name]


def make_scheduler(name: str | type[Scheduler], kv: BlockKV, config: SchedulerConfig) -> Scheduler:
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
