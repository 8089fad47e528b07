"""«This machine» as figures: rates that PyTorch reaches here, measured in a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from .errors import DeviceError, InvalidParameter
from .hardware import BYTES, Device
from .host_memory import host_memory
from .provenance import hardware

NAME = "this-machine"
# Far beyond any cache: the largest of today's server CPUs hold a few hundred MB, those of GPUs a hundred.
COPY_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
# One product cannot tell the rate: a library may like one shape more than another.
SIZES = {"cpu": (512, 1024, 2048), "cuda": (2048, 4096, 8192)}


def measure_device(
    device: str = "cpu",
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    seconds: float = 3.0,
    progress: Callable[[str], None] | None = None,
) -> Device:
    """Measure this machine's memory bandwidth and matrix rates, with torch's present number of threads.

    bandwidth: the most bytes/s that memory gave, in a copy (read and written bytes counted) or in a matrix-vector
    product, which reads a matrix as a decode step reads the weights; `source` tells each, since a library's products
    may read one dtype slower than another. flops: for each dtype the best of several square products. Each figure is a
    median of several runs; all take about twice `seconds` together with their preparation.
    progress: called with a line for each measurement.
    Raises DeviceError for a device that is not there, InvalidParameter for an unknown dtype or no time.
    """
    unknown = [name for name in dtypes if name not in BYTES]
    if unknown or not dtypes:
        raise InvalidParameter(f"dtypes must be among {', '.join(BYTES)}, not {unknown[0] if unknown else 'none'!r}")
    if not seconds > 0:
        raise InvalidParameter(f"seconds must be above 0, not {seconds!r}")
    where = _device(device)
    budget = seconds / (1 + 2 * len(dtypes))
    tell = progress or (lambda line: None)

    total_bytes = _memory_bytes(where)
    copy = _copy_bandwidth(where, min(COPY_BYTES[where.type], total_bytes // 16), budget)
    tell(f"copy {copy / 1e9:.1f} GB/s, read and written bytes counted")
    reads, flops = {}, {}
    for name in dtypes:
        dtype = getattr(torch, name)
        reads[name] = _read_bandwidth(where, dtype, min(COPY_BYTES[where.type], total_bytes // 16), budget)
        tell(f"{name}: matrix-vector products read {reads[name] / 1e9:.1f} GB/s")
        flops[name] = _matrix_rate(where, dtype, budget)
        tell(f"{name}: matrix products {flops[name] / 1e9:,.0f} GFLOP/s")

    facts = hardware(where)
    count = facts.get("threads", 0)
    threads = f", {count} thread{'s' * (count != 1)}" if count else ""
    read_figures = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in reads.items())
    return Device(
        NAME,
        memory_bytes=total_bytes,
        bandwidth=max(copy, *reads.values()),
        flops=flops,
        source=(
            f"measured on {facts['device']}{threads}, torch {torch.__version__}: copy {copy / 1e9:.1f} GB/s (read and "
            f"written), matrix-vector products {read_figures} GB/s"
        ),
        measured=True,
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"unknown device {name!r}; cpu and cuda can be measured") from None
    if device.type not in COPY_BYTES:
        raise DeviceError(f"device {name!r} can't be measured; cpu and cuda can")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("PyTorch finds no CUDA device here; measure the cpu")
    return device


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory()[0]


def _copy_bandwidth(device: torch.device, num_bytes: int, seconds: float) -> float:
    """Bytes/s, read and written together."""
    source = torch.ones(num_bytes // 8, device=device)  # half of them for each of the two buffers
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _median_time(lambda: target.copy_(source), device, seconds)


def _read_bandwidth(device: torch.device, dtype: torch.dtype, num_bytes: int, seconds: float) -> float:
    """Bytes/s of a weight matrix that one token's row passes through, layer by layer."""
    width = 4096
    height = num_bytes // (width * dtype.itemsize)
    weight = torch.ones(height, width, device=device, dtype=dtype)
    row = torch.ones(1, width, device=device, dtype=dtype)
    return weight.nbytes / _median_time(lambda: torch.nn.functional.linear(row, weight), device, seconds)


def _matrix_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of the best of several square products."""
    best = 0.0
    for n in SIZES[device.type]:
        a = torch.randn(n, n, device=device).to(dtype)
        took = _median_time(partial(torch.matmul, a, a), device, seconds / len(SIZES[device.type]))
        best = max(best, 2 * n**3 / took)
        if 8 * took > seconds:  # the next is eight times as much: a dtype that this machine only emulates
            break
    return best


def _median_time(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median seconds of at least three runs, after one that warms up; stops when the time is spent."""
    _timed(run, device)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < 1000):
        times.append(_timed(run, device))
    return median(times)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun
