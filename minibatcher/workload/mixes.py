"""Synthetic traffic of unequal requests: priority classes, tenants, shared prefixes. Drawn as in generators.py."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..errors import WorkloadError
from ..request import PRIORITY_CLASSES
from .arrivals import arrival_times, check_count, check_cv, check_positive, stream
from .base import MAX_TOKENS, Workload
from .generators import SYNTHETIC, assemble, lognormal_lengths

# Mean prompt and output tokens of each class: short API calls, chat, long documents, evaluation with short answers.
CLASS_LENGTHS = {"paid": (192, 64), "interactive": (96, 128), "batch": (512, 192), "background": (384, 32)}
PIECE = 16  # tokens that a prefix hash of `shared_prefix` stands for


def classes(
    num_requests: int,
    *,
    paid_share: float = 0.2,
    interactive_share: float = 0.4,
    batch_share: float = 0.25,
    cv: float = 0.6,
    seed: int = 0,
    request_rate: float = math.inf,
    arrivals: str = "poisson",
    arrival_cv: float = 1.0,
) -> Workload:
    """The four priority classes (request.PRIORITY_CLASSES), mixed at random; `tenant` is the class's name.

    Lengths (tokens) are log-normal around CLASS_LENGTHS. Shares of all requests; `background` has what they leave.
    """
    check_count(num_requests)
    check_cv(cv=cv)
    shares = [paid_share, interactive_share, batch_share]
    if not all(0 <= share <= 1 for share in shares) or sum(shares) > 1 + 1e-9:
        raise WorkloadError(
            "paid_share, interactive_share and batch_share must lie between 0 and 1, and their sum, too, "
            f"not at {paid_share!r}, {interactive_share!r} and {batch_share!r}."
        )
    kinds = np.searchsorted(np.cumsum(shares), stream(seed, "classes/kind").random(num_requests), side="right")
    means = np.array([CLASS_LENGTHS[name] for name in PRIORITY_CLASSES])[kinds]
    prompt = means[:, 0] * lognormal_lengths(stream(seed, "classes/prompt"), num_requests, cv)
    output = means[:, 1] * lognormal_lengths(stream(seed, "classes/output"), num_requests, cv)
    times = arrival_times(num_requests, request_rate, arrivals, cv=arrival_cv, seed=seed)
    names = [PRIORITY_CLASSES[kind] for kind in kinds]
    workload = assemble("classes", prompt, output, times, source=SYNTHETIC, tenants=names)
    rows = zip(workload, kinds.tolist())  # arrival times never fall, so the rows are in the order that was drawn
    return replace(workload, requests=tuple(replace(row, priority=kind) for row, kind in rows))


def tenants(
    num_requests: int,
    *,
    num_tenants: int = 4,
    flood: float = 1.0,
    skew: float = 0.5,
    prompt_mean: float = 128.0,
    output_mean: float = 64.0,
    cv: float = 0.6,
    seed: int = 0,
    request_rate: float = math.inf,
    arrivals: str = "poisson",
    arrival_cv: float = 1.0,
) -> Workload:
    """`num_tenants` tenants, `tenant-0` and so on, that send requests of the same kind at different rates.

    The rate of tenant k is in proportion to (k + 1) ** -skew (0: all alike), that of tenant 0 times `flood`.
    `request_rate` is that of all together: with Poisson arrivals each tenant's are Poisson, too. Lengths (tokens) are
    log-normal with the given means and coefficient of variation.
    """
    check_count(num_requests)
    _check_whole(num_tenants=num_tenants)
    check_positive(at_most=1e6, flood=flood)
    check_positive(at_most=MAX_TOKENS, prompt_mean=prompt_mean, output_mean=output_mean)
    check_cv(cv=cv)
    if not 0 <= skew <= 10:
        raise WorkloadError(f"skew must lie between 0 and 10, not at {skew!r}.")
    weights = np.arange(1, num_tenants + 1) ** -skew
    weights[0] *= flood
    edges = np.cumsum(weights / weights.sum())[:-1]
    who = np.searchsorted(edges, stream(seed, "tenants/who").random(num_requests), side="right")
    prompt = prompt_mean * lognormal_lengths(stream(seed, "tenants/prompt"), num_requests, cv)
    output = output_mean * lognormal_lengths(stream(seed, "tenants/output"), num_requests, cv)
    times = arrival_times(num_requests, request_rate, arrivals, cv=arrival_cv, seed=seed)
    names = [f"tenant-{k}" for k in who]
    return assemble("tenants", prompt, output, times, source=SYNTHETIC, tenants=names)


def shared_prefix(
    num_requests: int,
    *,
    num_prefixes: int = 4,
    prefix_tokens: int = 256,
    turns: int = 1,
    interleaved: int = 8,
    prompt_mean: float = 48.0,
    output_mean: float = 48.0,
    cv: float = 0.6,
    seed: int = 0,
    request_rate: float = math.inf,
    arrivals: str = "poisson",
    arrival_cv: float = 1.0,
) -> Workload:
    """Conversations that begin with one of `num_prefixes` system prompts of `prefix_tokens` tokens, drawn at random.

    A conversation has `turns` requests, and the prompt of each holds all of the one before and its answer; so many
    conversations as `interleaved` take turns, before the next so many begin. Questions and answers are log-normal
    around `prompt_mean` and `output_mean` tokens. Prefixes are shared in pieces of 16 tokens.
    """
    check_count(num_requests)
    _check_whole(num_prefixes=num_prefixes, prefix_tokens=prefix_tokens, turns=turns, interleaved=interleaved)
    check_positive(at_most=MAX_TOKENS, prompt_mean=prompt_mean, output_mean=output_mean)
    check_cv(cv=cv)
    question, answer = (
        np.maximum(1, np.rint(mean * lognormal_lengths(stream(seed, f"shared-prefix/{what}"), num_requests, cv)))
        for what, mean in (("question", prompt_mean), ("answer", output_mean))
    )
    which = stream(seed, "shared-prefix/which").integers(num_prefixes, size=num_requests).tolist()
    conversations = [i // (interleaved * turns) * interleaved + i % interleaved for i in range(num_requests)]
    past: Counter[int] = Counter()  # tokens of a conversation so far, without the system prompt
    prompt = []
    for conversation, asked, answered in zip(conversations, question.tolist(), answer.tolist()):
        prompt.append(prefix_tokens + past[conversation] + asked)
        past[conversation] += asked + answered
    times = arrival_times(num_requests, request_rate, arrivals, cv=arrival_cv, seed=seed)
    workload = assemble("shared-prefix", np.array(prompt), answer, times, source=SYNTHETIC)
    requests = (
        replace(row, prefix_hashes=_hashes(which[c], c, prefix_tokens, row.prompt_tokens or 0), tokens_per_hash=PIECE)
        for row, c in zip(workload, conversations)
    )
    return replace(workload, requests=tuple(requests))


def _hashes(prefix: int, conversation: int, prefix_tokens: int, prompt_tokens: int) -> tuple[int, ...]:
    """Of each piece of a prompt: even ones for a system prompt's, odd ones for a conversation's own."""
    common = prefix_tokens // PIECE
    pieces = range(-(-prompt_tokens // PIECE))
    return tuple(2 * (prefix << 32 | i) if i < common else 2 * (conversation << 32 | i) + 1 for i in pieces)


def _check_whole(**values: int) -> None:
    for name, value in values.items():
        if type(value) is not int or not 1 <= value <= 1_000_000:
            raise WorkloadError(f"{name} must be a whole number from 1 to 1,000,000, not {value!r}.")


MIXES: dict[str, Callable[..., Workload]] = {"classes": classes, "tenants": tenants, "shared-prefix": shared_prefix}
