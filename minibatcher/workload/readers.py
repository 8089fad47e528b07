"""Read workloads from files; the format is recognised by what stands in the file, not by its name."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import WorkloadError
from .base import TOKENS_PER_HASH, Workload, WorkloadRequest

CountTokens = Callable[[str], int]
Record = tuple[str, dict[str, Any]]  # where it stands ("line 3"), and the object itself

FORMATS = (
    "an Azure LLM trace (CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens), a Mooncake trace (JSON lines "
    "with timestamp, input_length, output_length), ShareGPT (JSON list of objects with conversations), a unit-rate "
    "trace (one JSON object whose requests have prompt_tokens, max_new_tokens, arrival_unit), or JSON lines with "
    "prompt_tokens and/or prompt, output_tokens, arrival_time"
)
FILE_FORMATS = ("azure", "mooncake", "sharegpt")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_OWN_KEYS = set(WorkloadRequest.__slots__)
DAY_S = 86_400.0


def read_workload(
    path: str | Path, *, count_tokens: CountTokens | None = None, file_format: str | None = None
) -> Workload:
    """Read every request of a file. `count_tokens` gives the length in tokens of texts that come without one.
    `file_format` is one of FILE_FORMATS where it shall be no other; None recognises it.

    Raises `WorkloadError` with the line and what was expected there. Nothing is skipped but ShareGPT conversations in
    which no human speaks, and the notes count those. Where the first request arrives after more than a day (times since
    1970, say), it is shifted to 0 and the others with it, and the notes say so. U+FFFD takes the place of halves of
    surrogate pairs, which are no characters.
    """
    path = Path(path)
    text = _read_text(path)
    first = text.lstrip()[:1]
    if not first:
        raise WorkloadError(f"The workload file {path} is empty; expected {FORMATS}.")
    if file_format == "azure" or first not in "{[":
        if file_format not in (None, "azure"):
            raise WorkloadError(f"{path} holds no JSON, as a {file_format} file would; it begins with {text[:40]!r}.")
        return _read_azure(path, text)
    listed = _listed_requests(text) if first == "{" else None
    if listed is not None:
        records = list(_listed(path, listed))
    elif first == "{":
        records = list(_json_lines(path, text))
    else:
        records = list(_json_list(path, text))

    if not records:
        raise WorkloadError(f"The workload file {path} holds no requests; expected {FORMATS}.")
    header: dict[str, Any] = {}
    if "workload" in records[0][1]:
        where, header = records.pop(0)
        if not isinstance(header.get("notes", []), list):
            raise WorkloadError(f"{path}, {where}: notes must be a list of texts, not {reprlib.repr(header['notes'])}.")
    read = _own if not records else _READERS[file_format] if file_format else _reader_for(path, records[0])
    requests: list[WorkloadRequest] = []
    for index, (where, record) in enumerate(records):
        try:
            request = read(index, record, count_tokens)
            if request is not None:
                requests.append(request)
        except WorkloadError as error:
            raise WorkloadError(f"{path}, {where}: {error}") from None
    notes = tuple(str(note) for note in header.get("notes", ()))
    if read is _sharegpt:
        if len({r.request_id for r in requests}) < len(requests):  # merged ShareGPT files repeat ids
            requests = [replace(r, request_id=f"r{i}") for i, r in enumerate(requests)]
        if len(requests) < len(records):
            notes = (f"{len(records) - len(requests):,} conversations without a human turn left out",)
    kinds: dict[Any, str] = {_mooncake: "Mooncake trace", _sharegpt: "ShareGPT conversations"}
    kind = (kinds | {_unit_rate: "Unit-rate trace"}).get(read, "Requests")
    source = str(header.get("source", f"{kind} read from {path.name}."))
    return _workload(path, requests, name=str(header.get("workload", path.stem)), source=source, notes=notes)


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise WorkloadError(f"There is no workload file {path}.") from None
    except OSError as error:
        raise WorkloadError(f"The workload file {path} cannot be read: {error.strerror}.") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise WorkloadError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8. Save the file as UTF-8 text."
        ) from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # not splitlines(): that also cuts at characters such as U+2028, which may stand inside JSON strings
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _parse(path: Path, text: str, line: int, expected: str) -> Any:
    try:
        value = json.loads(text)
        return _characters(value) if re.search(r"\\u[dD][89a-fA-F]", text) else value
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1
        raise WorkloadError(
            f"{path}, line {at}: not complete JSON ({error.msg} at column {error.colno}); expected {expected}. "
            "The file may be half-written."
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or nesting without end
        raise WorkloadError(f"{path}, line {line}: not readable as JSON ({error}); expected {expected}.") from None


def _characters(value: Any) -> Any:
    """A parsed JSON value with U+FFFD for each lone surrogate, which no file, terminal or tokenizer takes."""
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_characters(item) for item in value]
    if isinstance(value, dict):
        return {_characters(key): _characters(item) for key, item in value.items()}
    return value


def _json_lines(path: Path, text: str) -> Iterator[Record]:
    for number, line in _lines(text):
        expected = "one JSON object a line"
        record = _parse(path, line, number, expected)
        if not isinstance(record, dict):
            raise WorkloadError(f"{path}, line {number}: expected {expected}, not {line[:40]!r}.")
        yield f"line {number}", record


def _listed_requests(text: str) -> Any:
    """What stands under "requests" where the whole file is one JSON object with that key, else None."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):  # JSON lines are no JSON as a whole; what is damaged is told by their reader
        return None
    return whole.get("requests") if isinstance(whole, dict) else None


def _listed(path: Path, requests: Any) -> Iterator[Record]:
    if not isinstance(requests, list):
        raise WorkloadError(f"{path}: requests must be a list of objects, not {reprlib.repr(requests)}.")
    for number, record in enumerate(requests, start=1):
        if not isinstance(record, dict):
            raise WorkloadError(f"{path}, request {number}: expected an object, not {reprlib.repr(record)}.")
        yield f"request {number}", _characters(record)


def _json_list(path: Path, text: str) -> Iterator[Record]:
    for number, record in enumerate(_parse(path, text, 1, "a JSON list of objects"), start=1):
        if not isinstance(record, dict):
            raise WorkloadError(f"{path}, item {number}: expected an object, not {str(record)[:40]!r}.")
        yield f"item {number}", record


def _reader_for(path: Path, first: Record) -> Callable[[int, dict, CountTokens | None], WorkloadRequest | None]:
    where, record = first
    if "conversations" in record:
        return _sharegpt
    if "input_length" in record or "timestamp" in record:
        return _mooncake
    if "max_new_tokens" in record or "arrival_unit" in record:
        return _unit_rate
    if record.keys() & {"prompt", "prompt_tokens"}:
        return _own
    keys = ", ".join(map(repr, record)) or "none"
    raise WorkloadError(f"{path}, {where}: format not recognised (keys: {keys}); expected {FORMATS}.")


def _mooncake(index: int, record: dict[str, Any], _: CountTokens | None) -> WorkloadRequest:
    timestamp = _number(_need(record, "timestamp", "milliseconds"), "timestamp")
    return WorkloadRequest(
        f"r{index}",
        timestamp / 1000,
        _whole(_need(record, "input_length", "tokens"), "input_length"),
        _whole(_need(record, "output_length", "tokens"), "output_length"),
        prefix_hashes=_hashes(record.get("hash_ids", []), "hash_ids"),
    )


def _sharegpt(index: int, record: dict[str, Any], count_tokens: CountTokens | None) -> WorkloadRequest | None:
    """Prompt: the first human turn. Output length: that of the answer after it, when tokens can be counted."""
    turns = _need(record, "conversations", "a list of turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise WorkloadError("conversations must be a list of objects with from and value.")
    if not all(isinstance(turn.get("value"), str) for turn in turns):
        raise WorkloadError("each turn in conversations needs a value that is text.")
    human = next((i for i, t in enumerate(turns) if t.get("from") in ("human", "user") and t["value"]), None)
    if human is None:
        return None
    prompt, answers = turns[human]["value"], turns[human + 1 : human + 2]
    answered = answers and answers[0].get("from") in ("gpt", "assistant") and answers[0]["value"]
    output_tokens = count_tokens(answers[0]["value"]) if count_tokens and answered else None
    prompt_tokens = count_tokens(prompt) if count_tokens else None
    return WorkloadRequest(str(record.get("id", f"r{index}")), 0.0, prompt_tokens, output_tokens, prompt)


def _unit_rate(index: int, record: dict[str, Any], _: CountTokens | None) -> WorkloadRequest:
    """arrival_unit: at one request a second, so a rate is set by dividing (Workload.at_rate)."""
    return WorkloadRequest(
        str(record.get("id", f"r{index}")),
        _number(_need(record, "arrival_unit", "seconds at one request a second"), "arrival_unit"),
        _whole(_need(record, "prompt_tokens", "tokens"), "prompt_tokens"),
        _whole(_need(record, "max_new_tokens", "tokens"), "max_new_tokens"),
    )


def _own(index: int, record: dict[str, Any], count_tokens: CountTokens | None) -> WorkloadRequest:
    unknown = record.keys() - _OWN_KEYS
    if unknown:
        raise WorkloadError(f"unknown key {min(unknown)!r}; known: {', '.join(sorted(_OWN_KEYS))}.")
    prompt, prompt_tokens = record.get("prompt"), record.get("prompt_tokens")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise WorkloadError(f"prompt must be a non-empty text, not {reprlib.repr(prompt)}.")
    if prompt_tokens is not None:
        prompt_tokens = _whole(prompt_tokens, "prompt_tokens")
    elif prompt is not None and count_tokens:
        prompt_tokens = count_tokens(prompt)
    output_tokens = record.get("output_tokens")
    return WorkloadRequest(
        str(record.get("request_id", f"r{index}")),
        _number(record.get("arrival_time", 0.0), "arrival_time"),
        prompt_tokens,
        None if output_tokens is None else _whole(output_tokens, "output_tokens"),
        prompt,
        record.get("tenant", "default"),
        _whole(record.get("priority", 0), "priority"),
        _hashes(record.get("prefix_hashes", []), "prefix_hashes"),
        _whole(record.get("tokens_per_hash", TOKENS_PER_HASH), "tokens_per_hash"),
    )


_READERS = {"mooncake": _mooncake, "sharegpt": _sharegpt}


def _read_azure(path: Path, text: str) -> Workload:
    rows = _lines(text)
    number, line = next(rows)
    columns = [name.strip() for name in line.split(",")]
    if not set(AZURE_COLUMNS) <= set(columns):
        raise WorkloadError(f"{path}, line {number}: format not recognised ({line[:60]!r}); expected {FORMATS}.")
    time_at, prompt_at, output_at = (columns.index(name) for name in AZURE_COLUMNS)
    requests: list[WorkloadRequest] = []
    start: datetime | None = None
    for number, line in rows:
        fields = [field.strip() for field in line.split(",")]
        try:
            if len(fields) != len(columns):
                raise WorkloadError(
                    f"{len(fields)} of {len(columns)} values ({line[:60]!r}); expected {', '.join(columns)}. "
                    "The file may be half-written."
                )
            second, fraction = _timestamp(fields[time_at])
            start = start or second
            arrival = (second - start).total_seconds() + fraction
            if arrival < 0:
                raise WorkloadError(f"TIMESTAMP {fields[time_at]!r} is earlier than the first; expected them in order.")
            prompt, output = (_digits(fields[at], columns[at]) for at in (prompt_at, output_at))
            requests.append(WorkloadRequest(f"r{len(requests)}", arrival, prompt, output))
        except WorkloadError as error:
            raise WorkloadError(f"{path}, line {number}: {error}") from None
    if not requests:
        raise WorkloadError(f"The workload file {path} holds no requests, only its header.")
    first = min(request.arrival_time for request in requests)
    requests = [replace(request, arrival_time=request.arrival_time - first) for request in requests]
    return _workload(path, requests, name=path.stem, source=f"Azure LLM inference trace read from {path.name}.")


def _timestamp(text: str) -> tuple[datetime, float]:
    """Whole seconds and the fraction, kept apart: the traces have seven decimals, datetime has six."""
    match = _TIMESTAMP.fullmatch(text)
    try:
        if match:
            day, clock, fraction, zone = match.groups()
            zone = "+00:00" if zone in (None, "Z") else zone
            return datetime.fromisoformat(f"{day}T{clock}{zone}"), float(fraction or 0)
    except ValueError:
        pass
    raise WorkloadError(f"TIMESTAMP must look like 2023-11-16 18:17:03.9799600, not {text!r}.")


def _workload(
    path: Path, requests: list[WorkloadRequest], *, name: str, source: str, notes: tuple[str, ...] = ()
) -> Workload:
    start = min((r.arrival_time for r in requests), default=0.0)
    if start > DAY_S:
        requests = [replace(r, arrival_time=r.arrival_time - start) for r in requests]
        notes = (*notes, f"arrivals shifted by {start:,.0f} s, so that the first is at 0")
    try:
        return Workload(_characters(name), tuple(requests), _characters(source), notes)
    except WorkloadError as error:
        raise WorkloadError(f"{path}: {error}") from None


def _need(record: dict[str, Any], key: str, unit: str) -> Any:
    if key not in record:
        raise WorkloadError(f"{key} ({unit}) is missing; the keys here are {', '.join(map(repr, record)) or 'none'}.")
    return record[key]


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise WorkloadError(f"{key} must be a number, not {reprlib.repr(value)}.")
    try:
        return float(value)
    except OverflowError:
        raise WorkloadError(f"{key} must be a finite number, not {str(value)[:20]}….") from None


def _whole(value: Any, key: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise WorkloadError(f"{key} must be a whole number, not {reprlib.repr(value)}.")
    return value


def _digits(text: str, column: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise WorkloadError(f"{column} must be a whole number, not {text[:40]!r}.")
    return int(text)


def _hashes(value: Any, key: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise WorkloadError(f"{key} must be a list of whole numbers, one for each piece of the prompt.")
    return tuple(value)
