"""How much memory this computer has for its programs, on each system that Python runs on."""

from __future__ import annotations

import ctypes
import os

from .errors import DeviceError


def host_memory() -> tuple[int, int]:
    """Bytes in all, and bytes that are free or can be had. Raises DeviceError where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":", 1) for line in lines)}
        return found["MemTotal"], found["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):  # only Linux has it
        pass
    if hasattr(ctypes, "windll"):
        return _windows()
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        raise DeviceError("this system does not tell how much memory it has") from None
    return total, total // 2  # macOS tells what is free to its own tools only


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "free", "a", "b", "c", "d", "e")),
    )


def _windows() -> tuple[int, int]:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    kernel32 = getattr(ctypes, "windll").kernel32  # noqa: B009 (only Windows has it, so a type checker elsewhere misses it)
    if not kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise DeviceError("Windows does not tell how much memory it has")
    return status.total, status.free
