"""A measured run: what a server was asked, how it was set up, and when each request got its tokens."""

from __future__ import annotations

import bisect
import csv
import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import WorkloadError
from ..runners.roofline import StepWork
from ..scheduling import SchedulerConfig
from ..timeline import Timeline
from ..utilisation import work_of

DTYPES = {"torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.float32": "float32"}


@dataclass(frozen=True)
class MeasuredRequest:
    """One request. Times are seconds from the first arrival of the run; None for a token that never came."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    arrival_time: float
    first_token_time: float | None
    last_token_time: float | None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token, queue time included."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Seconds from first to last token / (tokens - 1); None with fewer than two tokens."""
        if self.first_token_time is None or self.last_token_time is None or self.output_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.output_tokens - 1)


@dataclass(frozen=True)
class MeasuredStep:
    """One forward pass of our own engine: what it computed, when it began, and seconds until the engine could go on."""

    start: float
    seconds: float
    work: StepWork


@dataclass(frozen=True)
class MeasuredSecond:
    """A short interval of a server's run as it logged it: tokens prefilled and generated, and the state at its end.

    end: seconds from the first arrival, to within the log's own lag. num_first_steps: steps that finished a prompt.
    """

    end: float
    seconds: float
    prompt_tokens: float
    output_tokens: float
    num_running: float
    kv_tokens: float
    num_first_steps: int


@dataclass(frozen=True)
class MeasuredRun:
    """A run as far as a calibration needs it.

    engine: "vllm" or "minibatcher". config: the scheduler's knobs. num_blocks, block_size: the KV pool. model, device:
    names as the run gives them. on_cpu: it ran without an accelerator. steps: measured step by step, for runs of our
    own engine only; log: a server's own. async_scheduling, whole_prompt_must_fit, reuses_blocks: see `VllmScheduler`.
    """

    name: str
    engine: str
    strategy: str
    requests: tuple[MeasuredRequest, ...]
    config: SchedulerConfig
    num_blocks: int
    block_size: int
    model: str
    device: str
    dtype: str
    source: str
    num_gpus: int = 1
    on_cpu: bool = False
    steps: tuple[MeasuredStep, ...] = ()
    log: tuple[MeasuredSecond, ...] = ()
    async_scheduling: bool = False
    whole_prompt_must_fit: bool = False
    reuses_blocks: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last token."""
        return max(r.last_token_time for r in self.requests if r.last_token_time is not None)


def load_runs(path: str | Path) -> list[MeasuredRun]:
    """Measured runs of one machine and model: a folder with a vLLM run (meta.json, requests.jsonl), a timeline of
    `minibatcher compare --timeline`, or the folder with the timelines of all its strategies.

    Raises WorkloadError, which says what is missing or damaged.
    """
    path = Path(path)
    if path.is_file():
        return [_from_timeline(Timeline.load(path), path)]
    if not path.is_dir():
        raise WorkloadError(f"there is no measured run at {path}; give a folder with requests.jsonl or a timeline JSON")
    timelines = sorted(path.glob("*.json"))
    if (path / "requests.jsonl").exists() or not timelines:
        return [_load_vllm(path)]
    return [_from_timeline(Timeline.load(file), file) for file in timelines]


def load_run(path: str | Path) -> MeasuredRun:
    """The one run at this path; see `load_runs`. Raises WorkloadError if there are several."""
    runs = load_runs(path)
    if len(runs) > 1:
        raise WorkloadError(f"{path} holds {len(runs)} timelines; name one of them")
    return runs[0]


def _load_vllm(folder: Path) -> MeasuredRun:
    meta = _json(folder / "meta.json")
    rows = _rows(folder / "requests.jsonl")
    try:
        engine, cache = meta["engine_kwargs"], meta["kv_cache"]
        resolved = meta.get("resolved_config", {})
        scheduler = resolved.get("scheduler_config", {})
        if engine.get("data_parallel_size", 1) > 1:
            raise WorkloadError(
                f"{folder} ran {engine['data_parallel_size']} engines side by side; calibrate on a run of one"
            )
        if resolved.get("parallel_config", {}).get("is_moe_model"):
            raise WorkloadError(f"{folder} ran a mixture of experts; the cost model knows dense models only")
        if not scheduler.get("enable_chunked_prefill", True):
            raise WorkloadError(f"{folder} ran without chunked prefill; only runs with it can be replayed")
        model_config = resolved.get("model_config", {})
        dtype = str(model_config.get("dtype", engine.get("dtype", "bfloat16")))
        # Two clocks: arrivals are wall-clock, the rest is monotonic. The quickest hand-over took almost no time.
        offset = min(row["queued_ts"] - row["arrival_time"] for row in rows)
        zero = min(row["arrival_time"] for row in rows)
        requests = [
            MeasuredRequest(
                str(row["request_id"]),
                row["input_toks"],
                row["output_toks"],
                row["arrival_time"] - zero,
                row["first_token_ts"] - offset - zero,
                row["last_token_ts"] - offset - zero,
            )
            for row in rows
        ]
        return MeasuredRun(
            name=folder.resolve().name,
            engine="vllm",
            strategy="chunked",
            requests=tuple(sorted(requests, key=lambda r: r.arrival_time)),
            config=SchedulerConfig(
                max_num_seqs=scheduler.get("max_num_seqs", engine["max_num_seqs"]),
                max_num_batched_tokens=scheduler.get("max_num_batched_tokens", engine["max_num_batched_tokens"]),
            ),
            num_blocks=cache["num_gpu_blocks"] - 1,  # vLLM keeps one block as a null block
            block_size=cache["block_size"],
            model=meta["model"],
            device=meta.get("hardware", {}).get("device_name", "unknown"),
            dtype=DTYPES.get(dtype, dtype),
            num_gpus=engine.get("tensor_parallel_size", 1),
            log=tuple(_log(folder / "timeseries.csv", requests, cache["num_gpu_blocks"] * cache["block_size"])),
            async_scheduling=bool(scheduler.get("async_scheduling", False)),
            whole_prompt_must_fit=bool(scheduler.get("scheduler_reserve_full_isl", False)),
            reuses_blocks=bool(cache.get("enable_prefix_caching", False)),
            source=f"vLLM {meta.get('vllm_version', '(version unknown)')}, {len(requests)} requests, "
            f"started {meta.get('started_at', '(time unknown)')}",
            notes=("lengths only: prompts that share a prefix are not known as such",),
        )
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise WorkloadError(f"{folder} is not a complete vLLM run: {what}") from None


def _log(path: Path, requests: list[MeasuredRequest], kv_room: int) -> list[MeasuredSecond]:
    """The server's periodic log, if it kept one. Throughputs in it are tokens a second since the line before."""
    if not path.exists():
        return []
    firsts = sorted({r.first_token_time for r in requests if r.first_token_time is not None})
    log, previous = [], 0.0
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                end = float(row["t"])
                seconds = end - previous
                log.append(
                    MeasuredSecond(
                        end,
                        seconds,
                        float(row["prompt_throughput"]) * seconds,
                        float(row["gen_throughput"]) * seconds,
                        float(row["running"]),
                        float(row["kv_cache_pct"]) / 100 * kv_room,
                        bisect.bisect_right(firsts, end) - bisect.bisect_right(firsts, previous),
                    )
                )
                previous = end
    except (OSError, KeyError, ValueError, TypeError) as error:
        what = f"the column {error} is missing" if isinstance(error, KeyError) else error
        raise WorkloadError(f"can't read {path}: {what}") from None
    return log


def _from_timeline(timeline: Timeline, path: Path) -> MeasuredRun:
    header = timeline.header
    if timeline.clock != "measured":
        raise WorkloadError(f"{path} was simulated; calibrate on a measured run")
    if "slice" in header or header.get("interrupted"):
        raise WorkloadError(f"{path} is only a part of a run; calibrate on a whole one")
    zero = min((r.arrival_time for r in timeline.requests.values()), default=0.0)
    requests = [
        MeasuredRequest(
            r.request_id,
            r.num_prompt_tokens,
            r.num_output_tokens,
            r.arrival_time - zero,
            r.token_times[0] - zero,
            r.token_times[-1] - zero,
        )
        for r in timeline.requests.values()
        if r.token_times
    ]
    if not requests or not timeline.steps:
        raise WorkloadError(f"{path} holds no finished request; calibrate on a run that served some")
    try:
        knobs = {f.name: header[f.name] for f in fields(SchedulerConfig) if f.name in header}
        return MeasuredRun(
            name=f"{header['strategy']} on {header.get('model', '?')}",
            engine="minibatcher",
            strategy=header["strategy"],
            requests=tuple(sorted(requests, key=lambda r: r.arrival_time)),
            config=SchedulerConfig(**knobs),
            num_blocks=header["num_blocks"],
            block_size=header["block_size"],
            model=header.get("model", "unknown"),
            device=(header.get("hardware") or {}).get("device", "unknown"),
            dtype=header.get("dtype", "float32"),
            on_cpu="threads" in (header.get("hardware") or {}),
            steps=tuple(_measured_steps(timeline, zero)),
            source=f"timeline of minibatcher {(header.get('software') or {}).get('minibatcher', '(version unknown)')}",
        )
    except KeyError as error:
        raise WorkloadError(f"the header of {path} lacks {error}; record the run again") from None


def _measured_steps(timeline: Timeline, zero: float) -> list[MeasuredStep]:
    """Each step with its time up to the next one, where work went on without a pause, else its own duration."""
    measured = []
    for step, following in zip(timeline.steps, [*timeline.steps[1:], None]):
        seconds = step.duration
        if following is not None and following.start - step.end < 0.5 * step.duration:
            seconds = following.start - step.start  # planning and bookkeeping between steps are work, too
        measured.append(MeasuredStep(step.start - zero, seconds, work_of(step, timeline.requests)))
    return measured


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkloadError(f"can't read {path}: {error}") from None
    if not isinstance(data, dict):
        raise WorkloadError(f"{path} must hold a JSON object")
    return data


def _rows(path: Path) -> list[dict[str, Any]]:
    needed = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WorkloadError(f"can't read {path}: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            bad = [key for key in needed if not isinstance(row[key], (int, float)) or not math.isfinite(row[key])]
            if bad or row["input_toks"] < 1 or row["output_toks"] < 1 or row["last_token_ts"] < row["first_token_ts"]:
                raise ValueError(f"{bad[0] if bad else 'a length or a time'} makes no sense")
        except (ValueError, KeyError, TypeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise WorkloadError(f"{path}, line {number}: {what}") from None
        rows.append({"request_id": number} | row)
    if len(rows) < 10:
        raise WorkloadError(f"{path} holds {len(rows)} requests; a calibration needs at least 10")
    return rows
