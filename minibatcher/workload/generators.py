"""Synthetic workloads. Equal arguments give equal requests, and a longer workload begins with the shorter one.

Every quantity draws from a random stream of its own, seeded by (seed, workload, quantity), so that the number of
requests or the way they arrive changes nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..errors import WorkloadError
from .arrivals import arrival_times, check_count, check_cv, check_positive, stream
from .base import MAX_TOKENS, Workload, WorkloadRequest

SYNTHETIC = "Synthetic, drawn by minibatcher; no real traffic."


def uniform(
    num_requests: int,
    *,
    prompt_min: int = 16,
    prompt_max: int = 256,
    output_min: int = 16,
    output_max: int = 256,
    seed: int = 0,
    request_rate: float = math.inf,
    arrivals: str = "poisson",
    arrival_cv: float = 1.0,
) -> Workload:
    """Prompt and output lengths (tokens) uniform between their bounds, both included; equal bounds fix a length."""
    check_count(num_requests)
    lengths = []
    for quantity, low, high in (("prompt", prompt_min, prompt_max), ("output", output_min, output_max)):
        if type(low) is not int or type(high) is not int or not 1 <= low <= high <= MAX_TOKENS:
            raise WorkloadError(
                f"{quantity}_min and {quantity}_max must be whole numbers, 1 <= min <= max, not {low!r} and {high!r}."
            )
        draws = stream(seed, f"uniform/{quantity}").random(num_requests)
        lengths.append(low + np.floor(draws * (high - low + 1)))
    times = arrival_times(num_requests, request_rate, arrivals, cv=arrival_cv, seed=seed)
    prompt, output = lengths
    return assemble("uniform", prompt, output, times, source=SYNTHETIC)


def lognormal(
    num_requests: int,
    *,
    prompt_mean: float = 128.0,
    output_mean: float = 64.0,
    cv: float = 1.0,
    seed: int = 0,
    request_rate: float = math.inf,
    arrivals: str = "poisson",
    arrival_cv: float = 1.0,
) -> Workload:
    """Log-normal lengths with the given means (tokens) and coefficient of variation, independent of each other."""
    check_count(num_requests)
    check_positive(at_most=MAX_TOKENS, prompt_mean=prompt_mean, output_mean=output_mean)
    check_cv(cv=cv)
    prompt = prompt_mean * lognormal_lengths(stream(seed, "lognormal/prompt"), num_requests, cv)
    output = output_mean * lognormal_lengths(stream(seed, "lognormal/output"), num_requests, cv)
    times = arrival_times(num_requests, request_rate, arrivals, cv=arrival_cv, seed=seed)
    return assemble("lognormal", prompt, output, times, source=SYNTHETIC)


def longtail(
    num_requests: int,
    *,
    prompt_mean: float = 64.0,
    prompt_cv: float = 0.5,
    output_min: int = 16,
    output_max: int = 512,
    alpha: float = 1.1,
    seed: int = 0,
    request_rate: float = math.inf,
    arrivals: str = "poisson",
    arrival_cv: float = 1.0,
) -> Workload:
    """Mostly short outputs and a few very long ones: a static batch waits for its longest.

    Output lengths (tokens) follow a Pareto law, P(length > x) = (output_min / x) ** alpha, truncated at `output_max`;
    the smaller alpha, the heavier the tail. Prompts are log-normal.
    """
    check_count(num_requests)
    check_positive(at_most=MAX_TOKENS, prompt_mean=prompt_mean, output_min=output_min, output_max=output_max)
    check_positive(0.001, 1_000, alpha=alpha)
    check_cv(prompt_cv=prompt_cv)
    if not 1 <= output_min <= output_max <= MAX_TOKENS:
        raise WorkloadError(f"output_min must lie between 1 and output_max, not {output_min!r} (max {output_max!r}).")
    prompt = prompt_mean * lognormal_lengths(stream(seed, "longtail/prompt"), num_requests, prompt_cv)
    draws = stream(seed, "longtail/output").random(num_requests)
    beyond = (output_min / output_max) ** alpha  # share of the untruncated law that lies above output_max
    output = output_min * (1 - draws * (1 - beyond)) ** (-1 / alpha)
    times = arrival_times(num_requests, request_rate, arrivals, cv=arrival_cv, seed=seed)
    return assemble("longtail", prompt, output, times, source=SYNTHETIC)


def bimodal(
    num_requests: int,
    *,
    rag_share: float = 0.3,
    chat_prompt_mean: float = 32.0,
    chat_output_mean: float = 128.0,
    rag_prompt_mean: float = 640.0,
    rag_output_mean: float = 24.0,
    cv: float = 0.4,
    seed: int = 0,
    request_rate: float = math.inf,
    arrivals: str = "poisson",
    arrival_cv: float = 1.0,
) -> Workload:
    """Two kinds of request, mixed at random: chat (short prompt, long answer) and RAG (long prompt, short answer).

    Lengths (tokens) are log-normal around each kind's mean; `tenant` is `chat` or `rag`. `rag_share` lies in 0..1.
    """
    check_count(num_requests)
    if not 0 <= rag_share <= 1:
        raise WorkloadError(f"rag_share must lie between 0 and 1, not {rag_share!r}.")
    check_positive(at_most=MAX_TOKENS, chat_prompt_mean=chat_prompt_mean, rag_prompt_mean=rag_prompt_mean)
    check_positive(at_most=MAX_TOKENS, chat_output_mean=chat_output_mean, rag_output_mean=rag_output_mean)
    check_cv(cv=cv)
    is_rag = stream(seed, "bimodal/kind").random(num_requests) < rag_share
    prompt = lognormal_lengths(stream(seed, "bimodal/prompt"), num_requests, cv)
    output = lognormal_lengths(stream(seed, "bimodal/output"), num_requests, cv)
    prompt *= np.where(is_rag, rag_prompt_mean, chat_prompt_mean)
    output *= np.where(is_rag, rag_output_mean, chat_output_mean)
    times = arrival_times(num_requests, request_rate, arrivals, cv=arrival_cv, seed=seed)
    tenants = np.where(is_rag, "rag", "chat").tolist()
    return assemble("bimodal", prompt, output, times, source=SYNTHETIC, tenants=tenants)


def assemble(
    name: str,
    prompt: np.ndarray,
    output: np.ndarray,
    times: np.ndarray,
    *,
    source: str,
    notes: tuple[str, ...] = (),
    tenants: list[str] | None = None,
) -> Workload:
    """A workload from three arrays [n]; lengths are rounded to whole tokens, at least 1."""
    prompt, output = (np.clip(np.rint(x), 1, MAX_TOKENS).astype(int).tolist() for x in (prompt, output))
    tenants = tenants or ["default"] * len(prompt)
    rows = zip(times.tolist(), prompt, output, tenants)
    requests = (WorkloadRequest(f"r{i}", t, p, o, tenant=k) for i, (t, p, o, k) in enumerate(rows))
    return Workload(name, tuple(requests), source, notes)


def lognormal_lengths(rng: np.random.Generator, count: int, cv: float) -> np.ndarray:
    """Log-normal draws, float64 [count], of mean 1 and the given coefficient of variation."""
    sigma2 = math.log1p(cv * cv)
    return rng.lognormal(-sigma2 / 2, math.sqrt(sigma2), count)


GENERATORS: dict[str, Callable[..., Workload]] = {
    "uniform": uniform,
    "lognormal": lognormal,
    "longtail": longtail,
    "bimodal": bimodal,
}
