"""From host arrays to tensors on the device, without making the host wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; kernels read aligned addresses faster


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors of the same shapes and dtypes on `device`.

    On a CPU they share the arrays' memory. To a GPU all go in one transfer out of pinned memory: from pageable memory,
    or by torch.tensor(..., device="cuda"), the host would wait for the device at every call.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    # PyTorch keeps its pinned memory from being used again until the copy is done.
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = staging.numpy()
    for start, array in zip(starts, arrays):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    packed = staging.to(device, non_blocking=True)
    return [
        packed[start : start + array.nbytes].view(torch.from_numpy(array[:0].reshape(-1)).dtype).view(array.shape)
        for start, array in zip(starts, arrays)
    ]
