"""The computed parts that tests/cold_start.py measures: how long the way in takes, and what a class needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MACHINES = ((16, 4), (64, 16), (256, 32), (512, 64))  # gigabytes of memory, cores
SYSTEM_GB = 4  # kept for the system and the hub
CLASS = 300  # students


def _measured(root: Path) -> dict[str, Any]:
    return json.loads((root / "chapters" / "measured" / "cold-start.json").read_text(encoding="utf-8"))


def _where(part: dict[str, Any]) -> str:
    """On what a part was measured, as the end of a sentence."""
    where = part["measured"]
    text = f"{where['cores']} cores, {where['memory_gb']} GB, Python {where['python']}, {where['system']}"
    network = f"; {where['network']}" if "network" in where else ""
    return f"{text}; commit {where['commit']}, {where['date']}, load {where['load']} at the start{network}"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def cold_start(root: Path) -> str:
    """A table of the phases from a fresh clone to a chapter that has run, and to green tests, with what dominates."""
    measured = _measured(root)
    lines = ["| from a fresh clone | time |", "| --- | --: |"]
    lab = measured["lab"]
    lines += [f"| {phase} | {_time(seconds)} |" for phase, seconds in lab["seconds"].items()]
    lines.append(f"| **`make lab`, chapter 7.1 run to its end** | **{_time(sum(lab['seconds'].values()))}** |")
    if "test" in measured:
        seconds = sum(measured["test"]["seconds"].values())
        lines.append(f"| **`make test`, from a clone of its own to its end** | **{_time(seconds)}** |")
    longest = max(lab["seconds"], key=lab["seconds"].get)
    largest, size = max(lab["largest_mb"].items(), key=lambda entry: entry[1])
    lines += [
        "",
        f"The longest part is “{longest}”. {lab['downloaded_mb']} MB are downloaded, and {lab['disk_mb']} MB are on "
        f"the disk in the end, in {lab['packages']} packages, of which {largest} is the largest ({size:.0f} MB; "
        f"PyTorch is {lab['torch']}). "
        f"Measured on {_where(lab)}.",
    ]
    if "cuda" in measured:
        lines += [
            "",
            f"On Linux pip takes PyTorch with CUDA unless told otherwise: {measured['cuda']['download_mb']} MB to "
            "download for PyTorch, Triton and NVIDIA's packages alone. Without such a GPU take `make lab CPU=1`.",
        ]
    return "\n".join(lines) + "\n"


def class_needs(root: Path) -> str:
    """A table of what one kernel takes, for each chapter and lab."""
    kernels = _measured(root)["kernels"]
    lines = ["| kernel | memory at its peak | CPU time |", "| --- | --: | --: |"]
    for name, taken in kernels["notebooks"].items():
        label = f"chapter {name.split('-')[0]}" if name.startswith("7.") else name.replace("-", " ")
        lines.append(f"| {label} | {taken['peak_mb']:.0f} MB | {taken['cpu_s']:.0f} s |")
    return "\n".join([*lines, "", f"Measured on {_where(kernels)}."]) + "\n"


def class_size(root: Path) -> str:
    """A table of how many students a machine holds, and how long they wait if all press Run All at once."""
    measured = _measured(root)
    notebooks = measured["kernels"]["notebooks"].values()
    peak, cpu = (max(taken[key] for taken in notebooks) for key in ("peak_mb", "cpu_s"))
    student = measured["lab"]["server_mb"] + peak
    lines = [
        f"One student takes {measured['lab']['server_mb']} MB for the server and at most {peak:.0f} MB for a kernel; "
        f"all cells of the longest chapter take {cpu:.0f} s of one core. {SYSTEM_GB} GB are kept for the system.",
        "",
        "| machine | students with one kernel each | all run the longest chapter at once: done after |",
        "| --- | --: | --: |",
    ]
    for memory, cores in MACHINES:
        students = int((memory - SYSTEM_GB) * 1000 / student)
        lines.append(f"| {memory} GB, {cores} cores | {students} | {_time(students * cpu / cores)} |")
    lines += ["", f"For {CLASS} students at once that is {CLASS * student / 1000 + SYSTEM_GB:.0f} GB of memory."]
    return "\n".join(lines) + "\n"


BLOCKS = {"cold-start": cold_start, "class-needs": class_needs, "class-size": class_size}
