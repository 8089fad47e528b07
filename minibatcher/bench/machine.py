"""When, on what and with what something was measured."""

from __future__ import annotations

from typing import Any

import torch

from ..provenance import circumstances, hardware, software


def machine() -> dict[str, Any]:
    """measured, hardware (with the threads that PyTorch has at the moment) and software, as provenance says them."""
    return {"measured": circumstances(), "hardware": hardware(torch.device("cpu")), "software": software()}
