"""Which way a CPU computes a step: PyTorch as it stands, PyTorch with prepacked weights, or compiled loops."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from .compiled import model as compiled
from .compiled.library import find_compiler, library
from .compiled.model import CompiledModel
from .errors import DeviceError, UnknownName
from .model import prepacked
from .model.llama import LlamaModel
from .model.loader import LoadedModel

NAMES = ("plain", "prepacked", "compiled", "auto")


@dataclass(frozen=True)
class CpuPath:
    """`why` is a sentence. model: what PyTorch runs, prepacked or not. compiled: what runs instead of it, or None."""

    name: str
    why: str
    model: LlamaModel
    compiled: CompiledModel | None = None


# Packed weights are shared by all engines on a model, and go with it.
_prepacked: WeakKeyDictionary[LlamaModel, LlamaModel] = WeakKeyDictionary()
_compiled: WeakKeyDictionary[LlamaModel, CompiledModel] = WeakKeyDictionary()


def choose_cpu_path(name: str, loaded: LoadedModel) -> CpuPath:
    """The path called `name`.

    "plain" is PyTorch as it stands; "prepacked" PyTorch with weights laid out for its products; "compiled" C++ loops,
    attention included, compiled when first used; "auto" the fastest of these that there is, in the opposite order.
    Raises UnknownName, and DeviceError where the path asked for can't run: it is never replaced by another.
    """
    if name not in NAMES:
        raise UnknownName("CPU path", name, list(NAMES))
    model, why = loaded.model, "asked for by name"
    if name == "plain":
        return CpuPath("plain", why, model)
    if name != "prepacked":  # which need not know: to find out may mean to compile
        problem = why_not_compiled(loaded)
        if problem is None:
            if name == "auto":
                why = "compiled loops are the fastest of these on a CPU"
            if model not in _compiled:
                _compiled[model] = CompiledModel(model, loaded.dtype)
            return CpuPath("compiled", why, model, _compiled[model])
        if name == "compiled":
            others = "plain" if why_not_prepacked(loaded) else "plain or prepacked"
            raise DeviceError(f"the compiled CPU path can't serve this model: {problem}; use the {others} path")
        why = f"the compiled path can't serve here: {problem}"
    lack = why_not_prepacked(loaded)
    if lack is None:
        if model not in _prepacked:
            _prepacked[model] = prepacked.prepack(model)
        return CpuPath("prepacked", why, _prepacked[model])
    if name == "prepacked":
        raise DeviceError(f"weights can't be prepacked: {lack}; use the plain path")
    return CpuPath("plain", f"{why}; and weights can't be prepacked: {lack}", model)


def why_not_compiled(loaded: LoadedModel) -> str | None:
    """A sentence; None if the compiled path can serve. Compiles the library where that has not been done."""
    if (problem := compiled.obstacle(loaded.config, loaded.dtype, loaded.device)) is not None:
        return problem
    if find_compiler() is None:
        return "there is no C++ compiler here (c++, g++ or clang++)"
    try:
        library(loaded.dtype)
    except DeviceError as error:
        return str(error)
    return None


def why_not_prepacked(loaded: LoadedModel) -> str | None:
    if loaded.device.type != "cpu":
        return f"the model is on {loaded.device}"
    if loaded.dtype == torch.float16:
        return "prepacking serves float32 and bfloat16"
    return prepacked.obstacle(loaded.dtype)
