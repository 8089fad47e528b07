"""Triton's interpreter made stricter, right in bfloat16, and faster. For tests only; the kernels know nothing of it.

As it comes, the interpreter reads and writes whatever lies beyond a tensor, multiplies the bits of bfloat16 numbers as
if they were integers, and patches the whole of triton.language anew at each call of a device function.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from minibatcher.attention import triton_tiles

_Builder, _Executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
_Function, _Handle = interpreter.InterpretedFunction, interpreter.TensorHandle

# What is replaced below, with the parameters that it is replaced for.
_EXPECTED = {
    (_Builder, "create_masked_load"): "self ptrs mask other cache_modifier eviction_policy is_volatile",
    (_Builder, "create_masked_store"): "self ptrs value mask cache_modifier eviction_policy",
    (_Builder, "create_dot"): "self a b d input_precision max_num_imprecise_acc",
    (_Builder, "cast_impl"): "self src dst_type",
    (_Builder, "binary_op"): "self lhs rhs op",
    (_Builder, "unary_op"): "self arg op",
    (_Executor, "_init_args_hst"): "self args_dev kwargs",
    (_Executor, "__call__"): "self args_dev kwargs",
    (_Function, "__call__"): "self args kwargs",
}


class OutOfBounds(IndexError):
    """A program touched memory that belongs to no tensor it was given."""


def install() -> None:
    """Once is enough. Does nothing where kernels are compiled. Raises RuntimeError if the interpreter has changed."""
    if not triton_tiles.INTERPRETED or triton_tiles.interpreter_computes_bfloat16:
        return
    check_unchanged(_EXPECTED)
    _check_bounds()
    _compute_bfloat16()
    _speed_up()


def check_unchanged(expected: dict[tuple[type, str], str]) -> None:
    """Raises RuntimeError unless each class has the method with the parameters that are expected."""
    for (owner, name), parameters in expected.items():
        found = " ".join(inspect.signature(getattr(owner, name)).parameters) if hasattr(owner, name) else "nothing"
        if found != parameters:
            raise RuntimeError(
                f"the interpreter of triton {triton.__version__} has changed: {owner.__name__}.{name} takes {found!r}, "
                f"and tests/interpreter.py was written for {parameters!r}; adapt it"
            )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within, what a launcher allocates is full of NaN, so that a number nobody wrote shows."""
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))
        yield


def _check_bounds() -> None:
    """Every load and store must stay within the tensors that the launch was given."""
    prepare, load, store = _Executor._init_args_hst, _Builder.create_masked_load, _Builder.create_masked_store
    bounds = np.zeros((0, 2), dtype=np.uint64)  # first byte and end of each tensor, sorted; overlapping ones merged

    def prepare_and_note(self, args, kwargs):
        nonlocal bounds
        args, kwargs = prepare(self, args, kwargs)
        merged: list[list[int]] = []
        for begin, end in sorted(_extent(x) for x in (*args, *kwargs.values()) if hasattr(x, "data_ptr") and x.numel()):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        bounds = np.array(merged, dtype=np.uint64)
        return args, kwargs

    def check(what, ptrs, mask):
        at = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        size = np.uint64(max(1, ptrs.get_element_ty().primitive_bitwidth // 8))
        tensor = np.searchsorted(bounds[:, 0], at, side="right") - 1
        outside = (tensor < 0) | (at + size > bounds[np.maximum(tensor, 0), 1])
        if outside.any():
            program = interpreter.interpreter_builder.grid_idx
            raise OutOfBounds(f"{what} out of bounds at {outside.sum()} of {at.size} addresses in program {program}")

    def checked_load(self, ptrs, mask, *rest):
        check("load", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def checked_store(self, ptrs, value, mask, *rest):
        check("store", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    _Executor._init_args_hst = prepare_and_note
    _Builder.create_masked_load, _Builder.create_masked_store = checked_load, checked_store


def _extent(tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _compute_bfloat16() -> None:
    """Products of bfloat16 matrices, and conversions from and to float32; all other arithmetic is refused.

    The interpreter holds a bfloat16 as the upper 16 bits of the float32 that it stands for, in an unsigned integer.
    """
    dot, cast, binary, unary = _Builder.create_dot, _Builder.cast_impl, _Builder.binary_op, _Builder.unary_op

    def to_float32(handle):
        return _Handle((handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32), tl.float32)

    def to_bfloat16(handle):
        bits = np.ascontiguousarray(handle.data).view(np.uint32)
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # ties go to the even number
        rounded = ((bits + half) >> np.uint32(16)).astype(np.uint16)
        return _Handle(np.where(np.isnan(handle.data), np.uint16(0x7FC0), rounded), tl.bfloat16)

    def is_bfloat16(handle):
        return handle.dtype.scalar == tl.bfloat16

    def new_dot(self, a, b, d, *rest):
        a, b = (to_float32(x) if is_bfloat16(x) else x for x in (a, b))
        return dot(self, a, b, d, *rest)

    def new_cast(self, src, dst_type):
        kinds = (src.dtype.scalar, dst_type.scalar)
        if kinds == (tl.bfloat16, tl.float32):
            return to_float32(src)
        if kinds == (tl.float32, tl.bfloat16):
            return to_bfloat16(src)
        return cast(self, src, dst_type)

    def refuse(*handles):
        if any(is_bfloat16(x) for x in handles):
            raise NotImplementedError("tests/interpreter.py computes no bfloat16 but in tl.dot: convert to float32")

    def new_binary(self, lhs, rhs, op):
        refuse(lhs, rhs)
        return binary(self, lhs, rhs, op)

    def new_unary(self, arg, op):
        refuse(arg)
        return unary(self, arg, op)

    _Builder.create_dot, _Builder.cast_impl = new_dot, new_cast
    _Builder.binary_op, _Builder.unary_op = new_binary, new_unary
    triton_tiles.interpreter_computes_bfloat16 = True


def _speed_up() -> None:
    """About twice as fast."""
    # Each integer sum and product is checked for overflow at length, and nobody looks at the result.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    run = _Executor.__call__
    patched: set[int] = set()  # modules whose triton.language was patched in this launch; once is enough

    def run_launch(self, *args, **kwargs):
        patched.clear()
        return run(self, *args, **kwargs)

    def call_device_function(self, *args, **kwargs):
        module = id(self.fn.__globals__)
        if module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        return self.rewrite()(*args, **kwargs)

    _Executor.__call__, _Function.__call__ = run_launch, call_device_function
