"""What was fitted on a measured run of another server, and how far off the simulator was before and after.

The file holds figures alone. The run itself is its authors' (the file's `source` says where it is); with it at hand,
tests/test_calibrate.py fits and compares again.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..hardware import model_spec
from ..runners.roofline import CostModel
from .calibration import load_saved
from .report import Row

FILE = Path(__file__).with_name("rtx4090-llama-3.1-8b.json")


def shipped_cost() -> CostModel:
    """Llama 3.1 8B on one RTX 4090, with factors fitted on the first half of a run of vLLM 0.19."""
    saved = load_saved(FILE)
    return CostModel(
        saved.device,
        model_spec(saved.model),
        num_gpus=saved.num_gpus,
        dtype=saved.dtype,
        efficiency=saved.efficiency,
        calibration=f"fitted on the first half of a vLLM run, {FILE.stem}",
    )


def shipped_report() -> dict[str, list[Row]]:
    """Predicted and measured figures of that run: "not fitted" with the default factors, and "fitted"."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    rows = {"not fitted": data["report_before"], "fitted": data["report"]}
    return {name: [Row(**{k: v for k, v in row.items() if k != "error"}) for row in rows[name]] for name in rows}


def shipped_source() -> str:
    """Whose run it was, and where it is."""
    return json.loads(FILE.read_text(encoding="utf-8"))["source"]
