"""Measured runs: reading them, replaying them in virtual time, and fitting the cost model to them."""

from .calibration import Calibration, Saved, calibrate, cost_model, device_of, load_saved, model_of, predict
from .replay import VllmScheduler, replay
from .report import Row, compare, table
from .runs import MeasuredRequest, MeasuredRun, MeasuredStep, load_run, load_runs
from .shipped import shipped_cost, shipped_report, shipped_source

__all__ = [
    "Calibration",
    "MeasuredRequest",
    "MeasuredRun",
    "MeasuredStep",
    "Row",
    "Saved",
    "VllmScheduler",
    "calibrate",
    "compare",
    "cost_model",
    "device_of",
    "load_run",
    "load_runs",
    "load_saved",
    "model_of",
    "predict",
    "replay",
    "shipped_cost",
    "shipped_report",
    "shipped_source",
    "table",
]
