"""Measured runs: reading them, replaying them in virtual time, and fitting the cost model to them."""

from .calibration import Calibration, calibrate, cost_model, device_of, load_efficiency, model_of, predict
from .replay import VllmScheduler, replay
from .report import Row, compare, table
from .runs import MeasuredRequest, MeasuredRun, MeasuredStep, load_run, load_runs

__all__ = [
    "Calibration",
    "MeasuredRequest",
    "MeasuredRun",
    "MeasuredStep",
    "Row",
    "VllmScheduler",
    "calibrate",
    "compare",
    "cost_model",
    "device_of",
    "load_efficiency",
    "load_run",
    "load_runs",
    "model_of",
    "predict",
    "replay",
    "table",
]
