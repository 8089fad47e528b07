"""Our own launchers, compiled for GPUs that are not here.

A stand-in driver names the target. Each `kernel[grid](...)` in a launcher then compiles and does not run, so that the
launchers are called as always, on small CPU tensors whose contents nobody reads: dtypes, alignment, constants, tile
sizes and warps are the real ones. What came out is asked for its registers, stack, shared memory and instructions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidParameter
from .targets import SHARED_MEMORY

TENSOR_CORES = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync)")


@dataclass(frozen=True)
class Shape:
    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int

    def __str__(self) -> str:
        return f"head {self.head_dim}, group {self.num_heads // self.num_kv_heads}, block {self.block_size}"


LLAMA_1B, LLAMA_8B = Shape(64, 32, 8, 16), Shape(128, 32, 8, 16)
WIDE_GROUP, NO_GROUP, WIDE_HEAD = Shape(64, 32, 4, 32), Shape(80, 8, 8, 16), Shape(256, 8, 1, 16)
ODD_GROUP = Shape(128, 28, 4, 16)  # Qwen2.5 7B's
NARROW_HEAD = Shape(8, 4, 2, 16)  # as of tiny checkpoints for tests; tl.dot wants 16 columns
# A spread, not a full product: a compilation takes a second or more.
CONFIGURATIONS = {
    "half": [  # float16, and bfloat16 where the target has it
        ("store", LLAMA_8B),
        *(
            (kernel, shape)
            for kernel in ("decode", "ragged")
            for shape in (LLAMA_1B, LLAMA_8B, WIDE_GROUP, NO_GROUP, WIDE_HEAD, ODD_GROUP, NARROW_HEAD)
        ),
    ],
    "other half": [("decode", LLAMA_8B), ("ragged", LLAMA_8B), ("ladder", LLAMA_8B)],
    "float32": [
        ("store", NO_GROUP),
        ("ladder", LLAMA_1B),
        *((kernel, shape) for kernel in ("decode", "ragged") for shape in (LLAMA_1B, LLAMA_8B, WIDE_HEAD, ODD_GROUP)),
        ("ladder", NARROW_HEAD),
    ],
}
ALWAYS_DOT = ("ragged", "tiled", "paged")  # these multiply matrices wherever they run; decode where it pays


class StandInDriver:
    """The few questions that a launch asks of triton's driver, answered for a GPU that is not here."""

    def __init__(self, target: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", target, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")


@contextmanager
def compiling_for(target: int) -> Iterator[list[tuple[Any, float]]]:
    """Within, launches only compile; the list collects (compiled kernel, seconds). Needs TRITON_INTERPRET unset."""
    import triton
    from triton.runtime.jit import JITFunction

    if triton.knobs.runtime.interpret:
        raise InvalidParameter("TRITON_INTERPRET is set, and interpreted kernels are not compiled; unset it")
    if target not in SHARED_MEMORY:
        known = ", ".join(map(str, SHARED_MEMORY))
        raise InvalidParameter(f"compute capability {target} is not among those with known limits: {known}")
    launch, compiled = JITFunction.run, []

    def compile_only(function, *args, grid, warmup, **kwargs):
        begun = time.perf_counter()
        function.device_caches.clear()  # they are kept by device number, which is 0 for every target
        kernel = launch(function, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((kernel, time.perf_counter() - begun))
        return kernel

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(StandInDriver(target))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = launch
        triton.runtime.driver._active = before


def compiled_rows(target: int, launch: Callable[[], object], facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each kernel that `launch` starts: `facts`, what it takes of the chip, and its `faults` (sentences).

    Keys: name, registers (a thread), stack_bytes (a thread: spilled registers), shared_bytes and shared_limit (a
    block), dot (the kernel multiplies matrices), tensor_core_instructions, seconds, faults.
    """
    facts = {"target": target, **facts}
    with compiling_for(target) as compiled:
        try:
            launch()
        except Exception as error:
            yield {**facts, "faults": [f"does not compile: {telling_line(error)[:300]}"]}
    for kernel, seconds in compiled:
        registers, stack = _resources(kernel.asm["cubin"])
        row = {
            **facts,
            "name": kernel.metadata.name,
            "registers": registers,
            "stack_bytes": stack,
            "shared_bytes": kernel.metadata.shared,
            "shared_limit": SHARED_MEMORY[target],
            "dot": "tt.dot" in kernel.asm["ttir"],
            "tensor_core_instructions": len(TENSOR_CORES.findall(kernel.asm["ptx"])),
            "seconds": seconds,
        }
        yield {**row, "faults": faults(row)}


def telling_line(error: BaseException) -> str:
    """What is wrong, out of an error of many lines: mostly a kernel's code, with a ^ under the place.

    An error inside a function that a kernel calls is the cause of the error that shows the call.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if any(map(str.isalpha, line))]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else type(error).__name__)


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel, in sentences."""
    found = []
    if row["shared_bytes"] > row["shared_limit"]:
        found.append(f"asks for {row['shared_bytes']:,} bytes of shared memory, the chip has {row['shared_limit']:,}")
    if row["stack_bytes"]:
        found.append(f"spills registers: {row['stack_bytes']:,} bytes of stack a thread")
    if row.get("dtype") == "float32":
        if row["tensor_core_instructions"]:  # which round float32 to 10 bits behind the point
            found.append("multiplies float32 in TF32")
    elif row["target"] >= 80 and row["dot"] and not row["tensor_core_instructions"]:  # on 7.5 triton (3.3 on) uses none
        found.append("multiplies matrices without a tensor-core instruction")
    if row.get("kernel") in ALWAYS_DOT and not row["dot"]:
        found.append("has no matrix product (tl.dot), where one is meant")
    return found


def rows(target: int) -> Iterator[dict[str, Any]]:
    """Every shipped configuration for one target: {"total": launches}, then rows as of compiled_rows, each with kernel,
    dtype and shape. A launch may start two kernels.
    """
    todo = [
        (name, dtype, shape, launch)
        for kernel, dtype, shape in configurations(target)
        for name, launch in launches(kernel, dtype, shape)
    ]
    yield {"total": len(todo) + sum(name == "decode, split" for name, *_ in todo)}
    for name, dtype, shape, launch in todo:
        yield from compiled_rows(target, launch, {"kernel": name, "dtype": dtype, "shape": str(shape)})


def configurations(target: int) -> list[tuple[str, str, Shape]]:
    """(kernel, dtype, shape) that are compiled for a target; bfloat16 only from 8.0 on, it is refused below."""
    half, other = ("bfloat16", "float16") if target >= 80 else ("float16", None)
    dtypes = {"half": half, "other half": other, "float32": "float32"}
    return [
        (kernel, dtype, shape)
        for key, some in CONFIGURATIONS.items()
        if (dtype := dtypes[key]) is not None
        for kernel, shape in some
    ]


def launches(kernel: str, dtype_name: str, shape: Shape) -> Iterator[tuple[str, Callable[[], object]]]:
    """The launchers on small tensors: two requests, one that decodes and one that is at a chunk of its prompt."""
    import torch

    from ..attention.triton_decode import decode_attention
    from ..attention.triton_ladder import naive_attention, paged_attention, tiled_attention
    from ..attention.triton_ragged import ragged_attention
    from ..attention.triton_store import store_kv

    dtype = getattr(torch, dtype_name)
    size, scale = shape.head_dim, shape.head_dim**-0.5
    cache = torch.empty(4, shape.block_size, shape.num_kv_heads, size, dtype=dtype)
    packed = torch.empty(21, shape.num_heads + 2 * shape.num_kv_heads, size, dtype=dtype)
    q, k, v = packed.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    tables = torch.zeros(2, 2, dtype=torch.int32)
    cu_seqlens_q = torch.tensor([0, 1, 21], dtype=torch.int32)
    lens = torch.tensor([17, 25], dtype=torch.int32)
    if kernel == "store":
        yield "store", lambda: store_kv(k, v, cache, cache, torch.arange(21))
    elif kernel == "decode":
        yield "decode", lambda: decode_attention(q[:2], cache, cache, tables, lens, scale, num_splits=1)
        yield "decode, split", lambda: decode_attention(q[:2], cache, cache, tables, lens, scale, num_splits=8)
    elif kernel == "ragged":
        yield "ragged", lambda: ragged_attention(q, cache, cache, tables, cu_seqlens_q, lens, scale)
    else:
        yield "naive", lambda: naive_attention(q, k, v, scale)
        yield "tiled", lambda: tiled_attention(q, k, v, scale)
        yield "paged", lambda: paged_attention(q, cache, cache, tables[0], scale, 25)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of stack a thread, as cuobjdump tells them."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        done = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, encoding="utf-8", check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert found is not None, f"cuobjdump tells no registers: {done.stdout}"
    return int(found[1]), int(found[2])
