"""A GPU watched through NVML while the engine runs. Here NVML is a stand-in module that says what a test wants."""

import gc
import json
import random
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from fakes import fake_engine

from minibatcher import monitor as monitor_module
from minibatcher.clock import WallClock
from minibatcher.errors import DeviceError, InvalidParameter, MissingDependency
from minibatcher.monitor import GpuMonitor, monitor_for
from minibatcher.request import Request, SamplingParams
from minibatcher.timeline import DeviceSample, Timeline

GPU = torch.device("cuda", 1)
UUID = "7a1f0c2e-55aa-4b1d-9c3e-0d2b6f8e4c11"  # what PyTorch tells of the device: NVML's own has GPU- in front
STEP_S = 0.01


class NVMLError(Exception):
    """As pynvml's: its text is NVML's."""


class FakeNVML:
    """Two GPUs in an order that is not CUDA's. `refuse` holds an error for each function that shall fail."""

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self) -> None:
        self.uuids = {f"GPU-{UUID}": "right", "GPU-00000000-1111-2222-3333-444444444444": "wrong"}
        self.refuse: dict[str, Exception] = {}
        self.mig = {}
        self.num_users = 0
        self.asked_by = set()
        self.utilisation, self.used, self.milliwatts = 37, 5_123_456_789, 98_765

    def _answer(self, name, handle, value):
        self.asked_by.add(threading.current_thread().name)
        if name in self.refuse:
            raise self.refuse[name]
        assert handle == "right"
        return value

    def nvmlInit(self):
        if "init" in self.refuse:
            raise self.refuse["init"]
        self.num_users += 1

    def nvmlShutdown(self):
        self.num_users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.uuids:
            raise NVMLError("Not Found")
        return self.uuids[uuid]

    def nvmlDeviceGetMigMode(self, handle):
        if handle not in self.mig:
            raise NVMLError("Not Supported")
        return self.mig[handle]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self._answer("utilisation", handle, SimpleNamespace(gpu=self.utilisation, memory=91))

    def nvmlDeviceGetMemoryInfo(self, handle):
        return self._answer("memory", handle, SimpleNamespace(total=80 << 30, free=1, used=self.used))

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._answer("power", handle, self.milliwatts)


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid={1: UUID}[device.index])
    )
    return fake


def watched_engine(nvml, interval_s: float = 0.004, during_step=lambda number: None):
    """An engine on the wall's clock whose steps take STEP_S seconds, and its monitor."""
    engine = fake_engine("continuous", max_num_seqs=2)
    engine.clock, run, steps = WallClock(), engine.runner.run, iter(range(1_000_000))

    def slow(plan):
        time.sleep(STEP_S)
        during_step(next(steps))
        return run(plan)

    engine.runner.run = slow
    engine.monitor = GpuMonitor(GPU, engine.clock, interval_s)
    return engine


def requests(n: int = 3, output: int = 6) -> list[Request]:
    rng = random.Random(n)
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return [Request(f"r{i}", [rng.randrange(1000) for _ in range(4 + i)], params) for i in range(n)]


def monitor_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gpu-monitor"]


def test_samples_at_the_engines_times_in_the_right_units(nvml):
    def during_step(number):
        if number == 5:
            nvml.utilisation, nvml.used, nvml.milliwatts = 100, 6_000_000_001, 701_500

    engine = watched_engine(nvml, during_step=during_step)
    time.sleep(0.05)  # the clock that counts is the engine's, which the run sets back to zero
    timeline = engine.run(requests())
    samples = timeline.device_samples
    assert samples[0][1:] == (0.37, 5_123_456_789, 98.765)
    assert samples[-1][1:] == (1.0, 6_000_000_001, 701.5)
    assert all(type(sample) is DeviceSample for sample in samples)
    times = [sample.time for sample in samples]
    assert times == sorted(times) and 0 <= times[0] < timeline.steps[0].end
    assert timeline.steps[-1].end <= times[-1] <= engine.clock.now()
    changed = next(sample.time for sample in samples if sample.power_w == 701.5)
    assert timeline.steps[5].start < changed < timeline.steps[9].end
    assert len(samples) > len(timeline.steps) / 2  # 4 ms between samples, 10 ms a step, on a machine that may be busy
    assert "gpu_monitor" not in timeline.header
    assert nvml.asked_by == {"gpu-monitor"} and not monitor_threads()


def test_each_run_has_its_own_samples(nvml):
    engine = watched_engine(nvml)
    first = engine.run(requests())
    kept = list(first.device_samples)
    nvml.milliwatts = 50_000
    second = engine.run(requests())
    assert first.device_samples == kept and {sample.power_w for sample in kept} == {98.765}
    assert {sample.power_w for sample in second.device_samples} == {50.0}


def test_saved_and_loaded_with_the_run(nvml, tmp_path):
    timeline = watched_engine(nvml).run(requests())
    timeline.save(tmp_path / "run.json")
    assert Timeline.load(tmp_path / "run.json").device_samples == timeline.device_samples != []


def test_found_by_uuid_not_by_number(nvml):
    monitor, why = monitor_for(GPU, WallClock())
    assert why is None and monitor._handle == "right" and monitor.interval_s == 0.1


def test_unknown_device_gets_a_sentence(nvml):
    nvml.uuids = {"GPU-00000000-1111-2222-3333-444444444444": "wrong"}
    with pytest.raises(DeviceError, match="not sampled: NVML says «Not Found»"):
        GpuMonitor(GPU, WallClock())
    assert monitor_for(GPU, WallClock())[0] is None


def test_part_of_a_split_gpu_gets_a_sentence(nvml):
    nvml.mig["right"] = (nvml.NVML_DEVICE_MIG_ENABLE, 0)
    assert monitor_for(GPU, WallClock()) == (
        None,
        "GPU utilisation, memory and power are not sampled: the GPU is split (MIG), and NVML does not tell the "
        "utilisation and the power of one part",
    )
    nvml.mig["right"] = (0, nvml.NVML_DEVICE_MIG_ENABLE)  # only after the next reboot
    assert monitor_for(GPU, WallClock())[0] is not None
    nvml.uuids = {f"MIG-{UUID}": "part"}
    assert "the GPU is split (MIG)" in monitor_for(GPU, WallClock())[1]


def test_no_driver_gets_a_sentence(nvml):
    nvml.refuse["init"] = NVMLError("Driver Not Loaded")
    monitor, why = monitor_for(GPU, WallClock())
    assert monitor is None and why.endswith("NVML says «Driver Not Loaded»") and nvml.num_users == 0


def test_without_the_package_a_gpu_gets_a_sentence_and_a_cpu_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor, why = monitor_for(GPU, WallClock())
    assert monitor is None and "pip install 'minibatcher[gpu]'" in why
    assert monitor_for(torch.device("cpu"), WallClock()) == (None, None)
    with pytest.raises(MissingDependency):
        GpuMonitor(GPU, WallClock())


@pytest.mark.parametrize("interval_s", [0, -0.1, float("nan"), True, "fast"])
def test_interval_must_be_a_time(nvml, interval_s):
    with pytest.raises(InvalidParameter, match="interval_s"):
        GpuMonitor(GPU, WallClock(), interval_s)


def test_missing_permission_leaves_the_rest(nvml):
    nvml.refuse["power"] = NVMLError("Insufficient Permissions")
    timeline = watched_engine(nvml).run(requests())
    assert len(timeline.device_samples) > 3
    assert {sample[1:] for sample in timeline.device_samples} == {(0.37, 5_123_456_789, None)}
    assert timeline.header["gpu_monitor"] == "not everything could be sampled: power (Insufficient Permissions)"
    json.dumps(timeline.header)


def test_lost_gpu_ends_the_samples_and_not_the_run(nvml):
    def during_step(number):
        if number == 6:
            nvml.refuse |= dict.fromkeys(["utilisation", "memory", "power"], NVMLError("GPU is lost"))

    timeline = watched_engine(nvml, during_step=during_step).run(requests())
    assert {r.finish_reason for r in timeline.requests.values()} == {"length"}
    assert 0 < timeline.device_samples[-1].time < timeline.steps[8].end < timeline.duration
    assert (None, None, None) not in [sample[1:] for sample in timeline.device_samples]
    assert "power (GPU is lost)" in timeline.header["gpu_monitor"]


def test_any_other_failure_ends_the_samples_and_not_the_run(nvml):
    nvml.refuse["memory"] = OSError("libnvidia-ml.so is gone")
    timeline = watched_engine(nvml).run(requests())
    assert timeline.device_samples == [] and timeline.requests["r2"].finish_reason == "length"
    assert "the rest (OSError: libnvidia-ml.so is gone)" in timeline.header["gpu_monitor"]


def test_hanging_driver_does_not_hold_up_the_end(nvml, monkeypatch):
    monkeypatch.setattr(monitor_module, "STOP_TIMEOUT_S", 0.05)
    release, answer = threading.Event(), nvml.nvmlDeviceGetPowerUsage
    num_asked = iter(range(1000))
    nvml.nvmlDeviceGetPowerUsage = lambda handle: (next(num_asked) > 2 and release.wait(20)) or answer(handle)
    timeline = watched_engine(nvml).run(requests())
    assert "the end (NVML gave no answer for 0.05 s)" in timeline.header["gpu_monitor"]
    (thread,) = monitor_threads()
    release.set()
    thread.join(5)
    assert len(timeline.device_samples) == 3 and not thread.is_alive()


def test_thread_ends_with_an_exception(nvml):
    def during_step(number):
        if number == 4:
            raise RuntimeError("out of memory")

    engine = watched_engine(nvml, during_step=during_step)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.run(requests())
    assert not monitor_threads()
    assert engine.timeline.device_samples[-1].time >= engine.timeline.steps[-1].end


def test_interrupted_run_keeps_its_samples(nvml):
    def during_step(number):
        if number == 4:
            signal.raise_signal(signal.SIGINT)

    timeline = watched_engine(nvml, during_step=during_step).run(requests(output=20))
    assert timeline.header["interrupted"] is True and len(timeline.steps) == 5
    assert timeline.device_samples[-1].time >= timeline.steps[-1].end
    assert not monitor_threads()


def test_refused_request_starts_no_monitor(nvml):
    engine = watched_engine(nvml)
    with pytest.raises(InvalidParameter):
        engine.run([*requests(1), *requests(1)])
    assert nvml.asked_by == set() and engine.timeline.device_samples == []


def test_nvml_is_given_back_with_the_monitor(nvml):
    monitor = GpuMonitor(GPU, WallClock())
    assert nvml.num_users == 1
    with monitor.watch(Timeline()):
        pass
    assert nvml.num_users == 1
    del monitor
    gc.collect()
    assert nvml.num_users == 0
