"""Calibration: fit on the first part of a measured run, and say how well the rest of it is predicted."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..errors import InvalidParameter, UnknownName, WorkloadError
from ..hardware import Device, ModelSpec, devices, model_spec, model_specs
from ..runners.roofline import CostModel, Efficiency
from .fit import CPU_PRIORS, FROM_REQUESTS, FROM_STEPS, PRIORS, Prior, fit_requests, fit_steps
from .replay import replay
from .report import HELD_OUT, Row, compare, table
from .runs import MeasuredRun

SCHEMA = "minibatcher.efficiency"
SCHEMA_VERSION = 1
MIN_SEEN = 5  # requests


@dataclass(frozen=True)
class Calibration:
    """A fitted cost model and what it is worth.

    runs: what it was fitted on. fitted: names of the factors that were. hold_out: what was kept from the fit, in words.
    rows: predictions against measurements. notes: what to know before trusting them.
    """

    runs: list[MeasuredRun]
    cost: CostModel
    fitted: tuple[str, ...]
    hold_out: str
    rows: list[Row]
    notes: list[str]

    @property
    def efficiency(self) -> Efficiency:
        return self.cost.efficiency

    def text(self) -> str:
        """What `minibatcher simulate --calibrate` prints."""
        lines = [f"Calibrated on {run.name} ({run.source})" for run in self.runs]
        lines.append("")
        for name, value in asdict(self.efficiency).items():
            lines.append(f"  {name:<22}{value:.4g}{'' if name in self.fitted else '  (not fitted)'}")
        lines += ["", textwrap.fill(self.hold_out, 100), "", table(self.rows)]
        lines += [textwrap.fill(f"Note: {note}.", 100) for note in self.notes]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The fitted figures and where they come from; `load_saved` reads them again."""
        cost = self.cost
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "efficiency": asdict(self.efficiency),
            "fitted": list(self.fitted),
            "device": asdict(cost.device) | {"flops": dict(cost.device.flops)},
            "model": cost.model.name,
            "dtype": cost.dtype,
            "num_gpus": cost.num_gpus,
            "report": [asdict(row) | {"error": row.error} for row in self.rows],
            "provenance": {
                "runs": [{"name": run.name, "source": run.source, "engine": run.engine} for run in self.runs],
                "hold_out": self.hold_out,
                "notes": self.notes,
                "minibatcher": __version__,
            },
        }

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file. Raises InvalidParameter where that is impossible."""
        try:
            Path(path).write_text(json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidParameter(f"can't write {path}: {error.strerror}") from None


def calibrate(
    runs: MeasuredRun | Sequence[MeasuredRun],
    *,
    device: Device | None = None,
    model: ModelSpec | None = None,
    num_gpus: int | None = None,
    dtype: str | None = None,
    fit_share: float = 0.5,
    base: Efficiency | None = None,
) -> Calibration:
    """Fit efficiency factors on a part of a measured run, and compare the rest with a replay of it all.

    A server's run is split in time: what its requests saw in the first `fit_share` of the makespan is fitted. Runs of
    our own engine (one, or several of one machine and model) are fitted step by step, on every other step. device,
    model, num_gpus, dtype: None takes the run's own, as far as the tables know them. base: values of what is not
    fitted. Raises UnknownName, InvalidParameter, WorkloadError.
    """
    runs = [runs] if isinstance(runs, MeasuredRun) else list(runs)
    if not 0 < fit_share < 1:
        raise InvalidParameter(f"fit_share must lie between 0 and 1, not {fit_share!r}")
    if len({(run.engine, run.model, run.device, run.dtype) for run in runs}) != 1:
        raise InvalidParameter("calibrate on runs of one engine, model, device and dtype at a time")
    if len(runs) > 1 and not all(run.steps for run in runs):
        raise InvalidParameter("only timelines can be fitted several at a time; calibrate on one server run")
    cost = cost_model(runs[0], device=device, model=model, num_gpus=num_gpus, dtype=dtype, base=base)
    if runs[0].steps:
        return _from_steps(runs, cost)
    return _from_requests(runs[0], cost, fit_share * runs[0].makespan)


def _from_requests(run: MeasuredRun, cost: CostModel, horizon: float) -> Calibration:
    seen = sum(r.last_token_time is not None and r.last_token_time <= horizon for r in run.requests)
    if seen < MIN_SEEN:
        raise WorkloadError(
            f"only {seen} requests of {run.name} ended in its first {horizon:.1f} s of {run.makespan:.1f} s, "
            f"and a fit needs {MIN_SEEN}; raise fit_share"
        )
    efficiency = fit_requests(run, cost, horizon)
    cost = replace(cost, efficiency=efficiency)
    late = sum(r.first_token_time is not None and r.first_token_time > horizon for r in run.requests)
    hold_out = (
        f"Fitted on what the requests had seen {horizon:.1f} s after the first arrival, of {run.makespan:.1f} s in "
        f"all: the TTFT of {len(run.requests) - late} requests and the TPOT of {seen}. Held out: the TTFT of the other "
        f"{late} requests and the TPOT of the other {len(run.requests) - seen}. Arrivals and lengths of all are input. "
        "The replay starts at zero with an empty server and is never set right by a measured moment, so makespan and "
        "throughput of the whole run are predictions, and an error early on is carried along to the end."
    )
    rows = compare(run, replay(run, cost), horizon)
    return Calibration(
        [run], cost, FROM_REQUESTS, hold_out, rows, [*run.notes, *_at_limits(efficiency, FROM_REQUESTS, PRIORS)]
    )


def _from_steps(runs: list[MeasuredRun], cost: CostModel) -> Calibration:
    priors = CPU_PRIORS if runs[0].on_cpu else PRIORS
    efficiency = fit_steps([step for run in runs for step in run.steps[::2]], cost, priors)
    cost = replace(cost, efficiency=efficiency)
    rows = []
    for run in runs:
        others = run.steps[1::2]
        seconds = sum(step.seconds for step in others)
        rows.append(
            Row(run.name, HELD_OUT, "step_s sum", sum(cost.seconds(s.work) for s in others), seconds, len(others))
        )
        rows += compare(run, replay(run, cost))
    hold_out = (
        "Fitted on the first, third, fifth ... step; held out: the second, fourth, sixth ... step. The whole run is "
        "replayed from arrivals and lengths alone. Steps of one run are much alike, so the honest test is another run: "
        "another strategy, another workload."
    )
    return Calibration(runs, cost, FROM_STEPS, hold_out, rows, _at_limits(efficiency, FROM_STEPS, priors))


def predict(run: MeasuredRun, cost: CostModel) -> list[Row]:
    """How far this cost model, fitted elsewhere or not at all, is off on a run: all of the run is held out."""
    return compare(run, replay(run, cost))


def cost_model(
    run: MeasuredRun,
    *,
    device: Device | None = None,
    model: ModelSpec | None = None,
    num_gpus: int | None = None,
    dtype: str | None = None,
    base: Efficiency | None = None,
) -> CostModel:
    """The uncalibrated cost model of a run's device and model. A CPU's products are not rounded up to tiles."""
    if base is None:
        base = Efficiency(tile_tokens=1) if run.on_cpu else Efficiency()
    return CostModel(
        device or device_of(run),
        model or model_of(run),
        num_gpus=num_gpus or run.num_gpus,
        dtype=dtype or run.dtype,
        efficiency=base,
    )


def device_of(run: MeasuredRun) -> Device:
    """The shipped device whose name the run gives. Raises UnknownName, which lists the known ones."""
    words = {word.removesuffix("gb") for word in re.findall(r"[a-z0-9]+", run.device.lower())}
    matches = [name for name in devices() if set(name.split("-")) <= words]
    if not matches:
        raise UnknownName("hardware", run.device, [*devices()])
    return devices()[max(matches, key=len)]


def model_of(run: MeasuredRun) -> ModelSpec:
    """The shipped model whose name the run gives. Raises UnknownName, which lists the known ones."""
    name = run.model.rsplit("/", 1)[-1].lower()
    short = re.sub(r"-(instruct|chat|base|hf)\b.*", "", name)
    return model_spec(short if name not in model_specs() else name)


class Saved(NamedTuple):
    """What a calibration file holds: shares are those of this very device's figures."""

    efficiency: Efficiency
    device: Device
    model: str
    dtype: str
    num_gpus: int


def load_saved(path: str | Path) -> Saved:
    """Read what `Calibration.save` wrote. Raises InvalidParameter for any other file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidParameter(f"can't read the efficiency file {path}: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or data.get("schema_version") != SCHEMA_VERSION:
        raise InvalidParameter(
            f'{path} is no efficiency file (it needs "schema": "{SCHEMA}", version {SCHEMA_VERSION})'
        )
    figures = data.get("efficiency")
    known = {f.name for f in fields(Efficiency)}
    if not isinstance(figures, dict) or set(figures) != known:
        raise InvalidParameter(f"the figures in {path} must be {', '.join(sorted(known))}")
    try:
        device = Device(**data["device"])
        saved = Saved(Efficiency(**figures), device, data["model"], data["dtype"], data["num_gpus"])
        if not isinstance(saved.model, str) or not isinstance(saved.dtype, str) or type(saved.num_gpus) is not int:
            raise TypeError("model and dtype must be names and num_gpus a whole number")
        return saved
    except (KeyError, TypeError) as error:
        raise InvalidParameter(f"{path} is damaged: {error}") from None


def _at_limits(efficiency: Efficiency, fitted: Sequence[str], priors: Mapping[str, Prior]) -> list[str]:
    notes = []
    for name in fitted:
        value, prior = getattr(efficiency, name), priors[name]
        if name.endswith("_s"):
            continue
        if value >= 0.99 * prior.high:
            notes.append(f"{name} is at its upper limit; the device may be faster than its figures say")
        elif value <= 1.01 * prior.low:
            notes.append(f"{name} is at its lower limit; something takes time that the cost model does not know")
    return notes
