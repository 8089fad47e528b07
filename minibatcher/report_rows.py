"""The rows of a comparison's table: which numbers, under which labels, in how many digits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

TOLD = ("stop", "length", "refused", "error")  # finish reasons with rows of their own
MOST_GROUPS = 8  # classes or tenants in a table; the JSON has all

Lines = list[tuple[str, list[str]]]  # a label and one cell a run; no cells: a heading

UTILISATION_ROWS = ("busy_share", "mfu", "bandwidth_utilisation", "useful_slot_share")
GPU_ROWS = ("gpu_busy_share", "gpu_power_w", "gpu_memory_peak_gib", "joules_per_output_token")
PADDING_ROWS = ("padding_share", "padding_prompt_share", "padding_finished_share")
LATENCIES = ("queue_ms", "ttft_ms", "itl_ms", "tpot_ms", "e2el_ms")

LABELS = {  # a number's key in the JSON → what it is called in a table
    "makespan_s": "makespan, s",
    "output_tokens_per_s": "output tokens/s",
    "requests_per_s": "requests/s",
    "queue_ms": "Queue time, ms",
    "ttft_ms": "TTFT, queue included, ms",
    "itl_ms": "ITL, ms",
    "tpot_ms": "TPOT, ms",
    "e2el_ms": "E2EL, ms",
    "slot_occupancy": "slot occupancy, by step",
    "padding_share": "padding, of tokens computed",
    "padding_prompt_share": "filling up short prompts",
    "padding_finished_share": "rows of ended requests",
    "kv_occupancy": "KV tokens, KV blocks",
    "queue_depth": "queue depth, mean",
    "num_preemptions": "preemptions",
    "num_lost_tokens": "tokens computed again",
    "lost_share": "of all tokens computed",
    "num_swapped_blocks": "KV blocks swapped, out and in",
    "prefix_hit_rate": "prompt tokens found in it",
    "prefix_bound": "in a cache without end",
    "refusals": "refused",
    "classes": "by class",
    "tenants": "by tenant",
    "goodput_per_s": "goodput, requests/s",
    "cost_per_million_output_tokens": "cost per million output tokens",
    "cost_per_request": "cost per request",
    "busy_share": "busy (as nvidia-smi shows)",
    "mfu": "model FLOPs",
    "bandwidth_utilisation": "memory bandwidth",
    "useful_slot_share": "useful slots, by time",
    "gpu_busy_share": "busy: any kernel at all (nvidia-smi)",
    "gpu_power_w": "power, mean, W",
    "gpu_memory_peak_gib": "memory in use, peak, GiB",
    "joules_per_output_token": "energy per output token, J",
}
REFUSALS = {  # how the sentences of limits.Door begin (metrics.refusal) → what a row is called
    "the queue has no room": "queue full",
    "tenant has asked for as much as it may": "rate limit of its tenant",
}


def lines_of(data: dict[str, Any]) -> Lines:
    """Every row of the table. Rows that would say nothing of any run are left out."""
    runs = list(data["strategies"].values())
    lines = _speed_lines(data, runs) + _goodput_lines(data, runs)
    if data["price_per_hour"] is not None:
        lines += [
            (LABELS[key], [number(run[key], 3) for run in runs])
            for key in ("cost_per_million_output_tokens", "cost_per_request")
        ]
    lines += _latency_lines(runs)
    if any(run["num_steps"] is not None for run in runs):
        lines += _work_lines(runs)
    if all("utilisation" in run for run in runs):
        lines.append(("Utilisation of the hardware", []))
        for key in UTILISATION_ROWS:
            lines.append((f"  {LABELS[key]}", [percent(run["utilisation"][key]) for run in runs]))
    lines += _prefix_lines(data, runs)
    lines += _group_lines(runs, "classes", "class")
    if any(run["tenants"].keys() != run["classes"].keys() for run in runs):  # else each class is one tenant's
        lines += _group_lines(runs, "tenants", "tenant")
    return lines + _gpu_lines(runs) + _end_lines(runs)


def _speed_lines(data: dict[str, Any], runs: list[dict[str, Any]]) -> Lines:
    speeds = [run["output_tokens_per_s"] for run in runs]
    lines: Lines = [(LABELS["output_tokens_per_s"], [number(speed, 3) for speed in speeds])]
    if speeds[0] and len(runs) > 1:
        cells = ["–" if speed is None else f"{speed / speeds[0]:.2f} ×" for speed in speeds]
        lines.append((f"  relative to {next(iter(data['strategies']))}", cells))
    return lines + [(LABELS[key], [number(run[key], 3) for run in runs]) for key in ("requests_per_s", "makespan_s")]


def _latency_lines(runs: list[dict[str, Any]]) -> Lines:
    lines: Lines = []
    for key in LATENCIES:
        if key == "queue_ms" and all(run["num_steps"] is None for run in runs):
            continue
        label, counts = LABELS[key], [run[key]["n"] for run in runs]
        alike = len(set(counts)) == 1
        lines.append((f"{label} (n = {counts[0]:,})" if alike else label, []))
        for name in ("mean", "p50", "p90", "p99"):
            lines.append((f"  {name}", [number(run[key][name], 3) for run in runs]))
        if not alike:
            lines.append(("  n", [f"{n:,}" for n in counts]))
    return lines


def _work_lines(runs: list[dict[str, Any]]) -> Lines:
    kv = [run["kv_occupancy"] for run in runs]
    lines: Lines = [("Work", []), (f"  {LABELS['slot_occupancy']}", [percent(run["slot_occupancy"]) for run in runs])]
    if any(run["num_padding_tokens"] for run in runs):
        for key in PADDING_ROWS:
            depth = "  " if key == "padding_share" else "    "
            lines.append((depth + LABELS[key], [percent(run[key]) for run in runs]))
    lines += [
        ("  KV tokens, of reserved", [percent(one["tokens_of_reserved"]) for one in kv]),
        ("  KV blocks in use, of pool", [percent(one["blocks_of_pool"]) for one in kv]),
    ]
    preempted = any(run["num_preemptions"] for run in runs)
    if preempted:
        lines.append(("    at their peak", [percent(one["blocks_peak"]) for one in kv]))
    if any(one["cached_of_pool"] for one in kv):
        lines.append(("  KV blocks cached, of pool", [percent(one["cached_of_pool"]) for one in kv]))
    if preempted:
        for key in ("num_preemptions", "num_lost_tokens"):
            lines.append((f"  {LABELS[key]}", [whole(run[key]) for run in runs]))
        lines.append((f"    {LABELS['lost_share']}", [percent(run["lost_share"]) for run in runs]))
    if any(run["num_swapped_blocks"] for run in runs):
        lines.append((f"  {LABELS['num_swapped_blocks']}", [whole(run["num_swapped_blocks"]) for run in runs]))
    return [
        *lines,
        (f"  {LABELS['queue_depth']}", [number(run["queue_depth"]["mean"], 2) for run in runs]),
        ("  steps", [whole(run["num_steps"]) for run in runs]),
    ]


def _goodput_lines(data: dict[str, Any], runs: list[dict[str, Any]]) -> Lines:
    """Who was within the objectives: in all, and class by class where there are several."""
    if not data["objectives"] and not data["class_objectives"]:
        return []
    found = [run["goodput"] for run in runs]
    lines: Lines = [
        ("Within objectives" + limits_text(data["objectives"]), []),
        ("  of requests", [percent(one["good_share"]) for one in found]),
        (f"  {LABELS['goodput_per_s']}", [number(one["goodput_per_s"], 3) for one in found]),
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
    bounds = [entry(data, name, "prefix_bound") for name in data["strategies"]]
    caching = [entry(data, name, "enable_prefix_caching") for name in data["strategies"]]
    if not any(bounds) and not any(caching) and not any(run["num_cached_tokens"] for run in runs):
        return []
    found = [percent(run["prefix_hit_rate"]) if on is not False else "–" for run, on in zip(runs, caching)]
    lines: Lines = [("Prefix cache", []), (f"  {LABELS['prefix_hit_rate']}", found)]
    if any(bounds):
        cells = [percent(bound["tokens"] / bound["of"]) if bound else "–" for bound in bounds]
        lines.append((f"    {LABELS['prefix_bound']}", cells))
    return lines


def entry(data: dict[str, Any], name: str, key: str) -> Any:
    """What the header of a run says, wherever the comparison keeps it; None if it says nothing."""
    return data["strategies"][name]["header"].get(key, data["header"].get(key))


def _group_lines(runs: list[dict[str, Any]], key: str, what: str) -> Lines:
    """TTFT and TPOT (p50 / p99), shares of output tokens and refusals of each class or tenant, if there are several."""
    sizes: dict[str, int] = {}
    for run in runs:
        for name, group in run[key].items():
            sizes[name] = max(sizes.get(name, 0), group["n"])
    if not sizes:
        return []
    largest = sorted(sizes, key=lambda name: -sizes[name])[:MOST_GROUPS]
    shown = [name for name in sizes if name in largest]

    def rows(form: Callable[[dict[str, Any]], str], label: Callable[[str], str] = str) -> Lines:
        return [
            (f"  {label(name)}", [form(run[key][name]) if name in run[key] else "–" for run in runs]) for name in shown
        ]

    def counted(name: str) -> str:
        counts = [run[key][name]["ttft_ms"]["n"] for run in runs if name in run[key]]
        some, most = min(counts), max(counts)
        return f"{name} (n = {most:,})" if some == most else f"{name} (n = {some:,} to {most:,})"

    lines: Lines = [(f"TTFT by {what}, p50 / p99, ms", []), *rows(lambda group: _pair(group["ttft_ms"]), counted)]
    lines += [(f"TPOT by {what}, p50 / p99, ms", []), *rows(lambda group: _pair(group["tpot_ms"]))]
    lines.append((f"Output tokens by {what}, while all had work", []))
    lines += rows(lambda group: percent(group["output_share"]))
    if any(group["num_refused"] for run in runs for group in run[key].values()):
        lines.append((f"Requests served / refused by {what}", []))
        lines += rows(lambda group: f"{group['num_served']:,} / {group['num_refused']:,}")
    if len(sizes) > len(shown):
        lines.append((f"  … and {len(sizes) - len(shown):,} more {key}, in the JSON", []))
    return lines


def _pair(latency: dict[str, Any]) -> str:
    return f"{number(latency['p50'], 3)} / {number(latency['p99'], 3)}" if latency["n"] else "–"


def _end_lines(runs: list[dict[str, Any]]) -> Lines:
    """How requests ended."""
    ended = [run["num_finished"] for run in runs]
    lines: Lines = [("Requests served to their end", [f"{_served(run):,}" for run in runs])]
    refused = [_by_reason(run["refusals"]) for run in runs]
    for reason in dict.fromkeys(reason for counts in refused for reason in counts):
        lines.append((f"  refused: {reason}", [f"{counts[reason]:,}" for counts in refused]))
    if any(reasons.get("error") for reasons in ended):
        lines.append(("  ended by an error", [f"{reasons.get('error', 0):,}" for reasons in ended]))
    others = [sum(n for reason, n in reasons.items() if reason not in TOLD) for reasons in ended]
    if any(others):
        lines.append(("  aborted or unfinished", [f"{n:,}" for n in others]))
    return lines


def _by_reason(refusals: dict[str, int]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for sentence, n in refusals.items():
        counts[next((label for start, label in REFUSALS.items() if sentence.startswith(start)), sentence)] += n
    return counts


def _gpu_lines(runs: list[dict[str, Any]]) -> Lines:
    """Rows of what was sampled on the GPU in at least one run."""
    lines: Lines = []
    for key in GPU_ROWS:
        values = [run.get(key) for run in runs]
        if any(value is not None for value in values):
            cells = [percent(v) if key.endswith("share") else number(v, 3) for v in values]
            lines.append((f"  {LABELS[key]}", cells))
    return [("GPU, sampled during the run", []), *lines] if lines else []


def _served(run: dict[str, Any]) -> int:
    return run["num_finished"]["stop"] + run["num_finished"]["length"]


def number(value: float | None, digits: int) -> str:
    """Few digits: 0.0412, 7.35, 41.2, 1,207."""
    if value is None:
        return "–"
    if abs(value) < 10 ** (digits - 1):
        value = float(f"{value:.{digits}g}")  # 9.996 has two digits before the point once it is rounded
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}" if abs(value) < 1 else f"{value:.{digits - len(str(int(abs(value))))}f}"


def whole(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"


def percent(share: float | None) -> str:
    if share is None:
        return "–"
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"
