"""Weights in the order in which PyTorch's CPU products want them, laid out once instead of at every call."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, nn

from .llama import LlamaModel

ROWS = 32  # that the layout is chosen for; the others run as well or nearly


class PrepackedLinear(nn.Module):
    """x W^T + bias as nn.Linear, by oneDNN's reordered weights. Holds a second copy of the weight [outputs, inner].

    The operators are PyTorch's own and semi-private (its compiler uses them), which is why they stand in one place.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def prepack(model: LlamaModel) -> LlamaModel:
    """The same model on the CPU with every matrix prepacked; embeddings, norms and biases are shared with `model`."""
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})
    for layer in twin.layers:
        for owner, name in (
            (layer.self_attn, "qkv_proj"),
            (layer.self_attn, "o_proj"),
            (layer.mlp, "gate_up_proj"),
            (layer.mlp, "down_proj"),
        ):
            linear = getattr(owner, name)
            setattr(owner, name, PrepackedLinear(linear.weight, linear.bias))
    output = model.embed_tokens if model.lm_head is None else model.lm_head
    setattr(twin, "lm_head", PrepackedLinear(output.weight, None))  # noqa: B010 - no nn.Linear, but used alike
    return twin


def obstacle(dtype: torch.dtype) -> str | None:
    """A sentence that says why weights in `dtype` can't be prepacked here; None if they can, and come out right."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch was built without oneDNN"
    x, weight = torch.ones(2, 16, dtype=dtype), torch.eye(16, dtype=dtype)
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            right = torch.equal(PrepackedLinear(weight, None)(x), x)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return f"PyTorch {torch.__version__} can't ({str(error).splitlines()[0][:200]})"
    return None if right else f"PyTorch {torch.__version__} gives wrong products of prepacked weights here"
