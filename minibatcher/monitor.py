"""What a GPU says of itself while an engine runs: busy share, memory and power, through NVML (an optional package)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

from .errors import DeviceError, InvalidParameter, MissingDependency
from .numeric import is_number
from .timeline import DeviceSample, Timeline

T = TypeVar("T")
STOP_TIMEOUT_S = 2.0  # a driver that hangs must not hold up the end of a run


def monitor_for(device: torch.device, clock, interval_s: float = 0.1) -> tuple[GpuMonitor | None, str | None]:
    """A monitor of a CUDA device; or None and a sentence that says why there is none. On a CPU: None, None."""
    if device.type != "cuda":
        return None, None
    try:
        return GpuMonitor(device, clock, interval_s), None
    except (DeviceError, MissingDependency) as error:
        return None, str(error)


class GpuMonitor:
    """Samples one GPU in a thread of its own, every `interval_s` seconds, at times of the engine's `clock`.

    Raises MissingDependency without nvidia-ml-py, and DeviceError where NVML does not know the device or can't tell
    its figures apart from those of its neighbours. After that, no failure of NVML reaches the run that is watched.
    """

    def __init__(self, device: torch.device, clock, interval_s: float = 0.1) -> None:
        if not is_number(interval_s) or interval_s <= 0:
            raise InvalidParameter(f"interval_s must be a number of seconds above 0, not {interval_s!r}")
        try:
            import pynvml
        except ImportError as error:
            raise MissingDependency(
                "GPU utilisation, memory and power are not sampled, since nvidia-ml-py is not installed: "
                "pip install 'minibatcher[gpu]'"
            ) from error
        self.clock, self.interval_s = clock, interval_s
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            weakref.finalize(self, _shut_down, pynvml)
            self._handle = self._find(torch.cuda.get_device_properties(device).uuid)
        except pynvml.NVMLError as error:
            raise DeviceError(f"GPU utilisation, memory and power are not sampled: NVML says «{error}»") from error

    def _find(self, uuid) -> object:
        """NVML's handle of a CUDA device. By UUID: CUDA_VISIBLE_DEVICES renumbers, and NVML keeps its own order."""
        nvml, uuid = self._nvml, str(uuid)
        split = "the GPU is split (MIG), and NVML does not tell the utilisation and the power of one part"
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError:
            nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")  # raises once more if it is no part of a GPU either
            raise DeviceError(f"GPU utilisation, memory and power are not sampled: {split}") from None
        try:
            mig, _ = nvml.nvmlDeviceGetMigMode(handle)
        except nvml.NVMLError:  # a GPU that knows no MIG
            return handle
        if mig == nvml.NVML_DEVICE_MIG_ENABLE:
            raise DeviceError(f"GPU utilisation, memory and power are not sampled: {split}")
        return handle

    @contextmanager
    def watch(self, timeline: Timeline) -> Iterator[None]:
        """Fill `timeline.device_samples` while the block runs; what NVML refused goes to header["gpu_monitor"], once.

        The first sample is taken as the block begins and the last as it ends, however it ends.
        """
        samples: list[DeviceSample] = []
        timeline.device_samples = samples
        refusals: dict[str, str] = {}
        stop = threading.Event()
        thread = threading.Thread(
            target=self._sample_until, args=(stop, samples, refusals), name="gpu-monitor", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(STOP_TIMEOUT_S)
            if thread.is_alive():
                timeline.device_samples = list(samples)  # whatever comes late does not belong to this run
                refusals["the end"] = f"NVML gave no answer for {STOP_TIMEOUT_S:g} s"
            if refusals:
                reasons = "; ".join(f"{what} ({why})" for what, why in refusals.items())
                timeline.header["gpu_monitor"] = f"not everything could be sampled: {reasons}"

    def _sample_until(self, stop: threading.Event, samples: list[DeviceSample], refusals: dict[str, str]) -> None:
        last = False
        while True:
            try:
                sample = self._sample(refusals)
            except Exception as error:  # nobody would see it in this thread, and the run goes on
                refusals["the rest"] = f"{type(error).__name__}: {error}"
                return
            if sample[1:] == (None, None, None):  # a GPU that is lost, or tells nothing: no use to go on asking
                return
            samples.append(sample)
            if last:
                return
            last = stop.wait(self.interval_s)

    def _sample(self, refusals: dict[str, str]) -> DeviceSample:
        nvml, handle = self._nvml, self._handle

        def told(what: str, ask: Callable[[], T]) -> T | None:
            try:
                return ask()
            except nvml.NVMLError as error:
                refusals.setdefault(what, str(error))
                return None

        return DeviceSample(
            self.clock.now(),
            told("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            told("memory", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
            told("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),  # from milliwatts
        )


def _shut_down(nvml) -> None:
    """NVML counts who has begun; each of them ends once. Where even that fails, nothing is left to be saved."""
    with suppress(nvml.NVMLError):
        nvml.nvmlShutdown()
