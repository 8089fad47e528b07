"""Workloads: what arrives when, and how long it is. Read from files, generated, or drawn from fitted profiles."""

from __future__ import annotations

import difflib
import inspect
import math
import os
import reprlib
from pathlib import Path
from typing import Any

from ..errors import WorkloadError
from .arrivals import ARRIVALS, arrival_times
from .base import Workload, WorkloadRequest
from .generators import GENERATORS, bimodal, lognormal, longtail, uniform
from .mixes import MIXES, classes, shared_prefix, tenants
from .prefixes import HashedPrompt, prefix_bound
from .profiles import profile, profiles
from .readers import FILE_FORMATS, CountTokens, read_workload

__all__ = [
    "ARRIVALS",
    "DEFAULT_NUM_REQUESTS",
    "HashedPrompt",
    "Workload",
    "WorkloadRequest",
    "arrival_times",
    "bimodal",
    "classes",
    "load_workload",
    "lognormal",
    "longtail",
    "prefix_bound",
    "profile",
    "profiles",
    "read_workload",
    "shared_prefix",
    "tenants",
    "uniform",
    "workload_names",
]

DEFAULT_NUM_REQUESTS = 64
_DRAWN = GENERATORS | MIXES


def workload_names() -> list[str]:
    """The names that `load_workload` knows: generators, then fitted profiles."""
    return [*_DRAWN, *profiles()]


def load_workload(
    spec: str | Path,
    *,
    num_requests: int | None = None,
    seed: int = 0,
    request_rate: float | None = None,
    count_tokens: CountTokens | None = None,
) -> Workload:
    """A workload from a file or by name.

    `spec` is a path (formats: see `read_workload`), a format and a path (`mooncake:FILE`, `azure:FILE`,
    `sharegpt:FILE`) where no other format will do, or a name from `workload_names()`, with options if need be, which
    are the keyword parameters of that generator: `lognormal:prompt_mean=200,output_mean=100,arrivals=gamma`.
    `num_requests` takes the first so many of a file (default: all) or draws so many (default: 64). `request_rate` is in
    requests per second, `inf` for all at once; None keeps a file's or a profile's own arrivals, and generators then
    let all arrive at once. The first requests of a longer drawn workload are the same as those of a shorter one; of a
    file with `request_rate` this holds for all but the arrival times, which are rescaled over what was taken.
    Raises `WorkloadError`.
    """
    name, _, options = str(spec).partition(":")
    if name in workload_names():
        count = DEFAULT_NUM_REQUESTS if num_requests is None else num_requests
        return _draw(name, options, count, seed, request_rate)
    file_format = name if name in FILE_FORMATS and options else None
    if file_format:
        spec = options
    elif not os.path.exists(spec) and not any(mark in str(spec) for mark in "/\\."):
        near = difflib.get_close_matches(name, workload_names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = ", ".join(workload_names())
        raise WorkloadError(f"Unknown workload {reprlib.repr(name)}, and there is no such file.{hint} Known: {known}.")
    workload = read_workload(spec, count_tokens=count_tokens, file_format=file_format)
    if num_requests is not None:
        workload = workload.take(num_requests)
    return workload if request_rate is None else workload.at_rate(request_rate, seed=seed)


def _draw(name: str, options: str, num_requests: int, seed: int, request_rate: float | None) -> Workload:
    draw, positional = (_DRAWN[name], (num_requests,)) if name in _DRAWN else (profile, (name, num_requests))
    parameters = inspect.signature(draw).parameters
    known = {key: p.default for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY and key != "seed"}
    given: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, equals, text = option.partition("=")
        key = key.strip()
        if key not in known or not equals:
            raise WorkloadError(f"Unknown option {option.strip()!r} of workload {name!r}; known: {', '.join(known)}.")
        given[key] = _value(key, text.strip(), known[key])
    if request_rate is not None:
        given["request_rate"] = request_rate
    if given.get("arrivals") in ("poisson", "gamma") and given.get("request_rate", known["request_rate"]) == math.inf:
        raise WorkloadError(f"{given['arrivals']} arrivals need a finite request_rate, in requests per second.")
    return draw(*positional, seed=seed, **given)


def _value(key: str, text: str, default: Any) -> Any:
    kind = float if default is None else type(default)
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise WorkloadError(f"The option {key} must be {what}, not {text!r}.") from None
