"""The columns of a comparison: which options tell one run from the next, and what each run is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

Variants = Mapping[str, Mapping[str, Any]]  # label → what this run sets beside the common options; `strategy` is a must

SWITCHES = {"enable_prefix_caching": ("no prefix cache", "prefix cache")}  # what a column is called: off, on


def make_variants(strategies: Sequence[str], choices: Mapping[str, Sequence[Any]] | None = None) -> dict[str, dict]:
    """One variant for each combination of a strategy and a value of each choice, named by what varies.

    choices: option → values, as {"admission": ["worst-case", "preempt"]}. Repeated values count once.
    """
    values = {"strategy": strategies} | dict(choices or {})
    values = {option: list(dict.fromkeys(given)) for option, given in values.items()}
    telling = [option for option, given in values.items() if len(given) > 1] or ["strategy"]
    combinations = [dict(zip(values, combination)) for combination in product(*values.values())]
    return {" ".join(_called(option, made[option]) for option in telling): made for made in combinations}


def varied(variants: Variants) -> list[str]:
    """Options besides the strategy that differ between variants."""
    options = dict.fromkeys(option for made in variants.values() for option in made if option != "strategy")
    return [option for option in options if len({repr(made.get(option)) for made in variants.values()}) > 1]


def _called(option: str, value: Any) -> str:
    return SWITCHES[option][value] if option in SWITCHES else str(value)
