"""The columns of a comparison: which options tell one run from the next, and what each run is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from .errors import InvalidParameter
from .scheduling import Scheduler

Variants = Mapping[str, Mapping[str, Any]]  # label → what this run sets beside the common options; `strategy` is a must

SWITCHES = {"enable_prefix_caching": ("no prefix cache", "prefix cache")}  # what a column is called: off, on


def make_variants(
    strategies: Sequence[str | type[Scheduler]], choices: Mapping[str, Sequence[Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """One variant for each combination of a strategy and a value of each choice, named by what varies.

    strategies: names, or classes of one's own.
    choices: option → values, as {"admission": ["worst-case", "preempt"]}. Repeated values count once.
    Raises InvalidParameter for a name in place of a list of names, and where two variants would be called the same.
    """
    values = {"strategy": strategies} | dict(choices or {})
    for option, given in values.items():
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise InvalidParameter(f"{option} needs a list of values, as [{given!r}], not {given!r}")
        values[option] = [value for i, value in enumerate(given) if value not in given[:i]]
    telling = [option for option, given in values.items() if len(given) > 1] or ["strategy"]
    combinations = [dict(zip(values, combination)) for combination in product(*values.values())]
    names = [" ".join(_called(option, made[option]) for option in telling) for made in combinations]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidParameter(f"two variants would be called {name!r}; give values that read differently")
    return dict(zip(names, combinations))


def varied(variants: Variants) -> list[str]:
    """Options besides the strategy that differ between variants."""
    options = dict.fromkeys(option for made in variants.values() for option in made if option != "strategy")
    return [option for option in options if len({repr(made.get(option)) for made in variants.values()}) > 1]


def _called(option: str, value: Any) -> str:
    if option in SWITCHES:
        return SWITCHES[option][bool(value)]
    return str(getattr(value, "name", value))  # a scheduler class is called by its name
