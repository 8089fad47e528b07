"""Runs side by side: one workload, several strategies, as a dict for JSON, a plain-text table and a Markdown table."""

from __future__ import annotations

import textwrap
from html import escape
from typing import Any

from .errors import InvalidParameter
from .metrics import DEFINITIONS, cost, goodput, summarize
from .tally import Tally
from .timeline import Timeline

SCHEMA_VERSION = 1
REFERENCES = ("solo", "static")  # whose answers, and whose speed, the others are compared with

Lines = list[tuple[str, list[str]]]  # a label and one cell a strategy; no cells: a heading


class Comparison(dict):
    """A comparison as JSON-able dict that prints as a table, and shows as one in a notebook."""

    def __str__(self) -> str:
        return table(self)

    def _repr_markdown_(self) -> str:
        return markdown(self)


def comparison(
    timelines: dict[str, Timeline | Tally],
    *,
    objectives: dict[str, float] | None = None,
    price_per_hour: float | None = None,
    utilisation: dict[str, dict[str, float]] | None = None,
) -> Comparison:
    """Summaries of runs of the same requests under different strategies.

    Keys: clock; header (what is the same in all runs); differing (names of header entries that are not, besides the
    strategy); strategies: name → metrics.summarize, `header` (its own entries) and `requests` (id, prompt_tokens,
    output_tokens, finish_reason, output_hash); answers_identical (None if there is nothing to compare); differences;
    definitions. objectives: latency limits as metrics.goodput takes them, which adds `goodput` to each strategy;
    price_per_hour adds what metrics.cost returns; utilisation, by strategy, is added as it is.
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
    simulated = "simulated" in clocks.values()
    compared, differences = (0, []) if simulated else _compare_answers(timelines)
    return Comparison(
        schema="minibatcher.comparison",
        schema_version=SCHEMA_VERSION,
        clock=next(iter(clocks.values())),
        header=shared,
        differing=[key for key in keys if key not in shared and key != "strategy"],
        strategies={
            name: (timeline.summary() if isinstance(timeline, Tally) else summarize(timeline))
            | ({"utilisation": utilisation[name]} if utilisation else {})
            | ({"goodput": goodput(timeline, **objectives)} if objectives else {})
            | (cost(timeline, price_per_hour) if price_per_hour is not None else {})
            | {
                "header": {key: value for key, value in timeline.header.items() if key not in shared},
                "requests": [
                    {
                        "id": r.request_id,
                        "prompt_tokens": r.num_prompt_tokens,
                        "output_tokens": len(r.output_token_ids),
                        "finish_reason": r.finish_reason,
                        "output_hash": r.output_hash,
                    }
                    for r in timeline.requests.values()
                ],
            }
            for name, timeline in timelines.items()
        },
        num_answers_compared=compared,
        answers_identical=not differences if compared else None,
        differences=differences,
        objectives=objectives or {},
        price_per_hour=price_per_hour,
        definitions=DEFINITIONS,
    )


def table(data: dict[str, Any], *, explain: bool = False, width: int = 96) -> str:
    """Plain text, a column a strategy. `explain` adds what every row means. `width`: where prose is wrapped."""
    lines = _lines(data)
    names = list(data["strategies"])
    label_width = max(len(label) for label, _ in lines)
    cell_width = max(10, *(len(cell) + 2 for _, cells in lines for cell in cells), *(len(name) + 2 for name in names))
    rule = "─" * (label_width + cell_width * len(names))
    out = [textwrap.fill(_title(data), width), ""]
    out += [" " * label_width + "".join(name.rjust(cell_width) for name in names), rule]
    for label, cells in lines:
        out.append((label.ljust(label_width) + "".join(cell.rjust(cell_width) for cell in cells)).rstrip())
    out.append(rule)
    for note in _notes(data):
        out.append(textwrap.fill(note, width))
    if explain:
        out += ["", *(_wrapped(name, text, width) for name, text in data["definitions"].items())]
    return "\n".join(out)


def markdown(data: dict[str, Any]) -> str:
    """The same table for a README or a notebook."""
    names = list(data["strategies"])
    out = [_title(data), "", f"| | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for label, cells in _lines(data):
        cells = [cell.strip() for cell in cells] or [""] * len(names)
        depth = len(label) - len(label.lstrip())
        label = "&emsp;" * (depth // 2) + label.strip() if depth else f"**{label}**"
        out.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join([*out, "", *("- " + note for note in _notes(data))])


def html(data: dict[str, Any]) -> str:
    """The same table as a piece of HTML."""
    names = list(data["strategies"])
    out = [
        f"<style>{TABLE_STYLE}</style>",
        f'<table class="comparison"><caption>{escape(_title(data))}</caption>',
        f"<thead><tr><td></td>{''.join(f'<th scope=col>{escape(name)}</th>' for name in names)}</tr></thead><tbody>",
    ]
    for label, cells in _lines(data):
        depth = (len(label) - len(label.lstrip())) // 2
        label = escape(label.strip())
        if cells:
            values = "".join(f"<td>{escape(cell.strip())}</td>" for cell in cells)
            out.append(f'<tr><th scope=row style="padding-left: {1.2 * depth}em">{label}</th>{values}</tr>')
        else:
            out.append(f"<tr><th scope=rowgroup colspan={len(names) + 1}>{label}</th></tr>")
    return "\n".join([*out, "</tbody></table>", *(f"<p>{escape(note)}</p>" for note in _notes(data))])


def definitions(width: int = 96) -> str:
    """What every number means, for `--help` and for readers."""
    return "\n".join(_wrapped(name, text, width) for name, text in DEFINITIONS.items())


def _lines(data: dict[str, Any]) -> Lines:
    runs = list(data["strategies"].values())

    def row(label: str, value, digits: int = 3) -> tuple[str, list[str]]:
        return label, [_number(value(run), digits) for run in runs]

    def percent(label: str, value) -> tuple[str, list[str]]:
        return label, [_percent(value(run)) for run in runs]

    lines: Lines = [row("output tokens/s", lambda run: run["output_tokens_per_s"])]
    yardstick = next((name for name in ("static", "solo") if name in data["strategies"]), None)
    base = data["strategies"][yardstick]["output_tokens_per_s"] if yardstick else None
    if base and len(runs) > 1:
        ratios = [run["output_tokens_per_s"] for run in runs]
        lines.append((f"  relative to {yardstick}", ["–" if r is None else f"{r / base:.2f} ×" for r in ratios]))
    lines += [
        row("requests/s", lambda run: run["requests_per_s"]),
        row("makespan, s", lambda run: run["makespan_s"]),
    ]
    if data["objectives"]:
        limits = ", ".join(f"{name.removesuffix('_ms')} ≤ {limit:g} ms" for name, limit in data["objectives"].items())
        lines.append((f"Within objectives: {limits}", []))
        lines.append(percent("  of requests", lambda run: run["goodput"]["good_share"]))
        lines.append(row("  goodput, requests/s", lambda run: run["goodput"]["goodput_per_s"]))
    if data["price_per_hour"] is not None:
        lines += [
            row("cost per million output tokens", lambda run: run["cost_per_million_output_tokens"]),
            row("cost per request", lambda run: run["cost_per_request"]),
        ]
    for key, label in LATENCIES.items():
        counts = [run[key]["n"] for run in runs]
        alike = len(set(counts)) == 1
        lines.append((f"{label} (n = {counts[0]:,})" if alike else label, []))
        for name in ("mean", "p50", "p90", "p99"):
            lines.append(row(f"  {name}", lambda run, key=key, name=name: run[key][name]))
        if not alike:
            lines.append(("  n", [f"{n:,}" for n in counts]))
    lines += [
        ("Work", []),
        percent("  slot occupancy", lambda run: run["slot_occupancy"]),
        percent("  padding, of tokens computed", lambda run: run["padding_share"]),
        percent("    filling up short prompts", lambda run: run["padding_prompt_share"]),
        percent("    rows of ended requests", lambda run: run["padding_finished_share"]),
        percent("  KV tokens, of reserved", lambda run: run["kv_occupancy"]["tokens_of_reserved"]),
        percent("  KV blocks in use, of pool", lambda run: run["kv_occupancy"]["blocks_of_pool"]),
        row("  queue depth, mean", lambda run: run["queue_depth"]["mean"], 2),
        ("  steps", [f"{run['num_steps']:,}" for run in runs]),
    ]
    if all("utilisation" in run for run in runs):
        lines.append(("Utilisation of the hardware", []))
        for key, label in UTILISATION_ROWS.items():
            lines.append(percent(f"  {label}", lambda run, key=key: run["utilisation"][key]))
    if any(run["num_preemptions"] for run in runs):
        lines.append(("  preemptions", [f"{run['num_preemptions']:,}" for run in runs]))
    lines += _gpu_lines(runs)
    lines.append(("Requests served to their end", [f"{_served(run):,}" for run in runs]))
    if any(run["num_requests"] > _served(run) for run in runs):
        lines.append(("  aborted or unfinished", [f"{run['num_requests'] - _served(run):,}" for run in runs]))
    return lines


def _gpu_lines(runs: list[dict[str, Any]]) -> Lines:
    """Rows of what was sampled on the GPU in at least one run."""
    lines: Lines = []
    for key, label in GPU_ROWS.items():
        values = [run.get(key) for run in runs]
        if any(value is not None for value in values):
            cells = [_percent(v) if key.endswith("share") else _number(v, 3) for v in values]
            lines.append((f"  {label}", cells))
    return [("GPU, sampled during the run", []), *lines] if lines else []


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
UTILISATION_ROWS = {
    "busy_share": "busy (as nvidia-smi shows)",
    "mfu": "model FLOPs",
    "bandwidth_utilisation": "memory bandwidth",
    "useful_slot_share": "useful slots",
}
GPU_ROWS = {
    "gpu_busy_share": "busy: any kernel at all (nvidia-smi)",
    "gpu_power_w": "power, mean, W",
    "gpu_memory_peak_gib": "memory in use, peak, GiB",
    "joules_per_output_token": "energy per output token, J",
}
LATENCIES = {
    "queue_ms": "Queue time, ms",
    "ttft_ms": "TTFT, queue included, ms",
    "itl_ms": "ITL, ms",
    "tpot_ms": "TPOT, ms",
    "e2el_ms": "E2EL, ms",
}


def _title(data: dict[str, Any]) -> str:
    clock = {"measured": "MEASURED (wall clock)", "simulated": "SIMULATED (virtual time, no model ran)"}[data["clock"]]
    header, runs = data["header"], list(data["strategies"].values())
    most = max(run["num_requests"] for run in runs)
    facts = [clock, f"{most:,} request{'s' if most != 1 else ''}"]
    hardware = header.get("hardware")
    header = header | {"device": hardware.get("device")} if isinstance(hardware, dict) else header
    for key, form in TITLE_FACTS.items():
        value = header.get(key)
        value = value.get("name") if isinstance(value, dict) else value
        if value is not None:
            facts.append("1 slot" if (key, value) == ("max_num_seqs", 1) else form.format(value))
    return " · ".join(facts)


def _notes(data: dict[str, Any]) -> list[str]:
    notes = []
    if len(data["strategies"]) > 1 and data["clock"] == "measured":
        compared = data["num_answers_compared"]
        if data["answers_identical"]:
            notes.append(f"Answers: all strategies gave identical tokens for each of {compared:,} requests.")
        elif data["answers_identical"] is None:
            notes.append("Answers: not compared, since no request was served to its end by two strategies.")
        else:
            ids = dict.fromkeys(d["id"] for d in data["differences"])
            notes.append(
                f"Answers DIFFER for {len(ids):,} of {compared:,} requests: "
                + "; ".join(_difference(d) for d in data["differences"][:3])
                + ("; …" if len(data["differences"]) > 3 else "")
            )
    notes += _same_plans(data)
    if "gpu_monitor" in data["header"]:
        notes.append(f"GPU: {data['header']['gpu_monitor']}.")
    if "calibration" in data["header"]:
        notes.append(f"Calibration: {data['header']['calibration']}.")
    own = {name: run["header"] for name, run in data["strategies"].items()}
    unequal = [
        f"{key} ({', '.join(f'{name} {header.get(key)}' for name, header in own.items())})"
        for key in data["differing"]
        if all(isinstance(header.get(key), (str, int, float, type(None))) for header in own.values())
    ]
    if unequal:
        notes.append(f"Besides the strategy, these are not the same in all runs: {'; '.join(unequal)}.")
    return notes


def _same_plans(data: dict[str, Any]) -> list[str]:
    """Strategies that made the same steps; where they were measured, what differs between them is noise."""
    plans: dict[tuple, list[str]] = {}
    for name, run in data["strategies"].items():
        work = (run["num_steps"], run["num_computed_tokens"], run["num_padding_tokens"], run["num_preemptions"])
        plans.setdefault(work, []).append(name)
    noise = ": what differs between them is the machine's noise" if data["clock"] == "measured" else ""
    return [f"{' and '.join(names)} did the same work here{noise}." for names in plans.values() if len(names) > 1]


def _difference(d: dict[str, Any]) -> str:
    if d["position"] is None:
        return f"{d['id']} was not served by {d['strategy']}"
    tokens = f"{d['token']}, {d['reference']}: {d['expected']}"
    return f"{d['id']} under {d['strategy']} at output token {d['position']} ({tokens})"


def _compare_answers(timelines: dict[str, Timeline]) -> tuple[int, list[dict[str, Any]]]:
    """How many requests could be compared, and where answers part from those of the reference run.

    Requests that either run aborted or left unfinished say nothing: they were cut off at some moment.
    """
    reference = next((name for name in REFERENCES if name in timelines), next(iter(timelines)))
    compared, differences = set(), []
    for name, timeline in timelines.items():
        if name == reference:
            continue
        for request_id, expected in timelines[reference].requests.items():
            record = timeline.requests.get(request_id)
            found = {"id": request_id, "strategy": name, "reference": reference}
            if record is None:
                differences.append(found | {"position": None, "token": None, "expected": None})
                compared.add(request_id)
            elif {record.finish_reason, expected.finish_reason} <= {"stop", "length"}:
                compared.add(request_id)
                here, there = record.output_token_ids, expected.output_token_ids
                if here != there:
                    differences.append(found | _parting(here, there))
    return len(compared), differences


def _parting(here: list[int], there: list[int]) -> dict[str, int | None]:
    """The first place where two token lists differ; None stands for the end of the shorter one."""
    same = (i for i, (a, b) in enumerate(zip(here, there)) if a != b)
    position = next(same, min(len(here), len(there)))
    return {
        "position": position,
        "token": here[position] if position < len(here) else None,
        "expected": there[position] if position < len(there) else None,
    }


def _served(run: dict[str, Any]) -> int:
    return run["num_finished"]["stop"] + run["num_finished"]["length"]


def _number(value: float | None, digits: int) -> str:
    """Few digits: 0.0412, 7.35, 41.2, 1,207."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}" if abs(value) < 1 else f"{value:.{digits - len(str(int(abs(value))))}f}"


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def _wrapped(name: str, text: str, width: int) -> str:
    return textwrap.fill(f"{name}: {text}", width, subsequent_indent="    ")
