"""Kernels that a compile check must complain of. Run as a script, it compiles those named and prints a row a line."""

import json
import sys

import torch
import triton
import triton.language as tl

from minibatcher.kernels.compile import compiled_rows


@triton.jit
def multiply(x_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr):
    """x [M, K] by its own transpose, in one piece."""
    row, column = tl.arange(0, M), tl.arange(0, K)
    x = tl.load(x_ptr + row[:, None] * K + column[None, :])
    y = tl.load(x_ptr + column[:, None] + row[None, :] * K)
    tl.store(out_ptr + row[:, None] * M + row[None, :], tl.dot(x, y))  # float32 goes through tensor cores as TF32


@triton.jit
def uneven(out_ptr):
    tl.store(out_ptr + tl.arange(0, 3), 0.0)  # not a power of two: the interpreter runs it, the compiler refuses


@triton.jit
def calls_uneven(out_ptr):
    uneven(out_ptr)


CASES = {
    "fine": lambda x, out: multiply[(1,)](x, out, 32, 32),
    "spills": lambda x, out: multiply[(1,)](x, out, 128, 32, num_warps=1),
    "too much shared memory": lambda x, out: multiply[(1,)](x, out, 16, 4096),
    "refused": lambda x, out: uneven[(1,)](out),
    "refused inside": lambda x, out: calls_uneven[(1,)](out),
    "in TF32": lambda x, out: multiply[(1,)](x.float(), out, 32, 32),
}

if __name__ == "__main__":
    target, names = int(sys.argv[1]), sys.argv[2:]
    x, out = torch.zeros(1 << 16, dtype=torch.float16), torch.zeros(1 << 16)
    for name in names:
        facts = {"kernel": name, "dtype": "float32" if name == "in TF32" else "float16"}
        for row in compiled_rows(target, lambda name=name: CASES[name](x, out), facts):
            print(json.dumps(row), flush=True)
