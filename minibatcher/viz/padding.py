"""What a fixed batch computes for nobody, for any set of lengths: padding of the prompts, rows that have ended.

A prompt's row is as wide as the batch's longest prompt; an answer's row runs as many steps as the batch's longest
answer. `padding_numbers.js` computes the same, so that the picture moves without a kernel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from ..errors import InvalidParameter, UnknownName
from ..timeline import RowState
from ..workload import lognormal
from .interactive import Interactive
from .palette import HATCHES, LABELS, PADDING, REQUEST_COLOURS, tint
from .plots import HATCH_GREY, LEGEND, STRENGTH
from .sheet import alt_of, finish

ORDERS = {"arrival": "as they came", "sorted": "sorted by prompt", "bucketed": "bucketed by prompt"}
VIEWS = {"padded": "padded batches", "packed": "packed", "chunked": "steps with a token budget"}
MAX_REQUESTS = 256  # what a picture can show
MAX_LENGTH = 131_072
SEEDS = (3, 0, 1, 2, 4, 5, 6, 7)  # of the long-tailed workloads; the first shows best what sorting does and does not do


class PaddingNumbers(NamedTuple):
    """The prefill of padded batches. Tokens go through the linear layers; attention's pairs grow faster still.

    batches: which requests stand together, as indices into the lengths. computed: tokens, width x rows of every batch.
    useful: tokens that the prompts have. wasted_share: of those computed. factors: tokens that a request's row computes
    / tokens that it has, in the order of the lengths.
    """

    batches: tuple[tuple[int, ...], ...]
    computed: int
    useful: int
    wasted_share: float
    factors: tuple[float, ...]


class EndedNumbers(NamedTuple):
    """The steps of fixed batches, the prefill being the first: a request of n output tokens is at work in n of them.

    computed: rows x steps. useful: those that make a token of somebody's answer. most_ended: the most rows of a batch
    that are computed for nobody at once. share_of_steps: with that many, in the batch (of all steps of all batches).
    """

    num_steps: int
    computed: int
    useful: int
    wasted_share: float
    most_ended: int
    share_of_steps: float


class BudgetStep(NamedTuple):
    """One step under a token budget: who decodes (a token each), and pieces of prompts as (request, tokens)."""

    decodes: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]


def make_batches(
    lengths: Sequence[int], batch_size: int | None = None, order: str = "arrival"
) -> tuple[tuple[int, ...], ...]:
    """Which requests stand together, as indices into the prompt `lengths` (tokens). batch_size None: all in one batch.

    "bucketed" is what the dynamic scheduler does: the oldest goes, with those nearest to it in length. Raises
    InvalidParameter, UnknownName.
    """
    lengths = _check_lengths(lengths, "a prompt length")
    size = len(lengths) if batch_size is None else _check_whole(batch_size, "batch_size")
    if order not in ORDERS:
        raise UnknownName("order", order, list(ORDERS))
    waiting, batches = list(range(len(lengths))), []
    if order == "sorted":
        waiting.sort(key=lengths.__getitem__)
    while waiting:
        chosen = waiting[:size]
        if order == "bucketed":
            chosen = sorted(waiting, key=lambda r: abs(lengths[r] - lengths[waiting[0]]))[:size]
        batches.append(tuple(chosen))
        waiting = [r for r in waiting if r not in chosen]
    return tuple(batches)


def padding_numbers(lengths: Sequence[int], batch_size: int | None = None, order: str = "arrival") -> PaddingNumbers:
    """What padded prefills of prompts of these lengths (tokens) compute, and what of it is useful.

    order: "arrival", "sorted" or "bucketed", see `make_batches`. Raises InvalidParameter, UnknownName.
    """
    batches, lengths = make_batches(lengths, batch_size, order), [int(length) for length in lengths]
    widths = {r: max(lengths[i] for i in batch) for batch in batches for r in batch}
    computed, useful = sum(widths.values()), sum(lengths)
    factors = tuple(widths[r] / length for r, length in enumerate(lengths))
    return PaddingNumbers(batches, computed, useful, 1 - useful / computed, factors)


def ended_numbers(output_lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> EndedNumbers:
    """What these batches compute until each one's longest answer is done, and what of it is useful.

    Raises InvalidParameter.
    """
    output_lengths = _check_lengths(output_lengths, "an output length")
    num_steps = computed = most_ended = steps_with_most = 0
    for batch in batches:
        ends = sorted(output_lengths[r] for r in batch)
        num_steps += ends[-1]
        computed += ends[-1] * len(ends)
        ended = sum(end < ends[-1] for end in ends)  # at once, from the end of the last but the longest on
        with_most = ends[-1] - ends[ended - 1] if ended else 0
        if ended > most_ended:
            most_ended, steps_with_most = ended, 0
        if ended == most_ended:
            steps_with_most += with_most
    useful = sum(output_lengths[r] for batch in batches for r in batch)
    share_of_steps = steps_with_most / num_steps
    return EndedNumbers(num_steps, computed, useful, 1 - useful / computed, most_ended, share_of_steps)


def budget_steps(
    lengths: Sequence[int], output_lengths: Sequence[int], budget: int, max_num_seqs: int | None = None
) -> list[BudgetStep]:
    """The steps of the chunked scheduler where memory is no limit: decodes first, then pieces of prompts, in order.

    No step computes more than `budget` tokens, and none of them is padding. Raises InvalidParameter.
    """
    lengths = _check_lengths(lengths, "a prompt length")
    output_lengths = _check_answers(lengths, output_lengths)
    _check_whole(budget, "budget")
    seats = len(lengths) if max_num_seqs is None else _check_whole(max_num_seqs, "max_num_seqs")
    left, to_make = list(lengths), list(output_lengths)
    waiting, running, steps = deque(range(len(lengths))), [], []
    while waiting or running:
        decodes = tuple(r for r in running if not left[r])[:budget]
        room, chunks = budget - len(decodes), []
        prompts = [r for r in running if left[r]]
        while room and (prompts or (waiting and len(running) < seats)):
            if prompts:
                request = prompts.pop(0)
            else:
                request = waiting.popleft()
                running.append(request)
            chunks.append((request, min(left[request], room)))
            room -= chunks[-1][1]
        for request, num_tokens in chunks:
            left[request] -= num_tokens
        for request in (*decodes, *(r for r, _ in chunks if not left[r])):  # the end of a prompt makes the first token
            to_make[request] -= 1
        running = [r for r in running if to_make[r]]
        steps.append(BudgetStep(decodes, tuple(chunks)))
    return steps


def padding_view(
    lengths: Sequence[int] = (50, 4_000),
    output_lengths: Sequence[int] | None = None,
    *,
    batch_size: int | None = None,
    order: str = "arrival",
    view: str = "padded",
    budget: int = 512,
    seed: int = 0,
) -> Interactive:
    """Any set of requests as padded rectangles, whose lengths, batches and order the reader changes.

    lengths, output_lengths: tokens of prompts and answers; without the latter, long-tailed ones, drawn with `seed`.
    batch_size: None puts all in one batch. order: see `make_batches`. view: "padded", "packed" (no padding, one row
    after another) or "chunked" (steps of at most `budget` tokens). Raises InvalidParameter, UnknownName.
    """
    lengths, outputs = _requests(lengths, output_lengths, seed)
    _check_whole(budget, "budget")
    if view not in VIEWS:
        raise UnknownName("view", view, list(VIEWS))
    still = plot_padding(lengths, outputs, batch_size=batch_size, order=order)
    start = {"lengths": lengths, "outputs": outputs, "batch_size": batch_size}
    data = {
        "workloads": [{"name": "given", "label": _given_label(lengths), "draws": [start]}, *_workloads()],
        "order": order,
        "view": view,
        "budget": budget,
        "orders": ORDERS,
        "views": VIEWS,
        "more": _draw(64, seed),  # lengths of the requests that a reader adds
        "max_requests": MAX_REQUESTS,
        "max_length": MAX_LENGTH,
        "colours": list(REQUEST_COLOURS),
        "hatch": HATCH_GREY,
        "useful_strength": STRENGTH[RowState.DECODE],
        "ended_strength": STRENGTH[RowState.FINISHED],
    }
    text = padding_text(lengths, outputs, batch_size, order)
    return Interactive("padding", data, {}, still=still, alt=alt_of(still), text=text)


def plot_padding(
    lengths: Sequence[int] = (50, 4_000),
    output_lengths: Sequence[int] | None = None,
    *,
    batch_size: int | None = None,
    order: str = "arrival",
    seed: int = 0,
) -> Figure:
    """The same standing still: a bar a request, prompts on the left, answers on the right, waste hatched.

    `figure.alt` says it in words. Arguments as those of `padding_view`. Raises InvalidParameter, UnknownName.
    """
    lengths, outputs = _requests(lengths, output_lengths, seed)
    batches = make_batches(lengths, batch_size, order)
    rows = len(lengths) + 0.6 * len(batches)
    figure = Figure(figsize=(11, 2.3 + min(max(0.28 * rows, 1.2), 6.5)), layout="constrained", dpi=100)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    _draw_rows(left, lengths, batches, PADDING, "prompt's row, tokens")
    _draw_rows(right, outputs, batches, RowState.FINISHED, "answer's row, steps of its batch")
    prefill, ended = padding_numbers(lengths, batch_size, order), ended_numbers(outputs, batches)
    worst = _worst(prefill)
    headline = f"Prefill: {_percent(prefill.wasted_share)} of the tokens computed are padding"
    if prefill.wasted_share:
        headline += f"\n{_worst_sentence(lengths, worst, prefill)}"
    left.set_title(headline, loc="left", fontsize="medium")
    right.set_title(
        f"Answers: {_percent(ended.wasted_share)} of rows × steps\nare computed for nobody",
        loc="left",
        fontsize="medium",
    )
    if len(lengths) <= 24:
        names = [(place, f"{lengths[r]:,}") for place, r in _places(batches)]
        left.set_yticks([place for place, _ in names], [name for _, name in names], fontsize="small")
        left.set_ylabel("prompt, tokens")
    else:
        left.set_yticks([])
        left.set_ylabel(f"{len(lengths)} requests")
    keys = [
        Patch(facecolor=tint(REQUEST_COLOURS[4], STRENGTH[RowState.DECODE]), label="useful (a colour a request)"),
        Patch(facecolor="#e6e6e6", edgecolor=HATCH_GREY, linewidth=0.5, hatch=HATCHES[PADDING], label=LABELS[PADDING]),
        Patch(
            facecolor="#f2f2f2",
            edgecolor=HATCH_GREY,
            linewidth=0.5,
            hatch=HATCHES[RowState.FINISHED],
            label=LABELS[RowState.FINISHED],
        ),
    ]
    figure.legend(handles=keys, loc="outside lower left", **LEGEND)
    words = " ".join(_sentences(lengths, outputs, batch_size, order))
    return finish(figure, f"Two sets of bars, one bar a request; the wasted part of each is hatched. {words}")


def padding_text(
    lengths: Sequence[int],
    output_lengths: Sequence[int],
    batch_size: int | None = None,
    order: str = "arrival",
) -> str:
    """The same in letters: a line a request, the two sentences, and both wastes for every order."""
    prefill = padding_numbers(lengths, batch_size, order)
    lines = [f"{'batch':>5} {'request':>8} {'prompt':>8} {'row':>8} {'factor':>7} {'answer':>8} {'steps':>8}"]
    for number, batch in enumerate(prefill.batches, 1):
        width, steps = (max(of[r] for r in batch) for of in (lengths, output_lengths))
        for r in batch:
            lines.append(
                f"{number:>5} {r + 1:>8} {lengths[r]:>8,} {width:>8,} {_short(prefill.factors[r]):>7} "
                f"{output_lengths[r]:>8,} {steps:>8,}"
            )
    lines += [
        "",
        *_sentences(lengths, output_lengths, batch_size, order),
        "",
        f"{'':18}{'padding':>10}{'ended rows':>12}",
    ]
    for name, label in ORDERS.items():
        padding = padding_numbers(lengths, batch_size, name)
        ended = ended_numbers(output_lengths, padding.batches)
        lines.append(f"{label:18}{_percent(padding.wasted_share):>10}{_percent(ended.wasted_share):>12}")
    return "\n".join(lines)


def _sentences(lengths: Sequence[int], outputs: Sequence[int], batch_size: int | None, order: str) -> tuple[str, str]:
    """What the prefills cost and what the answers cost; padding_numbers.js says the same."""
    prefill = padding_numbers(lengths, batch_size, order)
    ended = ended_numbers(outputs, prefill.batches)
    num_batches = len(prefill.batches)
    batches = _count(num_batches, "batch", "batches")
    first = (
        f"{_count(len(lengths), 'prompt', 'prompts')} in {batches}: {prefill.computed:,} tokens computed, "
        f"{prefill.useful:,} useful, {_percent(prefill.wasted_share)} wasted."
    )
    if prefill.wasted_share:
        first += " " + _worst_sentence(lengths, _worst(prefill), prefill)
    second = (
        f"{_count(ended.num_steps, 'step', 'steps')} in {batches}: {ended.computed:,} rows computed, "
        f"{ended.useful:,} useful, {_percent(ended.wasted_share)} wasted."
    )
    if ended.most_ended and num_batches == 1:
        thrown = "makes a token that is" if ended.most_ended == 1 else "make tokens that are"
        second += (
            f" In {_percent(ended.share_of_steps)} of the steps, {ended.most_ended} of {len(lengths)} rows {thrown} "
            "thrown away."
        )
    elif ended.most_ended:
        mean, of = ended.useful / ended.num_steps, ended.computed / ended.num_steps
        second += f" In an average step {_short(mean)} of {_short(of)} rows make a token that is kept."
    return first, second


def _worst(prefill: PaddingNumbers) -> int:
    return prefill.factors.index(max(prefill.factors))


def _worst_sentence(lengths: Sequence[int], worst: int, prefill: PaddingNumbers) -> str:
    return f"The {lengths[worst]:,}-token prompt pays {_short(prefill.factors[worst])} × the work it needs."


def _draw_rows(ax: Axes, lengths: Sequence[int], batches, waste: RowState | str, label: str) -> None:
    """A bar a request: the useful part in its colour, the rest up to the batch's longest hatched."""
    height = 0.9 if len(lengths) <= 40 else 1.0
    longest = {r: max(lengths[i] for i in batch) for batch in batches for r in batch}
    for place, r in _places(batches):
        colour = REQUEST_COLOURS[r % len(REQUEST_COLOURS)]
        low = place - height / 2
        ax.add_patch(Rectangle((0, low), lengths[r], height, facecolor=tint(colour, STRENGTH[RowState.DECODE])))
        if longest[r] > lengths[r]:
            face = "#e6e6e6" if waste == PADDING else tint(colour, STRENGTH[RowState.FINISHED])
            ax.add_patch(
                Rectangle(
                    (lengths[r], low),
                    longest[r] - lengths[r],
                    height,
                    facecolor=face,
                    edgecolor=HATCH_GREY,
                    linewidth=0,
                    hatch=HATCHES[waste],
                )
            )
    bottom = _places(batches)[-1][0] + 0.6
    ax.set(xlim=(0, max(longest.values())), ylim=(bottom, -0.6))
    ax.set_xlabel(label)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.spines[["top", "right"]].set_visible(False)


def _places(batches) -> list[tuple[float, int]]:
    """From top to bottom: where each request's bar stands, and which request it is. A gap between batches."""
    flat = [(number, r) for number, batch in enumerate(batches) for r in batch]
    return [(row + 0.6 * number, r) for row, (number, r) in enumerate(flat)]


def _workloads() -> list[dict]:
    """Requests to choose from, each with a name, a label and one or more draws."""
    one_long = {"lengths": [100] * 5 + [4_000] + [100] * 2, "outputs": [128] * 8, "batch_size": 8}
    equal = {"lengths": [512] * 8, "outputs": [128] * 8, "batch_size": 8}
    finisher = {"lengths": [100] * 32, "outputs": [20] * 11 + [2_000] + [20] * 20, "batch_size": 32}
    chats = [{**_draw(32, seed), "batch_size": 8, "seed": seed} for seed in SEEDS]
    return [
        {"name": "equal", "label": "equal lengths", "draws": [equal]},
        {"name": "one-long", "label": "one long prompt among short ones", "draws": [one_long]},
        {"name": "finisher", "label": "31 answers of 20 tokens, one of 2,000", "draws": [finisher]},
        {"name": "chat", "label": "long-tailed, as in a chat service", "draws": chats},
    ]


def _draw(num_requests: int, seed: int) -> dict[str, list[int]]:
    """Long-tailed prompts and answers, independent of each other: nobody knows an answer's length from its prompt."""
    drawn = lognormal(num_requests, prompt_mean=400, output_mean=200, cv=1.2, seed=seed).requests
    return {"lengths": [r.prompt_tokens or 0 for r in drawn], "outputs": [r.output_tokens or 0 for r in drawn]}


def _requests(lengths: Sequence[int], output_lengths: Sequence[int] | None, seed: int) -> tuple[list[int], list[int]]:
    """Lengths of prompts and answers, checked; the latter drawn where none are given."""
    lengths = _check_lengths(lengths, "a prompt length")
    if len(lengths) > MAX_REQUESTS:
        raise InvalidParameter(f"the picture shows at most {MAX_REQUESTS} requests, not {len(lengths):,}")
    if output_lengths is None:
        return lengths, _draw(len(lengths), seed)["outputs"]
    return lengths, _check_answers(lengths, output_lengths)


def _check_answers(lengths: Sequence[int], output_lengths: Sequence[int]) -> list[int]:
    outputs = _check_lengths(output_lengths, "an output length")
    if len(outputs) != len(lengths):
        raise InvalidParameter(f"{len(lengths)} prompts need as many output lengths, not {len(outputs)}")
    return outputs


def _check_lengths(lengths: Sequence[int], what: str) -> list[int]:
    """The lengths as plain ints; NumPy's are welcome."""
    if not len(lengths):
        raise InvalidParameter(f"{what} is needed for at least one request")
    for length in lengths:
        if not isinstance(length, int | np.integer) or isinstance(length, bool) or not 1 <= length <= MAX_LENGTH:
            raise InvalidParameter(f"{what} is a whole number of tokens from 1 to {MAX_LENGTH:,}, not {length!r}")
    return [int(length) for length in lengths]


def _check_whole(value: int, name: str) -> int:
    if type(value) is not int or value < 1:
        raise InvalidParameter(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


def _given_label(lengths: Sequence[int]) -> str:
    return " and ".join(f"{length:,}" for length in lengths) + " tokens" if len(lengths) <= 2 else "as given"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _percent(share: float) -> str:
    """Whole percents; a little of something is not 0 %, nearly all of it not 100 %."""
    if 0 < share < 0.005:
        return "< 1 %"
    if 0.995 <= share < 1:
        return "> 99 %"
    return f"{int(100 * share + 0.5)} %"


def _short(number: float) -> str:
    """Two digits or more: 80, 2.5, 1."""
    tenths = int(10 * number + 0.5)
    return f"{tenths // 10}.{tenths % 10}" if tenths < 100 and tenths % 10 else f"{int(number + 0.5):,}"
