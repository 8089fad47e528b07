"""What the claims share: the machine of the book's figures, and a spread of samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import numpy as np

from ..hardware import device, model_spec
from ..runners.roofline import CostModel


def machine(model: str = "llama-3.1-70b", device_name: str = "h100", num_gpus: int = 4, **options) -> CostModel:
    """A cost model from the shipped tables; the default is a 70B model on four H100."""
    return CostModel(device(device_name), model_spec(model), num_gpus=num_gpus, **options)


def percentile(samples: Iterable[float | None], q: float) -> float:
    """Interpolated linearly between sorted samples, as everywhere in metrics. None raises TypeError."""
    return float(np.percentile(cast("list[float]", list(samples)), q))


def mean(samples: Iterable[float | None]) -> float:
    return float(np.mean(cast("list[float]", list(samples))))
