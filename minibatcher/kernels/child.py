"""A section of the kernels' work in a process of its own: `python -m minibatcher.kernels.child NAME SETTINGS`.

A section is a generator of rows (JSON-able dicts). Its process can be given its own environment (compiling needs
TRITON_INTERPRET unset, checking on a CPU needs it set, and triton reads it once), and what goes wrong in it, down to
an illegal memory access that leaves a process's GPU unusable, costs no other section.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import MinibatcherError

Row = dict[str, Any]
SECTIONS = {  # name → the module of this package whose `rows` is the generator
    "check": "check",
    "compile": "compile",
    "bench": "bench",
    "engine": "bench_engine",
    "compare": "compare_engines",
}


INTERRUPTED = 130  # exit code after a Ctrl-C: 128 and the signal's number


class SectionFailed(Exception):
    """The section's process did not come to its end; the message is what it last said. Rows before that are valid."""


class SectionInterrupted(SectionFailed):
    """It had a Ctrl-C, which a terminal sends to all processes at once."""


def run_section(
    name: str,
    settings: Mapping[str, Any],
    *,
    env: Mapping[str, str | None] | None = None,
    timeout_s: float | None = None,
) -> Iterator[Row]:
    """The rows of a section, as they come. settings: keyword arguments of its generator, JSON-able, and stop_after_s,
    after which no row is begun.

    env: variables to set, or to unset with None. Raises MinibatcherError with the sentence of a user's mistake, and
    SectionFailed for everything else that ends the section early, also after timeout_s seconds (SectionInterrupted: it
    had a Ctrl-C).
    """
    root = str(Path(__file__).resolve().parents[2])  # so that it runs from a checkout that is not installed
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    for key, value in (env or {}).items():
        environ.pop(key, None)
        if value is not None:
            environ[key] = value
    command = [sys.executable, "-m", __name__, name, json.dumps(settings)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environ, text=True, encoding="utf-8")
        assert child.stdout is not None  # a pipe was asked for
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(timeout_s or threading.TIMEOUT_MAX, stop)
        timer.daemon = True
        timer.start()
        mistake = None
        try:
            for line in child.stdout:
                event = json.loads(line)
                if "mistake" in event:
                    mistake = event["mistake"]
                else:
                    yield event
            code = child.wait()
        finally:
            timer.cancel()
            child.kill()
            child.wait()
            child.stdout.close()
        if mistake:
            raise MinibatcherError(mistake)
        if late.is_set():
            raise SectionFailed(f"stopped after {timeout_s:.0f} s, the time that it was given")
        if code in (INTERRUPTED, -signal.SIGINT):
            raise SectionInterrupted("interrupted")
        if code:
            log.seek(0)
            lines = [line.strip() for line in log if line.strip()]
            raise SectionFailed(lines[-1][:500] if lines else f"its process ended with code {code}")


def device_is_lost(problem: Exception) -> bool:
    """After such an error, an illegal access for one, a process can't use its GPU any more."""
    return "CUDA error" in str(problem) or "Error [CUDA]" in str(problem)


def failure(problem: Exception, most: int = 300) -> str:
    """What a row says of an error, in `most` characters. Raised on where no later row could be right."""
    if device_is_lost(problem):
        raise problem
    return f"{type(problem).__name__}: {str(problem)[:most]}"


def main(name: str, settings: str) -> int:
    # Rows go out through the pipe; whatever libraries print goes to standard error.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        begun = time.perf_counter()
        options = json.loads(settings)
        stop_after_s = options.pop("stop_after_s", None)
        try:
            for row in importlib.import_module(f".{SECTIONS[name]}", __package__).rows(**options):
                print(json.dumps(row), file=out, flush=True)
                if stop_after_s is not None and time.perf_counter() - begun > stop_after_s:
                    break
        except MinibatcherError as error:
            print(json.dumps({"mistake": str(error)}), file=out, flush=True)
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception:
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
