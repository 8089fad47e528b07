"""The C++ sources of this folder as a library: compiled once for this very processor, and kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from ..errors import DeviceError

HERE = Path(__file__).parent
SOURCES = ("forward.cpp", "attention.h", "product.h", "switches.h", "vectors.h")
# What -ffast-math allows, by its parts: under that name GCC would also make the whole process, Python included, flush
# subnormal numbers to zero.
FAST = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math")
FLAGS = ("-O3", *FAST, "-ffinite-math-only", "-ffp-contract=fast", "-shared", "-fPIC", "-std=c++17")
DTYPES = {torch.float32: (), torch.bfloat16: ("-DBF16",)}
MINUTES = 5  # a compiler that takes longer is given up


# What can be left out, to see what it brings: its name, and that of its switch in switches.h.
SWITCHES = {
    "weights fetched ahead": "FETCH_WEIGHTS",
    "keys and values fetched ahead": "FETCH_CACHE",
    "chunks as matrix products": "CHUNKS",
    "last layer for the newest tokens alone": "TRIM",
}


@cache
def library(dtype: torch.dtype, target: str | None = None, without: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library for weights in `dtype` (float32 or bfloat16), from the cache folder or compiled now, in seconds.

    target: a compiler's option that names a processor; None is this one. without: names of SWITCHES to turn off.
    Raises DeviceError where there is no compiler, or none that can: with its last words.
    """
    compiler = find_compiler()
    if compiler is None:
        raise DeviceError("the compiled CPU path needs a C++ compiler (c++, g++ or clang++), and there is none here")
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    command = [compiler, *FLAGS, target or native, *DTYPES[dtype], *(f"-D{SWITCHES[name]}=0" for name in without)]
    file = cache_folder() / f"forward-{_key(command)}.so"
    if file.exists():
        with suppress(OSError, AttributeError):  # a damaged file is replaced by a new one
            return _declared(ctypes.CDLL(str(file)))
    _compile(command, file)
    try:
        return _declared(ctypes.CDLL(str(file)))
    except (OSError, AttributeError) as error:
        raise DeviceError(f"{compiler} made a library that can't be loaded ({error})") from None


def find_compiler() -> str | None:
    """$CXX, or the first of c++, g++ and clang++ on the path."""
    names = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def cache_folder() -> Path:
    """Where libraries are kept: MINIBATCHER_CACHE, or minibatcher/ in the user's cache folder.

    Raises DeviceError for a user who has no such folder.
    """
    if own := os.environ.get("MINIBATCHER_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minibatcher"
    except RuntimeError:  # no HOME, and a user whom the system does not know, as in some containers
        raise DeviceError(
            "there is no home folder to keep the C++ library in; set MINIBATCHER_CACHE to a folder"
        ) from None


def _key(command: list[str]) -> str:
    """Changes with the sources, the command and the processor, whose instructions the library uses."""
    digest = hashlib.sha256("\0".join([*command, torch.__version__, _processor()]).encode())
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.machine() + platform.processor()


def _compile(command: list[str], file: Path) -> None:
    """With OpenMP if the compiler has it, else for one thread. The file appears whole or not at all."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            for extra in (["-fopenmp"], []):
                whole = [*command, *extra, str(HERE / SOURCES[0]), "-o", str(made)]
                done = subprocess.run(
                    whole, capture_output=True, encoding="utf-8", errors="replace", timeout=60 * MINUTES
                )
                if done.returncode == 0:
                    made.replace(file)
                    return
    except subprocess.TimeoutExpired:
        raise DeviceError(f"{command[0]} took more than {MINUTES} minutes for the C++ library") from None
    except OSError as error:
        raise DeviceError(
            f"there is nowhere to keep the C++ library ({error}); set MINIBATCHER_CACHE to a folder"
        ) from None
    words = [line.strip() for line in done.stderr.splitlines() if "error" in line or "failed" in line]
    words = words or [f"exit code {done.returncode}"]
    raise DeviceError(f"{command[0]} could not compile the C++ library ({words[0][:300]})")


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    for name, takes, gives in (
        ("workspace_bytes", [pointer, int64, int64], int64),
        ("logits_stride", [pointer], int64),
        ("packed_numbers", [int64, int64], int64),
        ("pack", [pointer, int64, int64, int64, pointer], None),
        ("forward", [pointer, pointer], None),
    ):
        function = getattr(lib, name)
        function.argtypes, function.restype = takes, gives
    return lib
