"""Labs: the exercises' manifest, instant checks with staged hints, and the build of the notebooks (`labkit.build`)."""

from __future__ import annotations

from .checks import CheckFailed, CheckResult, check, hint, judge
from .figures import show, show_source
from .guesses import guesses, predict
from .questions import reveal

__all__ = [
    "CheckFailed",
    "CheckResult",
    "check",
    "guesses",
    "hint",
    "judge",
    "predict",
    "reveal",
    "show",
    "show_source",
]
