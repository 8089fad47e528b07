"""Labs: the exercises' manifest, instant checks with staged hints, and the build of the notebooks (`labkit.build`)."""

from __future__ import annotations

from .checks import CheckFailed, check, hint, judge
from .figures import show, show_diff, show_source
from .guesses import guesses, predict
from .judging import CheckResult
from .questions import reveal
from .syllabus import syllabus
from .thread import book_workload, running_comparison, scoreboard

__all__ = [
    "CheckFailed",
    "CheckResult",
    "book_workload",
    "check",
    "guesses",
    "hint",
    "judge",
    "predict",
    "reveal",
    "running_comparison",
    "scoreboard",
    "show",
    "show_diff",
    "show_source",
    "syllabus",
]
