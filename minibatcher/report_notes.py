"""What is said below a comparison's table: whether answers agree, who did the same work and why, what differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .metrics import refusal
from .report_rows import REFUSALS, entry
from .tally import Tally
from .timeline import Timeline

LAYOUT = ("kv_layout", "block_size", "num_blocks", "enable_prefix_caching")  # told by notes of their own
QUEUE_FULL = next(start for start, label in REFUSALS.items() if label == "queue full")


def same_work(timelines: Mapping[str, Timeline | Tally], summaries: Mapping[str, dict]) -> list[dict[str, Any]]:
    """Groups of runs that did the same work: `runs`, and whether `same_order` is known, request by request.

    Timelines are held side by side, step by step; of running sums only the sums are known, and runs under different
    orderings are then never taken for the same.
    """
    groups: dict[tuple, list[str]] = {}
    for name, run in summaries.items():
        if run["num_steps"] is None:  # seen from outside: nobody knows
            continue
        work = tuple(run[key] for key in ("num_steps", "num_computed_tokens", "num_padding_tokens", "num_preemptions"))
        if isinstance(timelines[name], Tally):
            work += (timelines[name].header.get("ordering"),)
        groups.setdefault(work, []).append(name)
    found: list[dict[str, Any]] = []
    for names in groups.values():
        if len(names) < 2:
            continue
        steps: dict[Any, list[str]] = {}
        for name in names:
            steps.setdefault(_steps_of(timelines[name]), []).append(name)
        known = not any(isinstance(timelines[name], Tally) for name in names)
        found += [{"runs": alike, "same_order": known} for alike in steps.values() if len(alike) > 1]
    return found


def _steps_of(timeline: Timeline | Tally) -> int | None:
    """Stands for who was let in when, and what was computed for whom in which step."""
    if isinstance(timeline, Tally):
        return None
    return hash(
        tuple(
            (tuple(step.admitted), tuple(step.preempted), tuple((row.request_id, row.num_tokens) for row in step.rows))
            for step in timeline.steps
        )
    )


def free_slots_missed(timeline: Timeline | Tally) -> int | None:
    """How many requests a full queue turned away while slots were free; None where that is not known."""
    if isinstance(timeline, Tally) or timeline.at_client:
        return None
    records = list(timeline.requests.values())
    begun = [r for r in records if r.first_scheduled_time is not None]
    refused = (r for r in records if r.finish_reason == "refused" and refusal(r.error).startswith(QUEUE_FULL))
    moments = np.array([r.finish_time for r in refused])
    started = np.searchsorted(np.sort([r.first_scheduled_time for r in begun]), moments)  # before, not at that moment
    ends = np.sort([r.finish_time for r in begun if r.finish_time is not None])
    return int(np.count_nonzero(started - np.searchsorted(ends, moments, "right") < timeline.num_slots))


def notes_of(data: dict[str, Any]) -> list[str]:
    """Sentences on a comparison (report.comparison)."""
    notes = [*_other_requests(data), *_answers(data), *_same_work(data), *_caching(data), *_refusals(data)]
    notes += _at_client(data)
    if "gpu_monitor" in data["header"]:
        notes.append(f"GPU: {data['header']['gpu_monitor']}.")
    if "calibration" in data["header"]:
        notes.append(f"Calibration: {data['header']['calibration']}.")
    return notes + _unequal(data)


def _other_requests(data: dict[str, Any]) -> list[str]:
    first = next(iter(data["strategies"]))
    told = "; ".join(f"{name}: {why}" for name, why in data["other_requests"].items())
    return [f"NOT THE SAME REQUESTS as {first}, so these columns can't be compared: {told}."] if told else []


def _at_client(data: dict[str, Any]) -> list[str]:
    """What a replay says of itself, and where its times were taken."""
    names = [name for name in data["strategies"] if entry(data, name, "source") == "replay"]
    told: dict[str, list[str]] = {}
    for name in names:
        for sentence in entry(data, name, "client_notes") or ():
            told.setdefault(sentence, []).append(name)
    notes = [f"{', '.join(who)}: {sentence}." for sentence, who in told.items()]
    if names:
        where = ", ".join(f"{name} ({_address(data, name)})" for name in names)
        notes.append(
            f"Measured by the client of {where}: the latencies hold HTTP and the network, and a request's time begins "
            "when it was due. Queue time, steps and KV memory are known to the server alone."
        )
    return notes


def _address(data: dict[str, Any], name: str) -> str:
    server = entry(data, name, "server") or {}
    told = " ".join(str(server[key]) for key in ("owned_by", "version") if key in server)
    return f"{told} at {entry(data, name, 'base_url')}" if told else str(entry(data, name, "base_url"))


def _answers(data: dict[str, Any]) -> list[str]:
    if len(data["strategies"]) < 2 or data["clock"] != "measured":
        return []
    compared, by_text = data["num_answers_compared"], data["compared_by_text"]
    all_ours = not any(entry(data, name, "source") == "replay" for name in data["strategies"])
    columns = "strategies" if all_ours and not data["header"].get("varied") else "runs"
    notes = []
    if silent := data["not_compared"]:
        notes = [f"Answers of {', '.join(silent)}: not compared, since here texts are known and there token ids alone."]
    left_out = [*data["other_requests"], *silent]
    if data["answers_identical"]:
        who = f"all {columns}" + (f" but {', '.join(left_out)}" if left_out else "")
        told = f" (as text with {', '.join(by_text)}, where token ids are not told)" if by_text else ""
        return [*notes, f"Answers: {who} gave identical tokens for each of {compared:,} requests{told}."]
    if data["answers_identical"] is None:
        if left_out:  # which has been told
            return notes
        return [f"Answers: not compared, since no request was served to its end by two {columns}."]
    ids = dict.fromkeys(d["id"] for d in data["differences"])
    told = "; ".join(_difference(d) for d in data["differences"][:3]) + ("; …" if len(data["differences"]) > 3 else "")
    return [*notes, f"Answers DIFFER for {len(ids):,} of {compared:,} requests: {told}."]


def _difference(d: dict[str, Any]) -> str:
    if d["position"] is None:
        return f"{d['id']} was not served by {d['strategy']}"
    tokens = f"{d['token']}, {d['reference']}: {d['expected']}"
    what = "character" if d.get("as_text") else "output token"
    return f"{d['id']} under {d['strategy']} at {what} {d['position']} ({tokens})"


def _same_work(data: dict[str, Any]) -> list[str]:
    """Runs that made the same steps, and why; where they were measured, what differs between them is noise."""
    notes = []
    for group in data["same_work"]:
        names, why = group["runs"], _why_the_same(data, group["runs"])
        what = "served in the same order" if _differ(data, names, "ordering") else "did the same work here"
        if data["clock"] == "measured":
            why.append("what differs between them is the machine's noise")
        notes.append(f"{' and '.join(names)} {what}{': ' if why else ''}{'; '.join(why)}.")
    return notes


def _why_the_same(data: dict[str, Any], names: list[str]) -> list[str]:
    """What would have to be otherwise for the options that vary to make a difference."""
    runs = [data["strategies"][name] for name in names]
    memory = _differ(data, names, "admission") or _differ(data, names, "preemption")
    orderings = {entry(data, name, "ordering") for name in names} if _differ(data, names, "ordering") else set()
    if (memory or orderings) and not any(run["queue_depth"]["max"] for run in runs):
        return ["nobody waited (raise --request-rate; inf lets all arrive at once)"]
    why = []
    if memory and not any(run["num_preemptions"] for run in runs):
        why.append("nobody was preempted (lower --kv-cache-tokens)")
    for ordering, kind, groups in (("priority", "class", "classes"), ("fair-share", "tenant", "tenants")):
        if ordering in orderings and not any(run[groups] for run in runs):
            why.append(f"all requests are of one {kind}")
    return why


def _differ(data: dict[str, Any], names: list[str], key: str) -> bool:
    return len({entry(data, name, key) for name in names}) > 1


def _caching(data: dict[str, Any]) -> list[str]:
    """Why a prefix cache found nothing, and who can't have one."""
    names = list(data["strategies"])
    cached = [name for name in names if entry(data, name, "enable_prefix_caching")]
    if not cached and "enable_prefix_caching" not in data["header"].get("varied", []):
        return []
    slots = dict.fromkeys(entry(data, n, "strategy") for n in names if entry(data, n, "kv_layout") == "slots")
    verb = "keep" if len(slots) > 1 else "keeps"
    notes = [f"{' and '.join(slots)} {verb} KV in slots: no blocks to share, hence no prefix cache."] if slots else []
    looked_for = "varied" in data["header"]  # whoever ran these has looked for prompts that begin alike
    if cached and looked_for and not any(entry(data, name, "prefix_bound") for name in cached):
        notes.append("No two prompts begin alike, so there is nothing to find in the prefix cache.")
    return notes


def _refusals(data: dict[str, Any]) -> list[str]:
    missed = {name: run["num_refused_beside_free_slots"] for name, run in data["strategies"].items()}
    told = ", ".join(f"{n:,} under {name}" if len(missed) > 1 else f"{n:,}" for name, n in missed.items() if n)
    if not told:
        return []
    return [
        f"A full queue turned requests away although slots were free ({told}): who arrives between two steps waits for "
        "the next one, so more arrivals at once than the queue may hold are too many, however idle the server is."
    ]


def _unequal(data: dict[str, Any]) -> list[str]:
    """What is not the same in all runs, though no column's name says so: an entry a line, equal values told once."""
    names, notes = list(data["strategies"]), []
    known = [name for name in names if entry(data, name, "num_blocks") is not None]
    if len(known) > 1 and any(_differ(data, known, key) for key in ("kv_layout", "block_size", "num_blocks")):
        notes.append(f"KV memory: {_told({name: _memory(data, name) for name in known})}.")
    for key in data["differing"]:
        values = {name: entry(data, name, key) for name in names}
        if any(entry(data, name, "source") == "replay" for name in names):  # which says less than an engine
            values = {name: value for name, value in values.items() if value is not None}
        if len(set(map(str, values.values()))) < 2:
            continue
        plain = all(isinstance(value, (str, int, float, type(None))) for value in values.values())
        if plain and key not in LAYOUT and key not in data["header"].get("varied", []):
            notes.append(f"Not the same in all runs: {key}: {_told(values)}.")
    return notes


def _memory(data: dict[str, Any], name: str) -> str:
    pieces = {"slots": "slots", "paged": "blocks"}.get(entry(data, name, "kv_layout"), "pieces")
    return f"{entry(data, name, 'num_blocks'):,} {pieces} of {entry(data, name, 'block_size'):,} tokens"


def _told(values: dict[str, Any]) -> str:
    """0.0 (worst-case, optimistic), 0.25 (preempt)"""
    by_value: dict[str, list[str]] = {}
    for name, value in values.items():
        by_value.setdefault(str(value), []).append(name)
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in by_value.items())
