"""One run of everything that needs a GPU, in a few minutes, as one dict with provenance: for a short loan of one."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch

from ..errors import MinibatcherError
from ..provenance import git_commit, hardware, software
from .check import worst
from .child import SectionFailed, SectionInterrupted, run_section
from .goals import judge

SCHEMA = "minibatcher.kernels"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Section:
    """What run_section runs, and for how long at most, in seconds; None: as long as it takes.

    No row is begun in the last SLACK_S seconds of that time, and at its end the section's process is killed.
    """

    name: str
    seconds: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)


BENCH = (Section("bench"), Section("engine"))
REPORT = (Section("check", 100), Section("bench", 100), Section("engine", 70), Section("compare", 75))  # 345 s

SLACK_S = 15.0

# Called with (section's name, rows so far, rows to come in all or None) as each row comes.
Progress = Callable[[str, int, int | None], None]


def make_report(
    sections: Sequence[Section], device: torch.device | str, *, trial: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Run the sections one after another, each in a process of its own, and keep what each brought.

    Keys: schema, schema_version, date (UTC), git_commit, driver, software, hardware, trial, interrupted, goals (as
    goals.judge), sections: name → rows, planned (how many rows were meant), seconds, error (a sentence or None),
    mistake (whether the error is the user's), seed (of the check's inputs).
    A section that fails or runs out of time keeps its rows, and the next one begins. trial: tiny sizes, to try the way.
    """
    device = torch.device(device)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "driver": driver_version() if device.type == "cuda" else None,
        "software": software(),
        "hardware": hardware(device),
        "trial": trial,
        "interrupted": False,
        "sections": {},
    }
    for section in sections:
        done: dict[str, Any] = {"rows": [], "planned": None, "seconds": None, "error": None, "mistake": False}
        report["sections"][section.name] = done
        begun = time.perf_counter()
        try:
            _collect(section, device, trial, done, progress)
        except MinibatcherError as error:
            done |= {"error": str(error), "mistake": True}
        except (KeyboardInterrupt, SectionInterrupted):
            done["error"], report["interrupted"] = "interrupted", True
        except SectionFailed as error:
            done["error"] = str(error)
        done["seconds"] = round(time.perf_counter() - begun, 1)
        if report["interrupted"]:
            break
    report["goals"] = judge(report)
    return report


def _collect(section: Section, device: torch.device, trial: bool, done: dict, progress: Progress | None) -> None:
    settings: dict[str, Any] = {"device": str(device)}
    if trial:
        settings |= {"most_cases": 1} if section.name == "check" else {"tiny": True}
    # Kernels are interpreted where there is no GPU, and only there.
    env = {"TRITON_INTERPRET": "1" if device.type == "cpu" else None}
    if section.seconds is not None:
        settings["stop_after_s"] = section.seconds - SLACK_S
    for row in run_section(section.name, settings | section.settings, env=env, timeout_s=section.seconds):
        if "total" in row:
            done["planned"] = row["total"]
            if "seed" in row:
                done["seed"] = row["seed"]
        else:
            done["rows"].append(row)
        if progress is not None:
            progress(section.name, len(done["rows"]), done["planned"])


def failures(report: dict[str, Any]) -> list[str]:
    """A sentence for each thing that went wrong: sections, a kernel in a dtype, launches, answers.

    Goals not met are no failure.
    """
    found = []
    for name, section in report["sections"].items():
        if section["error"]:
            seed = f" (seed {section['seed']})" if "seed" in section else ""
            found.append(f"{name}{seed}: {section['error']}")
        found += _wrong(section["rows"])
        for row in section["rows"]:
            what = next((row[key] for key in ("what", "variant", "strategy") if key in row), row.get("shape", ""))
            if "failure" in row and "ok" not in row:
                found.append(
                    f"{name}, {row.get('kernel') or row.get('attention') or row['kind']}, {what}: {row['failure']}"
                )
            elif row.get("identical") is False:
                found.append(f"answers in float32 differ: {', '.join(row['different']) or 'a run is missing'}")
    return found


def _wrong(rows: list[dict[str, Any]]) -> Iterator[str]:
    """For each kernel and dtype of a check that failed, its first case, and how many more there are."""
    for group in worst([row for row in rows if "ok" in row]):
        if (row := group["first_failure"]) is None:
            continue
        if "failure" in row:
            how = f"raised {row['failure']}"
        else:
            error = "not finite" if row["error"] is None else f"{row['error']:.2g}"
            how = f"is wrong, error {error}, beyond {row['tolerance']:.2g}"
        more = group["failed"] - 1
        others = f", and {more} more {'case' if more == 1 else 'cases'} failed" if more else ""
        yield f"{row['kernel']} in {row['dtype']} {how} ({row['shape']}, seed {row['seed']}){others}"


def driver_version() -> str | None:
    """NVIDIA's driver, as nvidia-smi tells it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None
