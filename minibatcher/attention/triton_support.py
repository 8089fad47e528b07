"""Whether the Triton kernels can run here, and how: compiled for the GPU, or by Triton's interpreter.

Nothing here imports Triton before it is known which: the interpreter must be asked for before the first import.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys

import torch

from ..errors import DeviceError

OLDEST = (3, 4)
OLDEST_CAPABILITY = (7, 5)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def version() -> str | None:
    """Of the Triton that is installed; None without one."""
    try:
        if importlib.util.find_spec("triton") is None:
            return None
    except (ImportError, ValueError):  # something on the way keeps it from being found
        return None
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "0"


def is_interpreted() -> bool:
    """Kernels run in Triton's interpreter, on whatever device the tensors are."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def interpret() -> None:
    """Have the kernels run in the interpreter from now on. Raises DeviceError where it is too late for that."""
    if is_interpreted():
        return
    if "triton" in sys.modules:
        raise DeviceError(
            "Triton's interpreter must be asked for before anything imports Triton, and that has happened; start "
            "Python anew with the environment variable TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """A sentence that says why the kernels can't run on this device in this dtype; None if they can."""
    found = version()
    if found is None:
        return "Triton is not installed (it exists for Linux: pip install triton)"
    short = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        return f"the Triton kernels compute in float32, float16 and bfloat16, not in {short}"
    interpreted = device.type == "cpu" or is_interpreted()
    capability = None if interpreted else torch.cuda.get_device_capability(device)
    number = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if number < OLDEST:
        tail = ", and 3.3 can't compile a matrix product for compute capability 7.5" if capability == (7, 5) else ""
        return f"Triton {found} is older than 3.4, the first that the kernels are made for{tail}; update PyTorch"
    if interpreted:
        if dtype == torch.bfloat16:
            return (
                "Triton's interpreter, which runs the kernels where there is no GPU, computes wrongly in bfloat16; "
                "use float32 or float16"
            )
        return None
    assert capability is not None  # only the interpreter has none
    name = ".".join(map(str, capability))
    if capability < OLDEST_CAPABILITY:
        return f"the Triton kernels need compute capability 7.5 or later, and this GPU has {name}"
    if capability < (8, 0) and dtype == torch.bfloat16:
        return f"a GPU of compute capability {name} does not compute in bfloat16; use float16"
    return None
