"""The table of tile sizes: rules that hold on every GPU. Whether the tiles fit is for the compiler to say."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which exists for Linux only")

from minibatcher.attention import triton_tiles

HALF = torch.float16


@pytest.fixture(params=[75, 80, 89, 90, 120])
def arch(request, monkeypatch):
    """As if launched on this GPU."""
    triton_tiles.forget_device()
    with monkeypatch.context() as patch:
        patch.setattr(triton_tiles, "architecture", lambda: request.param)
        yield request.param
    triton_tiles.forget_device()


def is_power_of_two(n):
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_tiles_hold_the_group_and_are_powers_of_two(arch, dtype, head_dim):
    for group in (1, 2, 3, 4, 7, 8, 16, 40):
        for tiles in (
            triton_tiles.ragged_tiles(dtype, head_dim, group),
            triton_tiles.decode_tiles(dtype, head_dim, group),
        ):
            assert tiles.block_m >= group
            assert all(map(is_power_of_two, (tiles.block_m, tiles.block_n, tiles.num_warps)))
            assert tiles.num_stages == 1 or arch >= 80  # loads do not run ahead on 7.5
            if tiles.use_dot:
                assert tiles.block_m >= 16
                assert tiles.block_n >= 16
        assert triton_tiles.ragged_tiles(dtype, head_dim, group).use_dot


def test_decodes_multiply_matrices_where_tensor_cores_help(arch):
    assert triton_tiles.decode_tiles(HALF, 128, 8).use_dot == (arch >= 80)
    assert triton_tiles.decode_tiles(HALF, 128, 1).use_dot == (arch >= 80)
    assert not triton_tiles.decode_tiles(torch.float32, 128, 8).use_dot
    assert triton_tiles.decode_tiles(torch.float32, 256, 16).use_dot  # too many products to hold at once


def test_rows_of_a_tile_by_gpu():
    sizes = {}
    for number in (75, 80, 90):
        triton_tiles.forget_device()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_tiles, "architecture", lambda number=number: number)
            sizes[number] = triton_tiles.ragged_tiles(HALF, 128, 4).block_m
    triton_tiles.forget_device()
    assert sizes[75] == 16
    assert sizes[90] >= 64


def test_splits_fill_the_gpu_and_no_more(monkeypatch):
    triton_tiles.forget_device()
    with monkeypatch.context() as patch:
        patch.setattr(triton_tiles, "num_multiprocessors", lambda: 132)
        assert triton_tiles.default_splits(512, 100_000) == 1
        assert triton_tiles.default_splits(264, 100_000) == 1
        assert triton_tiles.default_splits(263, 100_000) == 2
        assert triton_tiles.default_splits(32, 100_000) == 16
        assert triton_tiles.default_splits(1, 100_000) == 32
        assert triton_tiles.default_splits(1, 255) == 1  # nothing to share out
        assert triton_tiles.default_splits(1, 256) == 2
        assert triton_tiles.default_splits(1, 1024) == 8
    triton_tiles.forget_device()


def test_the_device_is_asked_once_until_it_is_forgotten(monkeypatch):
    arch = {"number": 80}

    class Driver:
        class active:
            @staticmethod
            def get_current_target():
                return type("Target", (), {"arch": arch["number"]})

    monkeypatch.setattr(triton_tiles, "INTERPRETED", False)
    monkeypatch.setattr(triton_tiles.triton.runtime, "driver", Driver)
    triton_tiles.forget_device()
    try:
        assert triton_tiles.architecture() == 80
        arch["number"] = 90
        assert triton_tiles.architecture() == 80
        triton_tiles.forget_device()
        assert triton_tiles.architecture() == 90
        arch["number"] = "gfx942"
        triton_tiles.forget_device()
        assert triton_tiles.architecture() == 80
    finally:
        triton_tiles.forget_device()
