"""Runs that were kept in files, to stand beside new ones in a table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import WorkloadError
from ..timeline import Timeline, parse

KEPT = "timelines"  # in a replay's JSON: label → what Timeline.to_json made


def load_runs(path: str) -> dict[str, Timeline]:
    """Label → run: of the JSON that `replay --json` wrote, or of a timeline (compare, serve or replay --timeline).

    Raises WorkloadError for anything else, and for simulated runs, which are never shown beside measured ones.
    """
    try:
        data = parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WorkloadError(f"can't read the run {path}: {error}") from error
    runs = _runs_in(data, path)
    simulated = [label for label, timeline in runs.items() if timeline.clock != "measured"]
    if simulated:
        raise WorkloadError(
            f"{path} holds a simulated run ({', '.join(simulated)}), and measured and simulated numbers never stand in "
            "one table; give a measured one"
        )
    return runs


def _runs_in(data: Any, path: str) -> dict[str, Timeline]:
    if isinstance(data, dict) and data.get("schema") == "minibatcher.comparison":
        kept = data.get(KEPT)
        if not isinstance(kept, dict) or not kept:
            raise WorkloadError(
                f"{path} is a comparison without the times of its requests; keep a run with --timeline DIR, and name "
                "its file there"
            )
        return {label: Timeline.from_json(one, f"{path} ({label})") for label, one in kept.items()}
    timeline = Timeline.from_json(data, path)
    name = timeline.header.get("strategy") if timeline.at_client else None
    return {name or Path(path).stem: timeline}


def beside(taken: Iterable[str], paths: Iterable[str]) -> dict[str, Timeline]:
    """The runs of all files, under labels that are not taken yet. Raises WorkloadError."""
    labels, found = set(taken), {}
    for path in paths:
        for label, timeline in load_runs(path).items():
            free = label if label not in labels else f"{label} ({Path(path).stem})"
            number = 2
            while free in labels:
                free, number = f"{label} ({Path(path).stem} {number})", number + 1
            labels.add(free)
            found[free] = timeline
    return found
