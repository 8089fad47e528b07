"""How long a launch takes: a warm-up, then the median of several runs, each from a cold cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

Timer = Callable[[Callable[[], object]], float]  # runs a function several times; seconds of one run


def wall_timer(run: Callable[[], object]) -> float:
    """Seconds by the clock on the wall, for trials of the benchmark on a CPU; its numbers say nothing of kernels."""
    run()
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def timer_for(device: torch.device) -> Timer:
    """The one for this device, which becomes the current one, as Triton launches there."""
    if device.type == "cpu":
        return wall_timer
    if device.index is not None:
        torch.cuda.set_device(device)
    return CudaTimer()


class CudaTimer:
    """Seconds of device time of one run of a function.

    Before each run a buffer many times the size of the L2 cache is read, so that nothing is found there; that also
    keeps the device busy while the host prepares the run's launches, which are therefore not part of the time.
    """

    def __init__(self, repeats: int = 15, seconds: float = 1.0) -> None:
        self.repeats, self.seconds = repeats, seconds
        # 1 GiB: the L2 cache of an H200 has 50 MiB, a B200's 126, and to read it takes an H200 a quarter of a
        # millisecond, longer than a host takes for a few launches.
        self.buffer = torch.zeros(1 << 28, dtype=torch.float32, device="cuda")

    def __call__(self, run: Callable[[], object]) -> float:
        run()  # compiles, and fills what is filled on first use
        times = [self._once(run)]
        while len(times) < self.repeats and sum(times) < self.seconds:
            times.append(self._once(run))
        return median(times)

    def _once(self, run: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.buffer.sum()  # not written: the cache would still be writing it to memory during the run
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
