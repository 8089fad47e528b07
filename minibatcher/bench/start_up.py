"""How soon the package is there: imported, asked for help, and with its first token, each in a fresh process."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from .machine import machine
from .process import LOG_CHARACTERS, PACKAGE, ProcessFailed

TIMEOUT_S = 120.0
LIGHT = "import minibatcher, sys; sys.exit('torch was loaded' if 'torch' in sys.modules else 0)"
CLI = ("-m", "minibatcher")
COMMANDS: dict[str, tuple[float, tuple[str, ...]]] = {  # goal in seconds, arguments of the interpreter
    "import minibatcher": (0.3, ("-c", LIGHT)),
    "minibatcher --help": (0.5, (*CLI, "--help")),
    "first token": (5.0, (*CLI, "generate", "--max-tokens", "1", "ROMEO:")),
}


def start_up(runs: int = 5, progress: Callable[[], Any] | None = None) -> dict[str, Any]:
    """kind, provenance, and commands: goal_s, median_s, lowest_s, highest_s, met and the arguments of each.

    The interpreter's own start counts. Runs are in turn. Raises ProcessFailed where one fails, or `import minibatcher`
    loads PyTorch.
    """
    here = machine()
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, (_, arguments) in COMMANDS.items():
            taken[name].append(seconds(name, arguments))
            progress and progress()
    commands = {
        name: {
            "goal_s": goal,
            "median_s": statistics.median(taken[name]),
            "lowest_s": min(taken[name]),
            "highest_s": max(taken[name]),
            "met": statistics.median(taken[name]) < goal,
            "arguments": list(arguments),
        }
        for name, (goal, arguments) in COMMANDS.items()
    }
    return {"kind": "start-up", "provenance": here | {"runs": runs}, "commands": commands}


def seconds(name: str, arguments: tuple[str, ...]) -> float:
    """From the start of a process to its end. Raises ProcessFailed."""
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    begun = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
            env=os.environ | {"PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"{name} took more than {TIMEOUT_S:g} s") from None
    taken = time.perf_counter() - begun
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing on standard error"]
        raise ProcessFailed(f"{name} ended with code {done.returncode}: {last[0]}", done.stderr[-LOG_CHARACTERS:])
    return taken
