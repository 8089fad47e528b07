"""What happened: one record a step, one record a request. Metrics, plots, labs and grades read only this."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from .errors import WorkloadError

SCHEMA_VERSION = 1
CLOCKS = ("measured", "simulated")
LONGEST_S, LARGEST_COUNT = 1e12, 2**53 - 1  # beyond them a file is damaged, and arithmetic overflows
HEADER_TEXTS = ("strategy", "source", "kv_layout", "preemption", "admission", "ordering", "model")
HEADER_COUNTS = ("max_num_seqs", "block_size", "num_blocks")


class RowState(str, Enum):
    """What a slot was doing in a step. A slot without a row was idle."""

    PREFILL = "prefill"
    DECODE = "decode"
    STALLED = "stalled"  # running, but given no token in this step
    FINISHED = "finished"  # ended, yet keeps its row until the batch is done: its token is thrown away

    __hash__ = str.__hash__  # Enum's own is written in Python, and slow for millions of rows


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
    in: request_id, reason, need, have. kv_*: blocks of the pool (used + free + cached: those that hold prefixes and
    belong to nobody), tokens really in the used ones, each counted once however many requests share it.
    num_swapped_blocks: blocks copied to host memory or back before anything is computed.
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
    kv_cached_blocks: int = 0
    num_swapped_blocks: int = 0

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole pool."""
        return self.kv_used_blocks + self.kv_free_blocks + self.kv_cached_blocks

    @property
    def num_useful_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_padding_tokens(self) -> int:
        return self.num_computed_tokens - self.num_useful_tokens


def output_hash(token_ids: list[int]) -> str:
    """Sixteen hex digits that stand for the output token ids: equal answers have equal hashes."""
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()[:16]


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
    num_cached_tokens: int = 0
    num_lost_tokens: int = 0
    error: str | None = None

    @property
    def has_token_ids(self) -> bool:
        """False where tokens came, but nobody told which: a server's answer may be text alone."""
        return bool(self.output_token_ids) or not self.token_times

    @property
    def output_hash(self) -> str | None:
        """None without token ids."""
        return output_hash(self.output_token_ids) if self.has_token_ids else None


class DeviceSample(NamedTuple):
    """What the GPU said of itself at a moment of a run; None where it does not tell.

    time: seconds on the engine's clock. utilisation: as nvidia-smi shows it, the share (0 to 1) of the driver's last
    sampling period in which at least one kernel ran. memory_bytes: memory in use on the device, whoever uses it.
    power_w: power drawn, in watts.
    """

    time: float
    utilisation: float | None
    memory_bytes: int | None
    power_w: float | None


@dataclass(repr=False)
class Timeline:
    """The record of a run.

    clock: "measured" (wall clock) or "simulated" (virtual time); every table and plot says which.
    header: strategy, max_num_seqs, max_num_batched_tokens, block_size, num_blocks, max_model_len, workload, seed,
    model, hardware, software: whatever is needed to redo the run.
    device_samples: in order of time; empty where no GPU was watched.
    """

    clock: str = "measured"
    header: dict[str, Any] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    requests: dict[str, RequestRecord] = field(default_factory=dict)
    device_samples: list[DeviceSample] = field(default_factory=list)

    def __repr__(self) -> str:
        what = f"{self.header.get('strategy')}, {self.clock}"
        return f"<Timeline: {what}, {len(self.steps):,} steps, {len(self.requests):,} requests, {self.duration:.4g} s>"

    @property
    def num_slots(self) -> int:
        """0 where nobody knows it (`at_client`)."""
        return self.header.get("max_num_seqs", 0) if self.at_client else self.header["max_num_seqs"]

    @property
    def at_client(self) -> bool:
        """A replay against some server: seen from outside, so that steps, slots and KV memory are not known."""
        return self.header.get("source") == "replay"

    @property
    def span(self) -> tuple[float, float]:
        """Start and end in seconds: first arrival and last event of a whole run, first and last step of a slice."""
        if self.steps and "slice" in self.header:
            return self.steps[0].start, self.steps[-1].end
        arrivals = [r.arrival_time for r in self.requests.values()]
        ends = [r.finish_time for r in self.requests.values() if r.finish_time is not None]
        start = min(arrivals, default=self.steps[0].start if self.steps else 0.0)
        return start, max([start, *ends, *(step.end for step in self.steps[-1:])])

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last event; of a slice, from its first step to its last."""
        start, end = self.span
        return end - start

    def slice(self, first: int, stop: int) -> Timeline:
        """The steps `first:stop`, the requests that ran or waited in them (whole records), the samples of their time.

        `header["slice"]` notes the indices of the first and the last step.
        """
        steps = self.steps[first:stop]
        if not steps:
            return Timeline(self.clock, dict(self.header))
        names = {row.request_id for step in steps for row in step.rows}
        kept = {
            name: r
            for name, r in self.requests.items()
            if name in names
            or (r.arrival_time <= steps[-1].start and (r.finish_time is None or r.finish_time > steps[0].start))
        }
        samples = [sample for sample in self.device_samples if steps[0].start <= sample.time <= steps[-1].end]
        return Timeline(self.clock, self.header | {"slice": [steps[0].index, steps[-1].index]}, steps, kept, samples)

    def waiting_at(self, position: int) -> list[str]:
        """Requests that were in the queue when `steps[position]` ran, in order of arrival."""
        step = self.steps[position]
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
        path = Path(path)
        temporary = path.with_name(path.name + ".partial")
        temporary.write_text(json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False), encoding="utf-8")
        temporary.replace(path)

    def to_json(self) -> dict[str, Any]:
        """What `save` writes, as dicts and lists; they share what the timeline holds."""
        return {
            "schema": "minibatcher.timeline",
            "schema_version": SCHEMA_VERSION,
            "clock": self.clock,
            "header": self.header,
            "steps": [_plain(step) for step in self.steps],
            "requests": [_plain(r) | {"output_hash": r.output_hash} for r in self.requests.values()],
            "device_samples": self.device_samples,
        }

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read what `save` wrote. Raises WorkloadError with what is wrong with the file."""
        try:
            data = parse(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise WorkloadError(f"can't read the timeline {path}: {error}") from error
        return cls.from_json(data, str(path))

    @classmethod
    def from_json(cls, data: Any, path: str) -> Timeline:
        """From what `to_json` made. path: how the sentence calls it. Raises WorkloadError."""
        if not isinstance(data, dict) or data.get("schema") != "minibatcher.timeline":
            raise WorkloadError(f'{path} is not a minibatcher timeline (no "schema": "minibatcher.timeline")')
        if data.get("schema_version") != SCHEMA_VERSION:
            raise WorkloadError(
                f"{path} has timeline schema version {data.get('schema_version')!r}; "
                f"this minibatcher reads version {SCHEMA_VERSION}"
            )
        try:
            return cls._from_plain(data)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise WorkloadError(f"{path} is a damaged timeline: {what}; record the run again") from error

    @classmethod
    def _from_plain(cls, data: dict[str, Any]) -> Timeline:
        """Build from parsed JSON. Raises LookupError, TypeError, ValueError or AttributeError where it is damaged."""
        clock, header = data["clock"], data["header"]
        if clock not in CLOCKS:
            raise ValueError(f"clock must be one of {', '.join(CLOCKS)}, not {clock!r}")
        _require_header(header)
        slots = 0 if header.get("source") == "replay" else header["max_num_seqs"]
        if not isinstance(slots, int) or slots < (header.get("source") != "replay"):
            raise ValueError(f"max_num_seqs must be a whole number of at least 1, not {slots!r}")
        requests = {}
        for position, plain in enumerate(data["requests"]):
            with _naming(f"request {position}"):
                record = RequestRecord(**{k: v for k, v in plain.items() if k != "output_hash"})
                times = [record.arrival_time, *record.token_times]
                times += [t for t in (record.first_scheduled_time, record.finish_time) if t is not None]
                counts = [record.num_prompt_tokens, record.num_output_tokens, *record.output_token_ids]
                counts += [record.num_preemptions, record.num_cached_tokens, record.num_lost_tokens]
                _require_numbers(times, counts)
                _require_texts(record.request_id, record.tenant, record.output_text)
                _require_texts(*(text for text in (record.finish_reason, record.error) if text is not None))
                if type(record.priority) is not int:
                    raise ValueError(f"priority must be a whole number, not {record.priority!r}")
                if record.output_hash != plain.get("output_hash", record.output_hash):
                    raise ValueError(f"output_hash {plain['output_hash']!r} does not belong to its output_token_ids")
            requests[record.request_id] = record
        steps = []
        for position, plain in enumerate(data["steps"]):
            with _naming(f"step {position}"):
                rows = [RowRecord(slot, name, RowState(state), *counts) for slot, name, state, *counts in plain["rows"]]
                step = StepRecord(**(plain | {"rows": rows}))
                counts = [step.num_computed_tokens, step.num_waiting, step.kv_used_blocks, step.kv_free_blocks]
                counts += [step.kv_tokens, step.kv_cached_blocks, step.num_swapped_blocks, step.index]
                counts += [] if step.width is None else [step.width]
                counts += [n for row in rows for n in (row.slot, row.num_tokens, row.context)]
                _require_numbers([step.start, step.duration], counts)
                for names in (step.admitted, step.finished, step.preempted):
                    _require_list_of_texts(names)
                for row in rows:
                    if row.slot >= slots:
                        raise ValueError(f"slot {row.slot}, but max_num_seqs is {slots}")
                    if row.request_id not in requests:
                        raise ValueError(f"request {row.request_id!r} has no record")
            steps.append(step)
        samples = []
        for position, plain in enumerate(data.get("device_samples", [])):  # absent from files older than the samples
            with _naming(f"device sample {position}"):
                time, utilisation, memory_bytes, power_w = plain
                told = [value for value in (utilisation, power_w) if value is not None]
                _require_numbers([time, *told], [] if memory_bytes is None else [memory_bytes])
                if utilisation is not None and not 0 <= utilisation <= 1:
                    raise ValueError(f"utilisation must be a share between 0 and 1, not {utilisation!r}")
            samples.append(DeviceSample(time, utilisation, memory_bytes, power_w))
        return cls(clock, header, steps, requests, samples)


def _plain(record: StepRecord | RequestRecord) -> dict[str, Any]:
    """Its fields, not copied: `dataclasses.asdict` copies every row, which takes minutes for millions of steps."""
    return {f.name: getattr(record, f.name) for f in fields(record)}


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Put `where` before the message of an error in a damaged record."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{where}: {what.replace('RequestRecord.__init__() ', '').replace('StepRecord.__init__() ', '')}"
        ) from error


def parse(text: str) -> Any:
    """JSON as `save` writes it. Raises ValueError, also for NaN and infinities, which Python's reader lets through."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def _require_numbers(times: list[float], counts: list[int]) -> None:
    for value in times:
        if type(value) not in (int, float) or not abs(value) <= LONGEST_S:
            raise ValueError(f"a time must be a number of seconds, not {_shown(value)}")
    for value in counts:
        if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
            raise ValueError(f"a count must be a whole number of at least 0, not {_shown(value)}")


def _require_texts(*values: Any) -> None:
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"a name, reason or answer must be a text, not {_shown(value)}")


def _require_list_of_texts(values: Any) -> None:
    if not isinstance(values, list):
        raise ValueError(f"names and sentences must be a list, not {_shown(values)}")
    _require_texts(*values)


def _require_header(header: dict[str, Any]) -> None:
    """What tables and notes reckon with; all else is only shown."""
    told = {key: value for key, value in header.items() if value is not None}
    _require_texts(*(told[key] for key in HEADER_TEXTS if key in told))
    _require_numbers([], [told[key] for key in HEADER_COUNTS if key in told])
    _require_list_of_texts(told.get("client_notes", []))
    if not isinstance(told.get("server", {}), dict):
        raise ValueError(f"server must be an object, not {_shown(told['server'])}")
    if header.get("source") != "replay":
        _require_numbers([], [header[key] for key in HEADER_COUNTS if key in header])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
