"""Which attention runs where, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from ..errors import DeviceError, UnknownName
from . import cache, reference, sdpa, triton_support


@dataclass(frozen=True)
class AttentionBackend:
    """`why` is a sentence. `ragged`, `padded`, `store`: as reference.ragged_attention, reference.padded_attention and
    cache.store_kv. `capturable`: a step of decodes takes all that changes from device tensors, so that a CUDA graph of
    it can be replayed; a slot below 0 stores nothing, and a context of 0 tokens is allowed. `interpreted`: by Triton's
    interpreter, so slowly that times mean nothing.
    """

    name: str
    why: str
    ragged: Callable[..., torch.Tensor]
    padded: Callable[..., torch.Tensor]
    store: Callable[..., None] = cache.store_kv
    capturable: bool = False
    interpreted: bool = False


NAMES = ("auto", "reference", "sdpa", "triton")


def choose_attention(name: str, device: torch.device | str, dtype: torch.dtype) -> AttentionBackend:
    """The backend called `name`, or for "auto" the fastest that runs on this device in this dtype.

    Raises UnknownName, and DeviceError where the backend asked for can't run: it is never replaced by another.
    """
    device = torch.device(device)
    if name not in NAMES:
        raise UnknownName("attention backend", name, list(NAMES))
    if name == "reference":
        return AttentionBackend(name, "asked for by name", reference.ragged_attention, reference.padded_attention)
    if name == "sdpa":
        return _sdpa(device, "asked for by name")
    if name == "auto" and device.type == "cpu":
        return _sdpa(device, f"PyTorch's fused attention is the fastest of these on cpu in {_short(dtype)}")
    obstacle = triton_obstacle(device, dtype)
    if obstacle is None:
        return _triton(device, "asked for by name" if name == "triton" else None)
    if name == "triton":
        raise DeviceError(f"attention backend triton can't run here: {obstacle}; or use --attention sdpa")
    return _sdpa(device, f"Triton's kernels can't run here: {obstacle}")


def _sdpa(device: torch.device, why: str) -> AttentionBackend:
    if device.type == "cuda":
        # PyTorch prefers cuDNN's kernel on 9.0, which makes a plan for every new length, tens of milliseconds each, and
        # an engine's lengths are nearly always new.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return AttentionBackend("sdpa", why, sdpa.ragged_attention, sdpa.padded_attention)


def triton_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """A sentence that says why the Triton kernels can't run on this device in this dtype; None if they can."""
    obstacle = triton_support.why_not(device, dtype)
    if obstacle is None:
        try:
            _kernels(device)
        except ImportError as error:
            obstacle = f"Triton {triton_support.version()} is installed and can't be imported ({error})"
    return obstacle


def _kernels(device: torch.device) -> tuple[ModuleType, Callable[..., None]]:
    """The kernels' launchers, imported no sooner than they are wanted: on a CPU the interpreter is turned on first."""
    if device.type == "cpu":
        triton_support.interpret()
    from . import triton_backend
    from .triton_store import store_kv

    return triton_backend, store_kv


def _triton(device: torch.device, why: str | None) -> AttentionBackend:
    kernels, store_kv = _kernels(device)
    if triton_support.is_interpreted():
        name = "triton (interpreted)"
        why = why or "TRITON_INTERPRET is set"
        why += "; Triton's interpreter is right in float32 and float16, and so slow that times mean nothing"
        return AttentionBackend(name, why, kernels.ragged_attention, kernels.padded_attention, store_kv, True, True)
    capability = torch.cuda.get_device_capability(device)
    name = ".".join(map(str, capability))
    if capability < (8, 0):
        return AttentionBackend(
            "triton+sdpa",
            f"on compute capability {name} Triton serves decodes, and SDPA the prompts, for which Triton has no tensor "
            "cores there",
            kernels.ragged_attention_without_tensor_cores,
            kernels.padded_attention_without_tensor_cores,
            store_kv,
            True,
        )
    why = why or f"our Triton kernels serve decodes and chunks in one launch on compute capability {name}"
    return AttentionBackend("triton", why, kernels.ragged_attention, kernels.padded_attention, store_kv, True)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
