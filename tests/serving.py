"""`minibatcher serve` in a process of its own, for tests that talk to it from outside, and what its /metrics say.

    with running_server("--max-num-seqs", "4") as url:
        ...

A test fails if its server is slow to start, prints more than one line, leaves a traceback or does not exit with 0.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LISTENS = re.compile(r"minibatcher serves .+ at (http://\S+)/v1 \(Ctrl-C stops\)\n")
START_S, STOP_S, PATIENCE_S = 120, 60, 30  # generous: other tests may have the machine's cores
# Signs of a failure that nobody has dealt with.
TROUBLE = ("Traceback", "never retrieved", "never awaited", "Task was destroyed")


def needed(package: str, reason: str | None = None):
    """The package; without it the test is skipped, but not in continuous integration, where a skip would go unseen."""
    if os.environ.get("CI"):
        return importlib.import_module(package)
    return pytest.importorskip(package, reason=reason)


@dataclass(frozen=True)
class Server:
    """A server that listens. url: http://127.0.0.1:PORT."""

    url: str
    process: subprocess.Popen

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


@contextmanager
def started_server(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server with these arguments, ended with SIGTERM. env: variables beside those of this process."""
    command = [sys.executable, "-m", "minibatcher", "serve", "--port", "0", *arguments]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | (env or {})
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=log, encoding="utf-8"
        )
        try:
            said = _first_line(process)
            listens = LISTENS.fullmatch(said)
            assert listens, f"the server said {said!r} and wrote:\n{_text(log)}"
            yield Server(listens[1], process)
        except BaseException:
            process.kill()
            process.communicate()
            print(f"the server wrote:\n{_text(log)}", file=sys.stderr)  # pytest shows it beside the failure
            raise
        process.send_signal(signal.SIGTERM)
        try:
            more, _ = process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise AssertionError(
                f"the server has not ended {STOP_S} s after SIGTERM; it wrote:\n{_text(log)}"
            ) from None
        written = _text(log)
        assert process.returncode == 0, f"the server ended with {process.returncode} and wrote:\n{written}"
        assert not more, f"beside its one line the server printed {more!r}"
        assert not any(sign in written for sign in TROUBLE), f"something failed in the server:\n{written}"


@contextmanager
def running_server(*arguments: str, env: dict[str, str] | None = None) -> Iterator[str]:
    """The base URL, http://127.0.0.1:PORT, of a server with these arguments."""
    with started_server(*arguments, env=env) as server:
        yield server.url


def _first_line(process: subprocess.Popen) -> str:
    """What it prints when it listens; empty if it ends first, or takes too long and so is killed."""
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()


def _text(file) -> str:
    file.seek(0)
    return file.read()


class Metrics:
    """What /metrics says at one moment: `metrics("vllm:request_success_total", finished_reason="stop")`."""

    def __init__(self, url: str) -> None:
        parser = importlib.import_module("prometheus_client.parser")
        with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
            text = answer.read().decode("utf-8")
        self.samples = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name with these labels; LookupError if there is none."""
        values = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        if not values:
            raise LookupError(f"no sample {name} with {labels}; there are {sorted({s.name for s in self.samples})}")
        return sum(values)

    @property
    def in_use(self) -> dict[str, float]:
        """What somebody must be there for: requests that run, that wait, and blocks in use as a share of the pool."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return {name: self(f"vllm:{name}") for name in names}

    @property
    def ends(self) -> dict[str, float]:
        """How many requests have ended, by reason; reasons that nobody had are left out."""
        ends: Counter[str] = Counter()
        for sample in self.samples:
            if sample.name == "vllm:request_success_total":
                ends[sample.labels["finished_reason"]] += sample.value
        return dict(+ends)


def wait_until(true: Callable[[], bool], what: str, instead: Callable[[], str] = str) -> None:
    """Look again and again; AssertionError if it does not come true. instead: says what is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"after {PATIENCE_S} s still not: {what}; {instead()}"
        time.sleep(0.05)


def check_nothing_in_use(url: str, ends: dict[str, float] | None = None) -> Metrics:
    """Within a while nobody runs or waits and no block is in use; returns what /metrics say then.

    ends: so many requests have ended by then, by reason, and no more. (An end is counted once its client was told.)
    """
    seen: list[Metrics] = []

    def quiet() -> bool:
        seen.append(Metrics(url))
        return not any(seen[-1].in_use.values()) and ends in (None, seen[-1].ends)

    wait_until(quiet, f"nothing left in use and ended {ends}", lambda: f"{seen[-1].in_use}, ended {seen[-1].ends}")
    return seen[-1]
