"""Kernels that a compile check must complain of, compiled for one target; run as a script, it prints a row a line."""

import json
import sys

import torch
import triton
import triton.language as tl

from minibatcher.kernels.compile import compiled_rows


@triton.jit
def multiply(x_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, tl.dot(x, x))


@triton.jit
def uneven(out_ptr):
    tl.store(out_ptr + tl.arange(0, 3), 0.0)  # not a power of two: the interpreter runs it, the compiler refuses


CASES = {
    "fine": lambda x, out: multiply[(1,)](x, out, SIZE=64),
    "spills": lambda x, out: multiply[(1,)](x, out, SIZE=256, num_warps=1),
    "too much shared memory": lambda x, out: multiply[(1,)](x, out, SIZE=512, num_warps=8),
    "refused": lambda x, out: uneven[(1,)](out),
}

if __name__ == "__main__":
    target, names = int(sys.argv[1]), sys.argv[2:]
    x, out = torch.zeros(512 * 512, dtype=torch.float16), torch.zeros(512 * 512)
    for name in names:
        for row in compiled_rows(target, lambda name=name: CASES[name](x, out), {"kernel": name, "dtype": "float16"}):
            print(json.dumps(row))
