"""What happened, step by step: one record a step, one record a request. Metrics, plots, labs and grades read only this."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from .errors import WorkloadError

SCHEMA_VERSION = 1


class RowState(str, Enum):
    """What a slot was doing in a step. A slot without a row was idle."""

    PREFILL = "prefill"
    DECODE = "decode"
    STALLED = "stalled"  # running, but given no token in this step
    FINISHED = "finished"  # ended, yet keeps its row until the batch is done: its token is thrown away


class RowRecord(NamedTuple):
    """One slot in one step: `num_tokens` useful tokens computed, `context` tokens in its KV after the step."""

    slot: int
    request_id: str
    state: RowState
    num_tokens: int
    context: int


@dataclass(slots=True)
class StepRecord:
    """One forward pass.

    start, duration: seconds on the engine's clock. width: tokens that each row was padded to, None where ragged.
    num_computed_tokens: all tokens that the device worked on; num_padding_tokens: those of them that were padding (also
    in rows of finished requests). num_waiting: queue depth after admission. wait: why the head of the queue was not let
    in: request_id, reason, need, have. kv_*: blocks of the pool, tokens really in it.
    """

    index: int
    start: float
    duration: float
    rows: list[RowRecord]
    width: int | None
    num_computed_tokens: int
    num_waiting: int
    wait: dict[str, Any] | None
    admitted: list[str]
    finished: list[str]
    preempted: list[str]
    kv_used_blocks: int
    kv_free_blocks: int
    kv_tokens: int

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def num_useful_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_padding_tokens(self) -> int:
        return self.num_computed_tokens - self.num_useful_tokens


@dataclass(slots=True)
class RequestRecord:
    """One request's story. Times are seconds on the engine's clock; `token_times` has one entry per output token."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    finish_time: float | None = None
    finish_reason: str | None = None
    num_preemptions: int = 0
    priority: int = 0
    tenant: str = "default"
    output_token_ids: list[int] = field(default_factory=list)
    output_text: str = ""

    @property
    def output_hash(self) -> str:
        """Sixteen hex digits that stand for the output token ids: equal answers have equal hashes."""
        return hashlib.sha256(" ".join(map(str, self.output_token_ids)).encode()).hexdigest()[:16]


@dataclass
class Timeline:
    """The record of a run.

    clock: "measured" (wall clock) or "simulated" (virtual time); every table and plot says which.
    header: strategy, max_num_seqs, max_num_batched_tokens, block_size, num_blocks, max_model_len, workload, seed, model,
    hardware, software: whatever is needed to redo the run.
    """

    clock: str = "measured"
    header: dict[str, Any] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    requests: dict[str, RequestRecord] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        return self.header["max_num_seqs"]

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last event."""
        if not self.steps:
            return 0.0
        return self.steps[-1].end - min(r.arrival_time for r in self.requests.values())

    def slice(self, first: int, stop: int) -> Timeline:
        """The steps `first:stop` with the requests that appear in them."""
        steps = self.steps[first:stop]
        names = {row.request_id for step in steps for row in step.rows}
        kept = {name: r for name, r in self.requests.items() if name in names}
        return Timeline(self.clock, dict(self.header), steps, kept)

    def waiting_at(self, index: int) -> list[str]:
        """Requests that were in the queue when step `index` ran, in order of arrival."""
        step = self.steps[index]
        holding = {row.request_id for row in step.rows}
        return [
            r.request_id
            for r in sorted(self.requests.values(), key=lambda r: r.arrival_time)
            if r.arrival_time <= step.start
            and r.request_id not in holding
            and (r.finish_time is None or r.finish_time > step.start)
        ]

    def save(self, path: str | Path) -> None:
        """Write JSON, by way of a temporary file, so that an interrupted save leaves the old file whole."""
        data = {
            "schema": "minibatcher.timeline",
            "schema_version": SCHEMA_VERSION,
            "clock": self.clock,
            "header": self.header,
            "steps": [asdict(step) for step in self.steps],
            "requests": [asdict(r) | {"output_hash": r.output_hash} for r in self.requests.values()],
        }
        path = Path(path)
        temporary = path.with_name(path.name + ".partial")
        temporary.write_text(json.dumps(data, ensure_ascii=False, allow_nan=False), encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read what `save` wrote. Raises WorkloadError with what is wrong with the file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise WorkloadError(f"can't read the timeline {path}: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != "minibatcher.timeline":
            raise WorkloadError(f'{path} is not a minibatcher timeline (no "schema": "minibatcher.timeline")')
        if data.get("schema_version") != SCHEMA_VERSION:
            raise WorkloadError(
                f"{path} has timeline schema version {data.get('schema_version')!r}; this minibatcher reads version {SCHEMA_VERSION}"
            )
        try:
            steps = [StepRecord(**(step | {"rows": _rows(step["rows"])})) for step in data["steps"]]
            requests = [RequestRecord(**{k: v for k, v in r.items() if k != "output_hash"}) for r in data["requests"]]
        except (KeyError, TypeError, ValueError) as error:
            raise WorkloadError(f"{path} is a damaged timeline: {error}") from error
        return cls(data["clock"], data["header"], steps, {r.request_id: r for r in requests})


def _rows(rows: Iterable[list]) -> list[RowRecord]:
    return [RowRecord(slot, name, RowState(state), n, context) for slot, name, state, n, context in rows]
