"""What a benchmarked engine is asked for (Job) and what it gives back (Served), as plain data.

Both cross a process boundary as JSON, and the process may run another environment's interpreter:
this module imports the standard library only.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class JobRequest:
    """One request: its arrival in seconds since the start of the replay, prompt ids, and the
    number of tokens that must come out (end-of-sequence is ignored)."""

    id: str
    arrival_s: float
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Job:
    """One run of one peer: model (a Hugging Face folder), dtype ("float32" or "bfloat16"), number of
    CPU threads, the requests to replay, those to serve before the clock starts, the peer's settings."""

    model: str
    dtype: str
    threads: int
    requests: list[JobRequest]
    warm_up: list[JobRequest] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        data = json.loads(text)
        for name in ("requests", "warm_up"):
            data[name] = [JobRequest(**one) for one in data[name]]
        return cls(**data)


@dataclass(frozen=True)
class Served:
    """What a peer gives back: per request id its output token ids and the second of each, counted
    from the start of the replay; and facts to be written down with the figures.

    Facts that are read by name: "versions" (dict of name to version), "settings" (as they came out),
    "load_s" (seconds to load the model), "ids" (False where the engine tells no token ids, so that
    its outputs cannot be compared), "steps" ([tokens computed, rows, sum of contexts, seconds] each)
    and "notes" (list of sentences). All are optional.
    """

    requests: dict[str, tuple[list[int], list[float]]]
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Served":
        data = json.loads(text)
        requests = {name: (ids, times) for name, (ids, times) in data["requests"].items()}
        return cls(requests=requests, facts=data["facts"])


class Clock:
    """Seconds since start(), by the system's finest steady clock."""

    def __init__(self) -> None:
        self.zero = time.perf_counter()

    def start(self) -> None:
        """Begin the replay: now() counts from here."""
        self.zero = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since start()."""
        return time.perf_counter() - self.zero

    def wait_until(self, seconds: float) -> None:
        """Sleep until ``seconds`` after start(); return at once when that is past."""
        rest = seconds - self.now()
        if rest > 0:
            time.sleep(rest)
