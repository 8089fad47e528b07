"""Which attention runs where, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import UnknownName
from . import reference, sdpa


@dataclass(frozen=True)
class AttentionBackend:
    """`ragged` and `padded` are the module's ragged_attention and padded_attention; `why` is a sentence."""

    name: str
    why: str
    ragged: Callable[..., torch.Tensor]
    padded: Callable[..., torch.Tensor]


_MODULES = {"reference": reference, "sdpa": sdpa}


def choose_attention(name: str, device: torch.device | str, dtype: torch.dtype) -> AttentionBackend:
    """The backend called `name`, or for "auto" the fastest that runs on this device and dtype. Raises UnknownName."""
    if name == "auto":
        kind = torch.device(device).type
        short = str(dtype).removeprefix("torch.")
        name, why = "sdpa", f"PyTorch's fused attention is the fastest of these on {kind} in {short}"
    elif name in _MODULES:
        why = "asked for by name"
    else:
        raise UnknownName("attention backend", name, ["auto", *_MODULES])
    module = _MODULES[name]
    return AttentionBackend(name, why, module.ragged_attention, module.padded_attention)
