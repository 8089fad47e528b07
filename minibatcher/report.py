"""Runs side by side: strategies, or variants of one, as a dict for JSON, a plain-text table and a Markdown table."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from html import escape
from typing import Any

from .errors import InvalidParameter
from .metrics import DEFINITIONS, cost, goodput, summarize
from .report_answers import all_ids, compare_answers, other_requests
from .report_notes import free_slots_missed, notes_of, same_work
from .report_rows import LABELS, Lines, lines_of
from .tally import Tally
from .timeline import Timeline
from .utilisation import UTILISATIONS

GLOSSARY = DEFINITIONS | UTILISATIONS

SCHEMA_VERSION = 1
HEAD_WIDTH = 12  # characters, beyond which a column's name goes on in the next line


class Comparison(dict):
    """A comparison as JSON-able dict that prints as a table, and shows as one in a notebook."""

    def __str__(self) -> str:
        return table(self)

    def _repr_markdown_(self) -> str:
        return markdown(self)


def comparison(
    timelines: Mapping[str, Timeline | Any],  # Any: a Tally
    *,
    objectives: dict[str, float] | None = None,
    class_objectives: dict[str, dict[str, float]] | None = None,
    price_per_hour: float | None = None,
    utilisation: dict[str, dict[str, float]] | None = None,
    setting: str = "",
    beside: Collection[str] = (),
) -> Comparison:
    """Summaries of runs of the same requests under different strategies, or variants of them.

    Keys: clock; header (what is the same in all runs); differing (names of header entries that are not, besides the
    strategy); strategies: name → metrics.summarize, `header` (its own entries), `num_refused_beside_free_slots` and
    `requests` (id, prompt_tokens, output_tokens, finish_reason, output_hash); answers_identical (None if there is
    nothing to compare); compared_by_text, not_compared (runs that tell no token ids); differences; other_requests (runs
    whose requests are not those of the first, and why; their answers are not compared); same_work (groups of runs that
    did the same, see report_notes.same_work); definitions. objectives, class_objectives: latency limits as
    metrics.goodput takes them, for all and by class, which add `goodput` to each strategy; price_per_hour adds what
    metrics.cost returns; utilisation, by strategy, is added as it is; setting: a sentence on what was chosen for these
    runs, shown above the table. beside: runs that come from elsewhere, so that their requests may be others.
    Answers of simulated runs are placeholders and are not compared. Raises InvalidParameter for no runs, and for
    measured beside simulated ones.
    """
    if not timelines:
        raise InvalidParameter("a comparison needs at least one run")
    clocks = {name: timeline.clock for name, timeline in timelines.items()}
    if len(set(clocks.values())) > 1:
        raise InvalidParameter(f"measured and simulated runs can't stand in one table: {clocks}")
    headers = {name: timeline.header for name, timeline in timelines.items()}
    first = next(iter(headers.values()))
    shared = {key: value for key, value in first.items() if all(h.get(key) == value for h in headers.values())}
    keys = dict.fromkeys(key for header in headers.values() for key in header)
    limits: dict[str, Any] = {**(objectives or {}), "classes": class_objectives}
    simulated = "simulated" in clocks.values()
    summaries = {
        name: timeline.summary() if isinstance(timeline, Tally) else summarize(timeline)
        for name, timeline in timelines.items()
    }
    others = other_requests(timelines, beside)
    alike = {name: timeline for name, timeline in timelines.items() if name not in others}
    compared, differences = (set(), []) if simulated else compare_answers(alike)
    by_text = [] if simulated else [name for name, timeline in alike.items() if not all_ids(timeline)]
    return Comparison(
        schema="minibatcher.comparison",
        schema_version=SCHEMA_VERSION,
        clock=next(iter(clocks.values())),
        header=shared,
        differing=[key for key in keys if key not in shared and key != "strategy"],
        strategies={
            name: summaries[name]
            | ({"utilisation": utilisation[name]} if utilisation else {})
            | ({"goodput": goodput(timeline, **limits)} if objectives or class_objectives else {})
            | (cost(timeline, price_per_hour) if price_per_hour is not None else {})
            | {
                "header": {key: value for key, value in timeline.header.items() if key not in shared},
                "num_refused_beside_free_slots": free_slots_missed(timeline),
                "requests": [
                    {
                        "id": r.request_id,
                        "prompt_tokens": r.num_prompt_tokens,
                        "output_tokens": len(r.output_token_ids) if r.has_token_ids else r.num_output_tokens,
                        "finish_reason": r.finish_reason,
                        "output_hash": r.output_hash,
                    }
                    for r in timeline.requests.values()
                ],
            }
            for name, timeline in timelines.items()
        },
        num_answers_compared=len({request_id for _, request_id in compared}),
        compared_by_text=[name for name in by_text if name in {run for run, _ in compared}],
        not_compared=[name for name in by_text if name not in {run for run, _ in compared}],
        other_requests=others,
        answers_identical=not differences if compared else None,
        differences=differences,
        same_work=same_work(timelines, summaries),
        objectives=objectives or {},
        class_objectives=class_objectives or {},
        setting=setting,
        price_per_hour=price_per_hour,
        definitions=GLOSSARY,
    )


def table(data: dict[str, Any], *, explain: bool = False, width: int = 96) -> str:
    """Plain text, a column a strategy. `explain` adds what every row means. `width`: where prose is wrapped."""
    out = [filled(text, width) for text in (_title(data), data["setting"]) if text]
    out += ["", aligned(list(data["strategies"]), lines_of(data))]
    for note in notes_of(data):
        out.append(textwrap.fill(note, width))
    if explain:
        out += ["", *(_wrapped(name, text, width) for name, text in data["definitions"].items())]
    return "\n".join(out)


def filled(text: str, width: int) -> str:
    """Wrapped, but not within the name of an option."""
    return textwrap.fill(text, width, break_on_hyphens=False)


def aligned(names: list[str], lines: Lines) -> str:
    """Rows under a head of column names, between rules."""
    heads = [textwrap.wrap(name, HEAD_WIDTH, break_long_words=False, break_on_hyphens=False) or [""] for name in names]
    depth = max(map(len, heads))
    label_width = max(len(label) for label, cells in lines if cells)  # a heading has its line for itself
    columns = [*heads, *(cells for _, cells in lines)]
    cell_width = max(10, *(len(text) + 2 for texts in columns for text in texts))
    rule = "─" * (label_width + cell_width * len(heads))
    out = []
    for row in zip(*([""] * (depth - len(head)) + head for head in heads)):
        out.append(" " * label_width + "".join(piece.rjust(cell_width) for piece in row))
    out.append(rule)
    out += [label.ljust(label_width) + "".join(cell.rjust(cell_width) for cell in cells) for label, cells in lines]
    return "\n".join(line.rstrip() for line in [*out, rule])


def markdown(data: dict[str, Any]) -> str:
    """The same table for a README or a notebook."""
    names = list(data["strategies"])
    out = [_title(data), *(["", data["setting"]] if data["setting"] else []), ""]
    out += [f"| | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for label, cells in lines_of(data):
        cells = [cell.strip() for cell in cells] or [""] * len(names)
        depth = len(label) - len(label.lstrip())
        label = "&emsp;" * (depth // 2) + label.strip() if depth else f"**{label}**"
        out.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join([*out, "", *("- " + note for note in notes_of(data))])


def html(data: dict[str, Any]) -> str:
    """The same table as a piece of HTML."""
    names = list(data["strategies"])
    caption = "<br>".join(escape(text) for text in (_title(data), data["setting"]) if text)
    out = [
        f"<style>{TABLE_STYLE}</style>",
        f'<table class="comparison"><caption>{caption}</caption>',
        f"<thead><tr><td></td>{''.join(f'<th scope=col>{escape(name)}</th>' for name in names)}</tr></thead><tbody>",
    ]
    for label, cells in lines_of(data):
        depth = (len(label) - len(label.lstrip())) // 2
        label = escape(label.strip())
        if cells:
            values = "".join(f"<td>{escape(cell.strip())}</td>" for cell in cells)
            out.append(f'<tr><th scope=row style="padding-left: {1.2 * depth}em">{label}</th>{values}</tr>')
        else:
            out.append(f"<tr><th scope=rowgroup colspan={len(names) + 1}>{label}</th></tr>")
    return "\n".join([*out, "</tbody></table>", *(f"<p>{escape(note)}</p>" for note in notes_of(data))])


def definitions(width: int = 96) -> str:
    """What every number means, for `--help` and for readers."""
    return "\n".join(_wrapped(name, text, width) for name, text in GLOSSARY.items())


TABLE_STYLE = (
    ".comparison { border-collapse: collapse; margin: 1.5em 0 1em; } "
    ".comparison caption { text-align: left; font-weight: bold; padding-bottom: 0.5em; } "
    ".comparison td { text-align: right; padding: 0.1em 0 0.1em 1.6em; font-variant-numeric: tabular-nums; } "
    ".comparison thead th { text-align: right; padding-left: 1.6em; } "
    ".comparison tbody th { text-align: left; font-weight: normal; } "
    ".comparison th[scope=rowgroup] { font-weight: bold; padding-top: 0.4em; } "
    ".comparison thead tr, .comparison tbody tr:last-child { border-bottom: 1px solid; }"
)
TITLE_FACTS = {
    "workload": "workload {}",
    "model": "model {}",
    "max_num_seqs": "{} slots",
    "device": "{}",
    "dtype": "{}",
    "attention": "attention {}",
    "seed": "seed {}",
}


def _title(data: dict[str, Any]) -> str:
    most = max(run["num_requests"] for run in data["strategies"].values())
    return title_of(data["clock"], data["header"], most)


def title_of(clock: str, header: dict[str, Any], num_requests: int) -> str:
    """Measured or simulated, and what was the same in all runs."""
    told = {"measured": "MEASURED (wall clock)", "simulated": "SIMULATED (virtual time, no model ran)"}[clock]
    facts = [told, f"{num_requests:,} request{'s' if num_requests != 1 else ''}"]
    hardware = header.get("hardware")
    header = header | {"device": hardware.get("device")} if isinstance(hardware, dict) else header
    if header.get("varied") and "strategy" in header:  # the columns are named by what varies
        facts.append(f"strategy {header['strategy']}")
    for key, form in TITLE_FACTS.items():
        value = header.get(key)
        value = value.get("name") if isinstance(value, dict) else value
        if value is not None:
            facts.append("1 slot" if (key, value) == ("max_num_seqs", 1) else form.format(value))
    return " · ".join(facts)


def _wrapped(name: str, text: str, width: int) -> str:
    """What a number is called in the table and in the JSON, and what it means."""
    called = f"{LABELS[name]} ({name})" if name in LABELS else name
    return textwrap.fill(f"{called}: {text}", width, subsequent_indent="    ")
