"""The rows of a comparison's table: which numbers, under which labels, in how many digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TOLD = ("stop", "length", "refused", "error")  # finish reasons with rows of their own
MOST_GROUPS = 8  # classes or tenants in a table; the JSON has all

Lines = list[tuple[str, list[str]]]  # a label and one cell a run; no cells: a heading

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
PADDING_ROWS = {
    "slot_occupancy": "slot occupancy",
    "padding_share": "padding, of tokens computed",
    "padding_prompt_share": "  filling up short prompts",
    "padding_finished_share": "  rows of ended requests",
}
LATENCIES = {
    "queue_ms": "Queue time, ms",
    "ttft_ms": "TTFT, queue included, ms",
    "itl_ms": "ITL, ms",
    "tpot_ms": "TPOT, ms",
    "e2el_ms": "E2EL, ms",
}


def lines_of(data: dict[str, Any]) -> Lines:
    """Every row of the table. Rows that would say nothing of any run are left out."""
    runs = list(data["strategies"].values())
    lines = _speed_lines(data, runs) + _goodput_lines(data, runs)
    if data["price_per_hour"] is not None:
        lines += [
            ("cost per million output tokens", [number(run["cost_per_million_output_tokens"], 3) for run in runs]),
            ("cost per request", [number(run["cost_per_request"], 3) for run in runs]),
        ]
    lines += _latency_lines(runs) + _work_lines(runs)
    if all("utilisation" in run for run in runs):
        lines.append(("Utilisation of the hardware", []))
        for key, label in UTILISATION_ROWS.items():
            lines.append((f"  {label}", [percent(run["utilisation"][key]) for run in runs]))
    lines += _prefix_lines(data, runs)
    lines += _group_lines(runs, "classes", "class")
    if any(run["tenants"].keys() != run["classes"].keys() for run in runs):  # else each class is one tenant's
        lines += _group_lines(runs, "tenants", "tenant")
    return lines + _gpu_lines(runs) + _end_lines(runs)


def _speed_lines(data: dict[str, Any], runs: list[dict[str, Any]]) -> Lines:
    speeds = [run["output_tokens_per_s"] for run in runs]
    lines: Lines = [("output tokens/s", [number(speed, 3) for speed in speeds])]
    yardstick = _yardstick(data)
    base = data["strategies"][yardstick]["output_tokens_per_s"] if yardstick else None
    if base and len(runs) > 1:
        cells = ["–" if speed is None else f"{speed / base:.2f} ×" for speed in speeds]
        lines.append((f"  relative to {yardstick}", cells))
    return [
        *lines,
        ("requests/s", [number(run["requests_per_s"], 3) for run in runs]),
        ("makespan, s", [number(run["makespan_s"], 3) for run in runs]),
    ]


def _latency_lines(runs: list[dict[str, Any]]) -> Lines:
    lines: Lines = []
    for key, label in LATENCIES.items():
        counts = [run[key]["n"] for run in runs]
        alike = len(set(counts)) == 1
        lines.append((f"{label} (n = {counts[0]:,})" if alike else label, []))
        for name in ("mean", "p50", "p90", "p99"):
            lines.append((f"  {name}", [number(run[key][name], 3) for run in runs]))
        if not alike:
            lines.append(("  n", [f"{n:,}" for n in counts]))
    return lines


def _work_lines(runs: list[dict[str, Any]]) -> Lines:
    kv = [run["kv_occupancy"] for run in runs]
    lines: Lines = [("Work", [])]
    for key, label in PADDING_ROWS.items():
        lines.append((f"  {label}", [percent(run[key]) for run in runs]))
    lines += [
        ("  KV tokens, of reserved", [percent(one["tokens_of_reserved"]) for one in kv]),
        ("  KV blocks in use, of pool", [percent(one["blocks_of_pool"]) for one in kv]),
    ]
    if any(one["cached_of_pool"] for one in kv):
        lines.append(("  KV blocks cached, of pool", [percent(one["cached_of_pool"]) for one in kv]))
    if any(run["num_preemptions"] for run in runs):
        lines += [
            ("  preemptions", [f"{run['num_preemptions']:,}" for run in runs]),
            ("  tokens computed again", [f"{run['num_lost_tokens']:,}" for run in runs]),
            ("    of all tokens computed", [percent(run["lost_share"]) for run in runs]),
        ]
    if any(run["num_swapped_blocks"] for run in runs):
        lines.append(("  KV blocks swapped, out and in", [f"{run['num_swapped_blocks']:,}" for run in runs]))
    return [
        *lines,
        ("  queue depth, mean", [number(run["queue_depth"]["mean"], 2) for run in runs]),
        ("  steps", [f"{run['num_steps']:,}" for run in runs]),
    ]


def _yardstick(data: dict[str, Any]) -> str | None:
    """The run that others are measured by: a static one, else solo; among variants of one strategy, the first."""
    names = {name: _strategy_of(data, name) for name in data["strategies"]}
    known = (name for wanted in ("static", "solo") for name, strategy in names.items() if strategy == wanted)
    return next(known, next(iter(names)) if len(set(names.values())) == 1 and None not in names.values() else None)


def _strategy_of(data: dict[str, Any], name: str) -> str | None:
    return data["strategies"][name]["header"].get("strategy", data["header"].get("strategy"))


def _goodput_lines(data: dict[str, Any], runs: list[dict[str, Any]]) -> Lines:
    """Who was within the objectives: in all, and class by class where there are several."""
    if not data["objectives"] and not data["class_objectives"]:
        return []
    found = [run["goodput"] for run in runs]
    lines: Lines = [
        ("Within objectives" + limits_text(data["objectives"]), []),
        ("  of requests", [percent(one["good_share"]) for one in found]),
        ("  goodput, requests/s", [number(one["goodput_per_s"], 3) for one in found]),
    ]
    classes = {name: figures["objective"] for one in found for name, figures in one["classes"].items()}
    if len(classes) > 1 or data["class_objectives"]:
        for name, objective in classes.items():
            cells = [percent(one["classes"].get(name, {}).get("good_share")) for one in found]
            own = limits_text(objective) if objective != data["objectives"] else ""
            lines.append((f"  of {name} requests{own}", cells))
    return lines


def limits_text(objective: dict[str, float]) -> str:
    """ ": ttft ≤ 500 ms, tpot ≤ 50 ms", or nothing."""
    limits = ", ".join(f"{name.removesuffix('_ms')} ≤ {limit:g} ms" for name, limit in objective.items())
    return f": {limits}" if limits else ""


def _prefix_lines(data: dict[str, Any], runs: list[dict[str, Any]]) -> Lines:
    bounds = [run["header"].get("prefix_bound", data["header"].get("prefix_bound")) for run in runs]
    if not any(bounds) and not any(run["num_cached_tokens"] for run in runs):
        return []
    lines: Lines = [
        ("Prefix cache", []),
        ("  prompt tokens found in it", [percent(run["prefix_hit_rate"]) for run in runs]),
    ]
    if any(bounds):
        lines.append(("    in a cache without end", [percent(b["tokens"] / b["of"]) if b else "–" for b in bounds]))
    return lines


def _group_lines(runs: list[dict[str, Any]], key: str, what: str) -> Lines:
    """TTFT and TPOT (p50 / p99) and share of output tokens of each class or tenant, where there are several."""
    sizes: dict[str, int] = {}
    for run in runs:
        for name, group in run[key].items():
            sizes[name] = max(sizes.get(name, 0), group["n"])
    if not sizes:
        return []
    largest = sorted(sizes, key=lambda name: -sizes[name])[:MOST_GROUPS]
    shown = [name for name in sizes if name in largest]

    def cells(name: str, form: Callable[[dict[str, Any]], str]) -> list[str]:
        return [form(run[key][name]) if name in run[key] else "–" for run in runs]

    lines: Lines = [(f"TTFT by {what}, p50 / p99, ms", [])]
    lines += [(f"  {name} (n = {sizes[name]:,})", cells(name, lambda group: _pair(group["ttft_ms"]))) for name in shown]
    lines.append((f"TPOT by {what}, p50 / p99, ms", []))
    lines += [(f"  {name}", cells(name, lambda group: _pair(group["tpot_ms"]))) for name in shown]
    lines.append((f"Output tokens by {what}, of all", []))
    lines += [(f"  {name}", cells(name, lambda group: percent(group["output_share"]))) for name in shown]
    if len(sizes) > len(shown):
        lines.append((f"  … and {len(sizes) - len(shown):,} more {key}, in the JSON", []))
    return lines


def _pair(latency: dict[str, Any]) -> str:
    return f"{number(latency['p50'], 3)} / {number(latency['p99'], 3)}" if latency["n"] else "–"


def _end_lines(runs: list[dict[str, Any]]) -> Lines:
    """How requests ended."""
    ended = [run["num_finished"] for run in runs]
    lines: Lines = [("Requests served to their end", [f"{_served(run):,}" for run in runs])]
    for reason in dict.fromkeys(reason for run in runs for reason in run["refusals"]):
        lines.append((f"  refused: {_shortened(reason)}", [f"{run['refusals'].get(reason, 0):,}" for run in runs]))
    if any(reasons.get("error") for reasons in ended):
        lines.append(("  ended by an error", [f"{reasons.get('error', 0):,}" for reasons in ended]))
    others = [sum(n for reason, n in reasons.items() if reason not in TOLD) for reasons in ended]
    if any(others):
        lines.append(("  aborted or unfinished", [f"{n:,}" for n in others]))
    return lines


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:38].rstrip()} …"


def _gpu_lines(runs: list[dict[str, Any]]) -> Lines:
    """Rows of what was sampled on the GPU in at least one run."""
    lines: Lines = []
    for key, label in GPU_ROWS.items():
        values = [run.get(key) for run in runs]
        if any(value is not None for value in values):
            cells = [percent(v) if key.endswith("share") else number(v, 3) for v in values]
            lines.append((f"  {label}", cells))
    return [("GPU, sampled during the run", []), *lines] if lines else []


def _served(run: dict[str, Any]) -> int:
    return run["num_finished"]["stop"] + run["num_finished"]["length"]


def number(value: float | None, digits: int) -> str:
    """Few digits: 0.0412, 7.35, 41.2, 1,207."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}" if abs(value) < 1 else f"{value:.{digits - len(str(int(abs(value))))}f}"


def percent(share: float | None) -> str:
    if share is None:
        return "–"
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"
