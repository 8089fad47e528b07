"""How large the kernels' tiles are on which GPU, and what all launchers check.

A tile is the part of the scores that a program computes at once: BLOCK_M rows of queries times BLOCK_N keys. Larger
tiles reuse what was loaded more often, until registers or shared memory run out, and how much there is of those depends
on the GPU's compute capability (75 is a T4, 80 an A100, 89 an L4, 90 an H100 or H200).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..errors import DeviceError, InvalidParameter

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E), and exp2 is what the hardware has

# TRITON_INTERPRET is read where a kernel is decorated, so it counts as it was when these modules were imported.
INTERPRETED = triton.knobs.runtime.interpret
# Triton's interpreter computes on the bits of bfloat16 as if they were integers. Tests repair that, and set this.
interpreter_computes_bfloat16 = False


class Tiles(NamedTuple):
    """block_m rows x block_n keys; warps (32 threads each) of a program; loads in flight ahead of the arithmetic.

    use_dot: scores by tl.dot, which needs 16 rows and may use tensor cores; otherwise by product and sum.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    use_dot: bool = True


@cache
def architecture() -> int:
    """The compute capability of the GPU in use times ten; 0 under the interpreter."""
    if INTERPRETED:
        return 0
    arch = triton.runtime.driver.active.get_current_target().arch
    return arch if isinstance(arch, int) else 80  # AMD's are words; tiles of medium size fit there


@cache
def num_multiprocessors() -> int:
    """How many programs run side by side at least; 0 under the interpreter, where they run one by one."""
    if INTERPRETED:
        return 0
    if not torch.cuda.is_available():
        return 132  # kernels are being compiled for a GPU that is not here
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@cache
def ragged_tiles(dtype: torch.dtype, head_dim: int, group: int) -> Tiles:
    """Tiles for a mix of chunked prefill and decode. group: query heads for each KV head, all in one tile's rows."""
    arch, narrow, wide = architecture(), padded(head_dim) <= 64, padded(head_dim) > 128
    even = padded(group) == group  # dividing rows by a group of another size takes registers
    if arch == 0:
        tiles = Tiles(16, 16, 4, 1)  # small, so that short test cases span several tiles
    elif arch < 80:
        # Here tl.dot does without tensor cores, and registers are short.
        tiles = Tiles(16, 16 if wide else 32, 8 if narrow and dtype == torch.float32 else 4, 1)
    elif dtype == torch.float32:
        # Float32 uses none anywhere. 9.0 spills with the wider tile, the others do with the narrower one; for uneven
        # groups four warps are better, as for eight the compiler aims at too few registers each and spills.
        if arch == 90:
            tiles = Tiles(16, 16, 8 if even and not wide else 4, 2)
        else:
            tiles = Tiles(16, 32, 4 if narrow and not even else 8, 2)
    elif arch == 90:
        # The products read the queries from shared memory each time: the wider the tile, the less often.
        tiles = Tiles(64, 64, 8, 3) if wide else Tiles(128, 128 if even else 64, 8, 3)
    else:
        tiles = Tiles(64, 32, 8, 3) if wide else Tiles(128, 64 if even else 32, 8, 3)
    return tiles._replace(block_m=max(tiles.block_m, padded(group)))


@cache
def decode_tiles(dtype: torch.dtype, head_dim: int, group: int) -> Tiles:
    """Tiles for one query a request: the group's query heads are the rows."""
    arch, rows, width = architecture(), padded(group), head_pad(head_dim)
    if dtype != torch.float32 and (arch == 0 or arch >= 80):
        # Even a single row is padded to the 16 of the tensor cores: they idle anyway, as memory sets the pace.
        return Tiles(max(16, rows), 16 if arch == 0 else 32 if width > 128 else 64, 4, 3)
    if rows * width <= 2048:
        # rows x keys x head_dim products at once, spread over 128 threads: more than 32 registers each may spill.
        return Tiles(rows, max(4, min(32, 4096 // (rows * width))), 4, 1, use_dot=False)
    return Tiles(max(16, rows), 16, 4, 1)


@cache
def ladder_tiles(dtype: torch.dtype, head_dim: int) -> Tiles:
    """Tiles for the teaching kernels, whose rows are queries of one head: what fits everywhere."""
    tiles = ragged_tiles(dtype, head_dim, 1)
    return tiles if tiles.block_m == 16 else Tiles(64, 32, 8 if padded(head_dim) > 128 else 4, 2)


@cache
def default_splits(num_programs: int, longest_context: int) -> int:
    """Into how many parts a decode's keys are split: a power of two that gives each multiprocessor two programs.

    num_programs: requests times KV heads; longest_context: as many tokens as a row of the block table can hold. A part
    of fewer than 128 keys would cost more to merge than it saves.
    """
    splits = 1
    while splits < 32 and num_programs * splits < 2 * num_multiprocessors() and 256 * splits <= longest_context:
        splits *= 2
    return splits


def forget_device() -> None:
    """Ask for the device anew at the next launch; needed only where the device changes inside one process."""
    for function in (architecture, num_multiprocessors, ragged_tiles, decode_tiles, ladder_tiles, default_splits):
        function.cache_clear()


@cache
def padded(n: int) -> int:
    """The next power of two: the only sizes that a tile may have."""
    return triton.next_power_of_2(n)


def head_pad(head_dim: int) -> int:
    """Columns of a tile that goes through tl.dot: a power of two, and at least 16."""
    return max(16, padded(head_dim))


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises InvalidParameter unless q [..., num_heads, head_dim] can attend to k, v [..., num_kv_heads, head_dim].

    Raises DeviceError for a precision in which Triton would compute wrong values, or none.
    """
    if k.shape != v.shape or k.shape[-1] != q.shape[-1] or q.shape[-2] % k.shape[-2] or k.shape[-2] == 0:
        raise InvalidParameter(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not go together: keys and values need the "
            "same shape, all the same last dimension, and query heads must be a multiple of KV heads"
        )
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise InvalidParameter("the last dimension of q, k and v must be contiguous; call .contiguous() on them first")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise InvalidParameter(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; give all three the same dtype")
    if q.dtype == torch.bfloat16 and 0 < architecture() < 80:
        raise DeviceError("this GPU (compute capability below 8.0) has no bfloat16; use float16 or float32")
    if q.dtype == torch.bfloat16 and INTERPRETED and not interpreter_computes_bfloat16:
        raise DeviceError("Triton's interpreter computes wrong values in bfloat16; use float16 or float32")
