"""One workload through the whole book, and one table of it that gets a row with every strategy."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import InvalidParameter, UnknownName
from ..report import comparison, title_of
from ..timeline import Timeline
from ..workload import Workload, load_workload, profile

if TYPE_CHECKING:
    from ..model.loader import LoadedModel
    from ..runners.roofline import CostModel

INTRODUCED = {"7.0": ("solo",), "7.1": ("static", "dynamic"), "7.2": ("continuous",), "7.3": ("chunked",)}
LINE = 100  # characters
LATENCIES = (
    ("TTFT", "ttft_ms", "p50"),
    ("TTFT", "ttft_ms", "p99"),
    ("ITL", "itl_ms", "p50"),
    ("ITL", "itl_ms", "p99"),
    ("E2EL", "e2el_ms", "p99"),
)
NOTES = (
    "tokens/s: output tokens of all requests together, and how many times those of the first line. slots used: of all "
    "slots in all steps, those that worked for somebody. The rest in milliseconds: TTFT, from arrival to the first "
    "token, queue time included; ITL, between two tokens of one answer; E2EL, from arrival to the last token."
)


def book_workload(num_requests: int = 32) -> Workload:
    """Thirty-two requests, all there at once: mostly chat, and a few with a long prompt and a short answer.

    Lengths in tokens of the model; the same on every machine.
    """
    spec = "bimodal:rag_share=0.2,chat_prompt_mean=32,chat_output_mean=48,rag_prompt_mean=500,rag_output_mean=16,cv=0.8"
    return load_workload(spec, num_requests=num_requests, seed=2)


def strategies_until(chapter: str) -> tuple[str, ...]:
    """The strategies that the book has introduced by the end of a chapter. Raises UnknownName."""
    if chapter not in INTRODUCED:
        raise UnknownName("chapter with a strategy", chapter, list(INTRODUCED))
    return tuple(name for number, names in INTRODUCED.items() if number <= chapter for name in names)


def running_comparison(
    chapter: str, model: LoadedModel | None = None, *, cost: CostModel | None = None, **options: Any
) -> dict[str, Timeline]:
    """The book's workload under every strategy up to `chapter`: measured on `model`, or in virtual time on `cost`.

    Measured twice, of which the faster run counts. On a GPU four times as many requests and slots. In virtual time a
    larger machine gets larger traffic: 200 requests like those of the Azure conversation trace, six a second.
    options: as of compare.run_comparison or simulate.run_simulation, in place of the settings here. Raises
    UnknownName, InvalidParameter.
    """
    from ..compare import run_comparison
    from ..simulate import run_simulation

    strategies = strategies_until(chapter)
    if (model is None) == (cost is None):
        raise InvalidParameter("give a model to measure, or cost=… to simulate, and not both")
    if cost is not None:
        workload = profile("azure-conv", 200, request_rate=6.0, seed=0).fit_to_context(8_192)
        simulated = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "variants": _variants(strategies, 8_192)}
        return run_simulation(workload, cost, **{**simulated, **options})
    assert model is not None
    large = model.device.type == "cuda"
    workload = book_workload(128 if large else 32)
    budget = 512 if large else 64
    options = {
        "max_num_seqs": 32 if large else 8,
        "max_num_batched_tokens": budget,
        "variants": _variants(strategies, 2_048),
    } | options
    # Whatever else the machine does can only slow a run down, and in two rounds it seldom meets the same one twice.
    rounds = [run_comparison(workload, model=model, **options) for _ in range(2)]
    return {name: min((runs[name] for runs in rounds), key=lambda timeline: timeline.duration) for name in rounds[0]}


def _variants(strategies: tuple[str, ...], whole_prompts: int) -> dict[str, dict[str, Any]]:
    """Only chunked prefill has a token budget; every other strategy computes a prompt in one step."""
    return {
        name: {"strategy": name} | ({} if name == "chunked" else {"max_num_batched_tokens": whole_prompts})
        for name in strategies
    }


def scoreboard(timelines: Mapping[str, Timeline], price_per_hour: float | None = None) -> None:
    """Print one line a run: what the server did, and what its users waited for.

    price_per_hour: of the machine, in any currency; adds what a million output tokens cost.
    """
    data = comparison(dict(timelines), price_per_hour=price_per_hour)
    runs = data["strategies"]
    title = title_of(data["clock"], data["header"], max(run["num_requests"] for run in runs.values()))
    print(textwrap.fill(f"{title} · {_arrivals(next(iter(timelines.values())))}", LINE))
    slowest = next(iter(runs.values()))["output_tokens_per_s"]
    head = ["steps", "tokens/s", "", "slots used", *(f"{label} {q}" for label, _, q in LATENCIES)]
    rows = [("", [*head, *["cost"] * (price_per_hour is not None)])]
    for name, run in runs.items():
        speed = run["output_tokens_per_s"]
        cells = [
            f"{run['num_steps']:,}",
            f"{speed:,.0f}",
            f"{speed / slowest:.2f} ×",
            f"{100 * run['slot_occupancy']:.0f} %",
        ]
        cells += [f"{run[key][q]:,.0f}" if run[key][q] >= 10 else f"{run[key][q]:.1f}" for _, key, q in LATENCIES]
        if price_per_hour is not None:
            cells.append(f"{run['cost_per_million_output_tokens']:.2f}")
        rows.append((name, cells))
    wide = max(len(name) for name in runs)
    widths = [max(map(len, column)) for column in zip(*(cells for _, cells in rows))]
    for name, cells in rows:
        print("  ".join([f"{name:{wide}}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths))]).rstrip())
    notes = NOTES
    if price_per_hour is not None:
        notes += f" cost: of a million output tokens, at {price_per_hour:g} an hour."
    if data["clock"] == "measured":
        notes += " Compare lines of one table only: another time the machine is busier, or less so."
    if data["answers_identical"] is not None:
        same = "the same, token for token, in every run" if data["answers_identical"] else "NOT the same in every run"
        notes += f" Answers: {same}."
    print(textwrap.fill(notes, LINE))


def _arrivals(timeline: Timeline) -> str:
    """How requests came: "all at once", or how many a second."""
    times = [record.arrival_time for record in timeline.requests.values()]
    spread = max(times) - min(times)
    return f"{(len(times) - 1) / spread:.1f} requests/s arrive" if spread else "all requests at once"
