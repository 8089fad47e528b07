"""Other systems, played on this one: `python elsewhere.py SYSTEM` with a JSON list of command lines on standard input.

Each command runs in this process as `minibatcher` would; printed is a JSON list of [exit code, output, errors]. The
command `["python", CODE]` runs statements. What is played is what Python lacks there: calls, modules and packages.
"""

import builtins
import contextlib
import ctypes
import importlib
import importlib.machinery
import io
import json
import multiprocessing
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types

# Loaded before anything is taken away: how other people's code gets on without is not our subject.
LOADED_BEFORE = (
    *("asyncio", "concurrent.futures", "ctypes", "importlib.metadata", "shutil", "tempfile", "webbrowser"),
    *("anywidget", "gguf", "IPython.display", "ipywidgets", "jinja2", "jupytext", "matplotlib.pyplot", "nbclient"),
    *("nbformat", "numpy", "safetensors.torch", "sphinx.application", "tokenizers", "torch", "tqdm"),
    *("aiohttp", "fastapi", "prometheus_client", "uvicorn.protocols.http.h11_impl"),
)
# What CPython's documentation marks as "Availability: Unix" (or Linux), as far as anybody might think of using it.
NOT_ON_WINDOWS = {
    os: """
        chown chroot confstr ctermid fchmod fchown fork forkpty getegid geteuid getgid getgroups getloadavg
        getpgid getpgrp getpriority getsid getuid initgroups killpg lchown mkfifo mknod nice openpty
        pidfd_open posix_fadvise posix_fallocate posix_spawn pread pwrite sched_getaffinity
        sched_setaffinity sched_yield setegid seteuid setgid setgroups setpgid setpriority setsid setuid
        statvfs sync sysconf tcgetpgrp uname wait wait3 wait4 waitid
    """,
    signal: """
        ITIMER_PROF ITIMER_REAL ITIMER_VIRTUAL SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT
        SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 SIGWINCH alarm getitimer pause pthread_kill pthread_sigmask
        setitimer siginterrupt sigpending sigwait
    """,
    socket: "AF_UNIX",
    time: "clock_gettime pthread_getcpuclockid tzset",
}
MODULES_NOT_ON_WINDOWS = "crypt fcntl grp nis posix pty pwd readline resource spwd syslog termios tty"
NOT_ON_MACOS = {os: "pidfd_open sched_getaffinity sched_setaffinity", socket: "SO_BINDTODEVICE"}


class Without:
    """In place of the finder of sys.path: some packages are not there, neither as modules nor as installed versions."""

    def __init__(self, *names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        hidden = name.split(".")[0] in self.names
        return None if hidden else importlib.machinery.PathFinder.find_spec(name, path, target)

    def find_distributions(self, *context):
        found = importlib.metadata.MetadataPathFinder.find_distributions(*context)
        return (d for d in found if d.metadata["Name"] not in self.names)

    def invalidate_caches(self):
        importlib.machinery.PathFinder.invalidate_caches()


def without(*packages):
    assert not set(packages) & set(sys.modules), "loaded already"
    place = sys.meta_path.index(importlib.machinery.PathFinder)
    sys.meta_path[place] = Without(*packages)


def take_away(names_by_module):
    for module, names in names_by_module.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)


def refuse_modules(names):
    """To our own code: it alone must do without."""
    real = builtins.__import__

    def importing(name, globals=None, locals=None, fromlist=(), level=0):
        importer = (globals or {}).get("__name__", "")
        if level == 0 and name.split(".")[0] in names and importer.split(".")[0] == "minibatcher":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = importing


def no_file_under(folder):
    """To our own code, which opens them by a plain open()."""
    real = builtins.open

    def opening(file, *args, **options):
        if isinstance(file, str) and file.startswith(folder):
            raise FileNotFoundError(2, "No such file or directory", file)
        return real(file, *args, **options)

    builtins.open = opening


def load_what_is_not_ours():
    for name in LOADED_BEFORE:
        with contextlib.suppress(ModuleNotFoundError):  # an extra that is not installed
            importlib.import_module(name)


class WindowsMemory:
    """GlobalMemoryStatusEx of a machine with 16 GiB, half of them free."""

    @staticmethod
    def GlobalMemoryStatusEx(reference):
        status = reference._obj
        assert status.length == ctypes.sizeof(status) == 64
        status.total, status.free = 16 << 30, 8 << 30
        return 1


def windows(*, load=True):
    """load: libraries too, before anything is taken away; a process that uses none need not wait for them."""
    without("triton")
    if load:
        load_what_is_not_ours()
    take_away(NOT_ON_WINDOWS)
    refuse_modules(set(MODULES_NOT_ON_WINDOWS.split()))
    no_file_under("/proc")
    subprocess.Popen.kill = subprocess.Popen.terminate  # as the one of Windows is
    ctypes.windll = types.SimpleNamespace(kernel32=WindowsMemory)
    sys.platform = "win32"
    platform.system, platform.machine = lambda: "Windows", lambda: "AMD64"


def macos(*, load=True):
    without("triton")
    if load:
        load_what_is_not_ours()
    take_away(NOT_ON_MACOS)
    no_file_under("/proc")
    multiprocessing.set_start_method("spawn", force=True)
    sys.platform = "darwin"
    platform.system, platform.machine = lambda: "Darwin", lambda: "arm64"


def without_extras():
    """Nothing but what `pip install minibatcher` brings."""
    without("anywidget", "gguf", "huggingface_hub", "IPython", "ipykernel", "ipywidgets", "jupytext", "nbclient",
            "nbformat", "nbval", "pynvml", "pytest", "traitlets", "yaml")  # fmt: skip


def run(command):
    """[exit code, output, errors] of one command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if command[0] == "python":
                exec(compile(command[1], "a statement", "exec"), {"__name__": "elsewhere"})
                code = 0
            else:
                from minibatcher.cli import main

                code = main(command)
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
            code = "raised"
    return [code, out.getvalue(), err.getvalue()]


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    commands = json.load(sys.stdin)
    {"Windows": windows, "macOS": macos, "without extras": without_extras}[sys.argv[1]]()
    json.dump([run(command) for command in commands], sys.stdout)
