"""The tests' own additions to Triton's interpreter: without them, a stray access or bfloat16 would go unnoticed."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which exists for Linux only")

import interpreter
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from minibatcher.attention import triton_tiles

if not triton_tiles.INTERPRETED:
    pytest.skip("there is a GPU, and kernels are not interpreted", allow_module_level=True)
interpreter.install()


@triton.jit
def copy_kernel(to_ptr, from_ptr, n, to_offset, from_offset, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(to_ptr + i + to_offset, tl.load(from_ptr + i + from_offset, mask=i < n), mask=i < n)


@triton.jit
def multiply_kernel(out_ptr, a_ptr, b_ptr):
    i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + i, tl.dot(tl.load(a_ptr + i), tl.load(b_ptr + i)))


@triton.jit
def convert_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def add_kernel(out_ptr, x_ptr):
    i = tl.arange(0, 4)
    tl.store(out_ptr + i, tl.load(x_ptr + i) + tl.load(x_ptr + i))


@pytest.mark.parametrize(
    ("n", "to_offset", "from_offset", "what"),
    [(5, 0, 1, "load"), (5, 1, 0, "store"), (1, 0, -1, "load"), (1, -1, 0, "store"), (8, 0, 10_000, "load")],
)
def test_an_access_out_of_bounds_is_an_error(n, to_offset, from_offset, what):
    room = torch.arange(40.0).split(5)  # neighbours in memory, so that the access would do no visible harm
    copy_kernel[(1,)](room[2], room[4], 5, 0, 0, BLOCK=8)
    assert room[2].tolist() == [20.0, 21.0, 22.0, 23.0, 24.0]
    with pytest.raises(Exception, match=f"{what} out of bounds"):
        copy_kernel[(1,)](room[2], room[4], n, to_offset, from_offset, BLOCK=8)


def test_views_count_and_not_the_memory_around_them():
    every_other = torch.arange(20.0)[1::2]  # numbers 1 to 19, with gaps that belong to it
    out = torch.zeros(8)
    copy_kernel[(1,)](out, every_other, 8, 0, 0, BLOCK=8)
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    with pytest.raises(Exception, match="1 of 8 addresses"):
        copy_kernel[(1,)](out, every_other, 8, 0, 12, BLOCK=8)


def test_bfloat16_matrices_are_multiplied_in_float32():
    a, b = torch.randn(2, 16, 16).bfloat16().unbind(0)
    out = torch.zeros(16, 16)
    multiply_kernel[(1,)](out, a, b)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), atol=1e-5, rtol=1e-5)


def test_conversions_round_as_torch_does():
    x = torch.randn(64)
    x[:8] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40])
    short, back = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    convert_kernel[(1,)](short, x, BLOCK=64)
    torch.testing.assert_close(short, x.bfloat16(), atol=0, rtol=0, equal_nan=True)
    convert_kernel[(1,)](back, short, BLOCK=64)
    torch.testing.assert_close(back, x.bfloat16().float(), atol=0, rtol=0, equal_nan=True)


def test_other_bfloat16_arithmetic_is_refused():
    x = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="convert to float32"):
        add_kernel[(1,)](x, x)


@pytest.mark.parametrize(("method", "found"), [("create_trans", "self arg perm"), ("create_gone", "nothing")])
def test_an_interpreter_that_has_changed_is_noticed(method, found):
    with pytest.raises(RuntimeError, match=rf"has changed: InterpreterBuilder\.{method} takes '{found}'.*adapt it"):
        interpreter.check_unchanged({(InterpreterBuilder, method): "self arg"})


def test_poisoned_memory():
    with interpreter.poisoned_memory():
        assert torch.empty((3, 2), dtype=torch.float16).isnan().all()
