"""Calibration: fit on the first part of a measured run, and say how well the rest of it is predicted."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import InvalidParameter, UnknownName, WorkloadError
from ..hardware import Device, ModelSpec, devices, model_spec, model_specs
from ..runners.roofline import CostModel, Efficiency
from .fit import FROM_REQUESTS, FROM_STEPS, PRIORS, fit_requests, fit_steps
from .replay import replay
from .report import Row, compare, table
from .runs import MeasuredRun

SCHEMA = "minibatcher.efficiency"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """A fitted cost model and what it is worth.

    horizon: seconds from the first arrival; nothing measured after it was used in the fit. rows: predictions against
    measurements. notes: what to know before trusting them.
    """

    run: MeasuredRun
    cost: CostModel
    horizon: float
    rows: list[Row]
    notes: list[str]

    @property
    def efficiency(self) -> Efficiency:
        return self.cost.efficiency

    @property
    def hold_out(self) -> str:
        """How the run was split, in words."""
        late = sum(r.first_token_time > self.horizon for r in self.run.requests)
        unfinished = sum(r.last_token_time > self.horizon for r in self.run.requests)
        what = "steps" if self.run.steps else "first tokens (TTFT) and ends (TPOT) of requests"
        return (
            f"Fitted on the {what} in the first {self.horizon:.1f} s of {self.run.makespan:.1f} s. "
            f"Held out: all that came later, the TTFT of {late} requests and the TPOT of {unfinished}. Arrivals and lengths of all requests "
            f"are input. The prediction starts at time zero and never sees a measured moment, so what it gets wrong early "
            f"is still wrong late."
        )

    def text(self) -> str:
        """What `minibatcher simulate --calibrate` prints."""
        fitted = FROM_STEPS if self.run.steps else FROM_REQUESTS
        figures = asdict(self.efficiency)
        lines = [f"Calibrated on {self.run.name} ({self.run.source})", ""]
        lines += [f"  {name:<22}{figures[name]:.4g}{'' if name in fitted else '  (not fitted)'}" for name in figures]
        return "\n".join([*lines, "", self.hold_out, "", table(self.rows), *(f"Note: {note}." for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """The fitted figures and where they come from; `load_efficiency` reads them again."""
        run, cost = self.run, self.cost
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "efficiency": asdict(self.efficiency),
            "fitted": list(FROM_STEPS if run.steps else FROM_REQUESTS),
            "provenance": {
                "run": run.name,
                "source": run.source,
                "engine": run.engine,
                "strategy": run.strategy,
                "device": cost.device.name,
                "device_source": cost.device.source,
                "model": cost.model.name,
                "dtype": cost.dtype,
                "num_gpus": cost.num_gpus,
                "horizon_s": self.horizon,
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
    run: MeasuredRun,
    *,
    device: Device | None = None,
    model: ModelSpec | None = None,
    num_gpus: int | None = None,
    dtype: str | None = None,
    fit_share: float = 0.5,
    base: Efficiency | None = None,
) -> Calibration:
    """Fit efficiency factors on the first `fit_share` of the run's time, and compare the rest with a replay of it all.

    device, model, num_gpus, dtype: None takes the run's own, as far as the tables know them. base: factors that are not
    fitted. Raises UnknownName, InvalidParameter, WorkloadError.
    """
    if not 0 < fit_share < 1:
        raise InvalidParameter(f"fit_share must lie between 0 and 1, not {fit_share!r}")
    cost = cost_model(run, device=device, model=model, num_gpus=num_gpus, dtype=dtype, base=base)
    horizon = fit_share * run.makespan
    seen = sum(r.last_token_time <= horizon for r in run.requests)
    if seen < 5:
        raise WorkloadError(
            f"only {seen} requests of {run.name} ended in its first {horizon:.1f} s, too few to fit; raise fit_share ({fit_share})"
        )
    if run.steps:
        efficiency, _ = fit_steps([step for step in run.steps if step.start <= horizon], cost)
    else:
        efficiency, _ = fit_requests(run, cost, horizon)
    cost = replace(cost, efficiency=efficiency)
    rows = compare(run, replay(run, cost), horizon)
    return Calibration(run, cost, horizon, rows, [*run.notes, *_at_limits(efficiency, run)])


def predict(run: MeasuredRun, cost: CostModel) -> list[Row]:
    """How far this cost model, fitted elsewhere or not at all, is off on a run: all of the run is held out."""
    return compare(run, replay(run, cost), 0.0)


def cost_model(
    run: MeasuredRun,
    *,
    device: Device | None = None,
    model: ModelSpec | None = None,
    num_gpus: int | None = None,
    dtype: str | None = None,
    base: Efficiency | None = None,
) -> CostModel:
    """The uncalibrated cost model of a run's device and model."""
    return CostModel(
        device or device_of(run),
        model or model_of(run),
        num_gpus=num_gpus or run.num_gpus,
        dtype=dtype or run.dtype,
        efficiency=base or Efficiency(),
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


def load_efficiency(path: str | Path) -> Efficiency:
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
    if not isinstance(figures, dict) or not set(figures) <= known:
        raise InvalidParameter(f"the figures in {path} must be among {', '.join(sorted(known))}")
    try:
        return Efficiency(**figures)
    except TypeError as error:
        raise InvalidParameter(f"{path} is damaged: {error}") from None


def _at_limits(efficiency: Efficiency, run: MeasuredRun) -> list[str]:
    notes = []
    for name in FROM_STEPS if run.steps else FROM_REQUESTS:
        value, prior = getattr(efficiency, name), PRIORS[name]
        if value >= 0.99 * prior.high and not name.endswith("_s"):
            notes.append(f"{name} is at its upper limit: the device's figures may be lower than the truth")
        elif value <= 1.01 * prior.low and not name.endswith("_s"):
            notes.append(f"{name} is at its lower limit: something takes time that the cost model does not know")
    return notes
