"""A benchmark's results as plain text: a column a peer, ratios first, then what must be known beside them."""

from __future__ import annotations

import math
from typing import Any

from ..report import aligned, filled

NONE = "–"
Lines = list[tuple[str, list[str]]]


def text(data: dict[str, Any], width: int = 100) -> str:
    """The table with a title above, and notes below. data: of report.results."""
    out = [filled(_title(data), width), ""]
    if data["figures"]:
        names = list(data["figures"])
        out += [aligned([data["titles"][name] for name in names], _lines(data, names)), ""]
    else:
        out += ["No run has come to its end.", ""]
    out += [filled(note, width) for note in _notes(data)]
    return "\n".join(out)


def _title(data: dict[str, Any]) -> str:
    facts = data["provenance"]
    if not facts:
        return "MEASURED"
    load, model, machine = facts["workload"], facts["model"], facts["hardware"]
    last = load["last_arrival_s"]
    when = f"arriving over {last:,.1f} s" if last else "all there at once"
    return (
        f"MEASURED on {machine['device']}, {_count(facts['threads'], 'thread')}: {model['name']} "
        f"({model['num_parameters'] / 1e6:,.1f}M parameters, {model['weights']} weights) in {facts['dtype']}, "
        f"{_count(load['num_requests'], 'request')} of {load['name']}, {when}, {load['num_prompt_tokens']:,} prompt "
        f"and {load['num_output_tokens']:,} output tokens, lengths forced"
    )


def _lines(data: dict[str, Any], names: list[str]) -> Lines:
    equal, figures = data["outputs_equal"], data["figures"]
    online = bool(data["provenance"] and data["provenance"]["workload"]["last_arrival_s"])

    def row(label: str, figure: str, digits: int = 3, factor: float = 1.0, part: str = "median") -> tuple:
        found = [figures[name][figure] for name in names]
        return f"  {label}", [number(f[part] * factor, digits) if f else NONE for f in found]

    lines: Lines = []
    for of, ratios in data["ratios"].items():
        lines += _ratio_lines(data["titles"][of], [ratios.get(name) for name in names]) if ratios else []
    if equal:
        cells = [f"{e['equal']} of {e['of']}" if (e := equal.get(name)) else "not told" for name in names]
        lines.append(("outputs equal", cells))
    lines += [
        ("figures (median of rounds)", []),
        row("output tokens/s", "output_tokens_per_s"),
        ("    lowest–highest", [_range(figures[name]["output_tokens_per_s"]) for name in names]),
        row("total tokens/s", "total_tokens_per_s"),
        row("TTFT p50, ms", "ttft_p50_ms"),
        row("TTFT p99, ms", "ttft_p99_ms"),
        row("ITL p50, ms", "itl_p50_ms"),
        row("ITL p99, ms", "itl_p99_ms"),
        row("E2E p50, ms", "e2el_p50_ms"),
        row("E2E p99, ms", "e2el_p99_ms"),
        row("load, s", "load_s", 2),
        row("peak memory, MiB", "peak_rss_bytes", factor=2.0**-20),
        row("others' CPU, most, %", "others_share", 2, 100, "max"),
    ]
    share = "bound_share_of_steps" if online else "bound_share_of_run"
    if any(figures[name][share] for name in names):
        lines.append(row("share of the bound, %", share, 2, 100))
    return lines


def _ratio_lines(title: str, ratios: list[dict[str, Any] | None]) -> Lines:
    """One baseline's ratios to each column; None is its own."""

    def cells(figure: str, cell) -> list[str]:
        found = [ratio and ratio[figure] for ratio in ratios]
        return [cell(one) if one else NONE for one in found]

    def middle(found: dict[str, Any]) -> str:
        return number(found["median"])

    return [
        (f"{title} / this one (median of rounds)", []),
        ("  output tokens/s", cells("output_tokens_per_s", middle)),
        ("    lowest–highest", cells("output_tokens_per_s", _range)),
        ("    pairs", cells("output_tokens_per_s", lambda found: str(len(found["values"])))),
        ("  TTFT p99", cells("ttft_p99_ms", middle)),
        ("  ITL p99", cells("itl_p99_ms", middle)),
    ]


def _range(found: dict[str, Any] | None) -> str:
    return f"{number(found['min'])}–{number(found['max'])}" if found else NONE


def _notes(data: dict[str, Any]) -> list[str]:
    notes = [_sentence(data["what_a_ratio_is"])] if any(data["ratios"].values()) else []
    if data["outputs_equal"]:
        dtype, first = data["provenance"].get("dtype"), data["titles"][data["outputs_of"]]
        notes.append(
            f"Outputs equal: requests whose token ids are those of {first}'s first run, in "
            "the run that has the fewest"
            + ("." if dtype == "float32" else "; below float32 near ties may fall either way.")
        )
    rates = data["bound"]["rates"]
    if rates:
        notes.append(_sentence(data["bound"]["what"]))
        notes.append(
            f"Rates: {rates['bandwidth'] / 1e9:.1f} GB/s, {rates['flops'] / 1e9:,.0f} GFLOP/s ({rates['source']})."
        )
    if any(figures["others_share"] is None for figures in data["figures"].values()):
        notes.append("This system does not tell what other programs took of the processors.")
    if data["provenance"]:
        notes += [f"Workload: {_sentence(note)}" for note in data["provenance"]["workload"]["notes"]]
    notes += data["warnings"]
    notes += [f"Not run: {name}: {_sentence(why)}" for name, why in data["missing"].items()]
    return notes


def number(value: float, digits: int = 3) -> str:
    """So many significant digits, and none before the point lost."""
    if value == 0:
        return "0"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + ("" if words.endswith(".") else ".")
