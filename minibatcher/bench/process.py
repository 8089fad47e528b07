"""A module run in a fresh process: timed out with all its descendants, and with the processor time that others took."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG_CHARACTERS = 2000  # of what a failed process printed last
PACKAGE = Path(__file__).resolve().parents[1]


class ProcessFailed(Exception):
    """The process gave no answer; the message is a sentence that says why. log: the last that it printed."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class Usage:
    """What a process with its descendants took. seconds: wall clock from its start to its end. cpu_s: processor time.
    peak_rss_bytes: largest resident memory of any one of them. others_share: what all other programs had of this
    machine's processor time, 0 to 1. None where the system does not tell."""

    seconds: float
    cpu_s: float | None
    peak_rss_bytes: int | None
    others_share: float | None


def ask(
    module: str,
    question: Mapping[str, Any],
    *,
    timeout_s: float,
    python: str | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[Any, Usage]:
    """The answer of `python -m module IN OUT` to a JSON-able question, and what it took.

    python: the interpreter, this one by default; another environment's sees this package and nothing else of ours.
    env: variables to set. Raises ProcessFailed; after that, after timeout_s and after an interrupt no descendant that
    stayed in the process's group is left.
    """
    with tempfile.TemporaryDirectory(prefix="minibatcher-bench-") as folder:
        asked, told, log = (Path(folder) / name for name in ("question.json", "answer.json", "log.txt"))
        asked.write_text(json.dumps(question), encoding="utf-8")
        command = [python or sys.executable, "-m", module, str(asked), str(told)]
        with log.open("wb") as out:
            status, usage, late = _run(command, _environment(folder, python, env or {}), out, timeout_s)
        last = log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:]
        if late:
            raise ProcessFailed(f"it was stopped after {timeout_s:g} s, the time that it was given", last)
        try:
            answer = json.loads(told.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            lines = last.strip().splitlines()
            raise ProcessFailed(
                f"its process ended with code {status}" + (f": {lines[-1][:300]}" if lines else ""), last
            ) from None
        if "error" in answer:
            raise ProcessFailed(answer["error"], last)
        return answer["answer"], usage


def _environment(folder: str, python: str | None, env: Mapping[str, str]) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    if python is None:
        root = str(PACKAGE.parent)
    else:  # this package alone: beside it may stand libraries that are not made for that interpreter
        root = os.path.join(folder, "path")
        os.mkdir(root)
        try:
            os.symlink(PACKAGE, os.path.join(root, PACKAGE.name), target_is_directory=True)
        except OSError:  # Windows allows links to few
            shutil.copytree(PACKAGE, os.path.join(root, PACKAGE.name))
        path = None
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, path])), **env}


def _run(command: list[str], env: dict[str, str], out, timeout_s: float) -> tuple[int, Usage, bool]:
    """Exit code, usage, and whether it had to be stopped."""
    late = threading.Event()
    busy, begun = _busy_ticks(), time.perf_counter()
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
        )
    except OSError as error:
        raise ProcessFailed(f"can't start {command[0]!r}: {error.strerror or error}") from None

    def stop() -> None:
        late.set()
        _kill_group(child)

    timer = threading.Timer(min(timeout_s, threading.TIMEOUT_MAX), stop)
    timer.daemon = True
    timer.start()
    try:
        status, cpu_s, rss = _wait(child)
    finally:
        timer.cancel()
        _kill_group(child)  # a server that it left behind, or itself after an interrupt
        child.wait()
    seconds = time.perf_counter() - begun
    return status, Usage(seconds, cpu_s, rss, _others_share(busy, _busy_ticks(), cpu_s)), late.is_set()


def _wait(child: subprocess.Popen) -> tuple[int, float | None, int | None]:
    """Exit code, and processor time and peak memory of it and of those descendants that it waited for."""
    if not hasattr(os, "wait4"):
        return child.wait(), None, None
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)  # it is gone: nobody may wait for it again
    unit = 1 if sys.platform == "darwin" else 1024
    return child.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss * unit


def _kill_group(child: subprocess.Popen) -> None:
    """The process and all descendants that did not leave its group."""
    if not hasattr(os, "killpg"):
        child.kill()
        return
    with suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says so in its own way
        os.killpg(child.pid, signal.SIGKILL)


def _busy_ticks() -> tuple[int, int] | None:
    """Ticks that all processors have worked, and all ticks, since the system started; only Linux tells.

    Time that the machine underneath gave to other machines (steal) counts as work: it is not ours.
    """
    try:
        with open("/proc/stat", encoding="ascii") as lines:
            ticks = [int(text) for text in lines.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = ticks[3] + ticks[4] if len(ticks) > 4 else 0
    return (sum(ticks) - idle, sum(ticks)) if ticks else None


def _others_share(before: tuple[int, int] | None, after: tuple[int, int] | None, cpu_s: float | None) -> float | None:
    if before is None or after is None or cpu_s is None or after[1] <= before[1]:
        return None
    own = cpu_s * os.sysconf("SC_CLK_TCK")
    return max(0.0, (after[0] - before[0] - own) / (after[1] - before[1]))
