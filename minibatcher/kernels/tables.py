"""Rows of the kernels' sections as plain-text tables. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .check import worst
from .goals import goals_table

Rows = Sequence[dict[str, Any]]


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need be; those whose name ends with a blank stand to the left, numbers to the right."""
    widths = [max(len(line[i].strip()) for line in (header, *lines)) for i in range(len(header))]

    def row(cells: Sequence[str]) -> str:
        pairs = zip(header, cells, widths)
        return "  ".join(c.strip().ljust(w) if h.endswith(" ") else c.rjust(w) for h, c, w in pairs).rstrip()

    return "\n".join([row(header), "─" * (sum(widths) + 2 * (len(widths) - 1)), *map(row, lines)])


def compile_table(rows: Rows) -> str:
    """One line a compiled kernel."""
    header = ("target ", "kernel ", "dtype ", "shape ", "registers", "stack", "shared", "of", "tensor-core", "s")
    lines = []
    for row in rows:
        line = [f"{row['target'] / 10:.1f}", row["kernel"], row["dtype"], row["shape"]]
        if "name" in row:
            numbers = ("registers", "stack_bytes", "shared_bytes", "shared_limit", "tensor_core_instructions")
            line[1] += " (merge)" if row["name"].startswith("merge") else ""
            line += [f"{row[key]:,}" for key in numbers] + [f"{row['seconds']:.1f}"]
        else:
            line += ["–"] * 6
        lines.append(line)
    return table(header, lines)


def check_table(rows: Rows) -> str:
    """One line a kernel and dtype: the worst of its cases."""
    header = ("kernel ", "dtype ", "cases", "largest error", "tolerance", " ")
    lines = []
    for row in worst(list(rows)):
        error = "not finite" if row["error"] is None else f"{row['error']:.2g}"
        if row["raised"] is not None:
            error = f"raised {row['raised'].split(':')[0]}"
        verdict = f"WRONG in {row['failed']}" if row["failed"] else "right"
        lines.append([row["kernel"], row["dtype"], str(row["cases"]), error, f"{row['tolerance']:.2g}", verdict])
    return table(header, lines)


def bench_table(rows: Rows) -> str:
    """The device's rates, then one line a job: what was reached, its share, and what the peers take."""
    out = []
    names = sorted({name for row in rows for name in row.get("peers", ())})
    header = ["kernel ", "for ", "ms", "GB/s", "of copy", "TFLOP/s", "of matrix", *(f"{name}, ms" for name in names)]
    lines = []
    for row in rows:
        if row["kind"] == "device":
            copy, matrix = row["copy_bytes_per_s"] / 1e9, row["matrix_flop_per_s"] / 1e12
            out.append(f"This device copies {copy:,.0f} GB/s and multiplies {matrix:,.1f} TFLOP/s in {row['dtype']}.\n")
            continue
        line = [row["kind"], row["what"]]
        if "seconds" in row:
            line += [
                f"{row['seconds'] * 1e3:.3f}",
                f"{row['bytes_per_s'] / 1e9:,.0f}",
                f"{row['share_of_copy']:.0%}",
                f"{row['flop_per_s'] / 1e12:,.1f}",
                f"{row['share_of_matrix']:.0%}",
            ]
        else:
            line += ["–"] * 5
        peers = row.get("peers", {})
        lines.append(
            line + [f"{peers[n]['seconds'] * 1e3:.3f}" if "seconds" in peers.get(n, ()) else "–" for n in names]
        )
    return "\n".join([*out, table(header, lines)])


def engine_table(rows: Rows) -> str:
    """One line a way to run the engine."""
    header = ("engine's decode step ", "requests", "mean context", "ms", "roofline, ms", "share", "tokens/s")
    lines = []
    for row in rows:
        line = [f"{row['variant']} ({row['dtype']})", str(row["batch"])]
        if "seconds" in row:
            times = [f"{row[key] * 1e3:.2f}" for key in ("seconds", "roofline_seconds")]
            share = f"{row['share_of_roofline']:.0%}"
            line += [f"{row['mean_context']:,.0f}", *times, share, f"{row['output_tokens_per_s']:,.0f}"]
        else:
            line += ["–"] * 5
        lines.append(line)
    return table(header, lines)


def compare_table(rows: Rows) -> str:
    """One line a model, attention and strategy, and whether the answers agree."""
    header = ("model ", "dtype ", "attention ", "strategy ", "requests", "s", "tokens/s")
    lines, verdicts = [], []
    for row in rows:
        if row["kind"] == "answers":
            same = "identical" if row["identical"] else "NOT the same"
            verdicts.append(f"Answers in float32, over {row['runs']} runs: {same}.")
            continue
        line = [row["model"], row["dtype"], row["attention"], row["strategy"], str(row["requests"])]
        if "seconds" in row:
            line += [f"{row['seconds']:.2f}", f"{row['output_tokens_per_s']:,.0f}"]
        else:
            line += ["–"] * 2
        lines.append(line)
    return "\n".join([table(header, lines), *verdicts])


TABLES = {"check": check_table, "bench": bench_table, "engine": engine_table, "compare": compare_table}


def report_text(report: dict[str, Any]) -> str:
    """Every section that has rows, under a line that says where it ran."""
    trial = "TRIAL with tiny sizes, of the way and not of the speed. " if report["trial"] else ""
    how = "" if "compute_capability" in report["hardware"] else ", the kernels in Triton's interpreter"
    seed = report["sections"].get("check", {}).get("seed")
    draw = "" if seed is None else f", seed {seed}"
    parts = [f"{trial}Run on {report['hardware']['device']}{how}, {report['date']}{draw}."]
    for name, section in report["sections"].items():
        if section["rows"]:
            parts.append(TABLES[name](section["rows"]))
        if section["planned"] is not None and len(section["rows"]) < section["planned"]:
            why = "interrupted" if section["error"] == "interrupted" else "the rest had no time or failed"
            parts.append(f"{name}: {len(section['rows'])} of {section['planned']} rows; {why}.")
    if "bench" in report["sections"] and not report["trial"]:
        parts.append("Goals, set for an H200:\n" + goals_table([report]))
    return "\n\n".join(parts)
