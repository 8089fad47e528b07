"""The child: runs answers and writes down what they do. It has no right answer, and nothing that it says is trusted."""

from __future__ import annotations

import ast
import ctypes
import io
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from ..judging import Outcome, guarded

_MEMORY, _FILE, _PROCESSES = 4 << 30, 64 << 20, 64
_SENT = 4 << 20  # bytes that one answer may send
_NEW_NS, _NEW_USER, _NEW_PID, _NEW_NET = 0x20000, 0x10000000, 0x20000000, 0x40000000
_NEW_IPC = 0x8000000
_DEATH_SIGNAL = 1
_READ_ALL = 1 << 2  # the capability to read any file
_kept = 0  # capabilities that an answer keeps: none, or that one where Python lies in root's own folders


_MAGIC = re.compile(r"\s*([%!?]|\w+\s*=\s*[%!]|[\w.]+\?{1,2}\s*$)")


class NoMinibatcher:
    """A finder that refuses the package."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "minibatcher":
            raise ImportError("an answer may not import minibatcher")


def serve() -> None:
    """Answer one request a line, until there are no more. The first line tells the protections that are on."""
    hello = json.loads(sys.stdin.readline())
    _warm(hello["labs"])
    on = _protections(hello["hide"])
    print(json.dumps(on), flush=True)
    for line in sys.stdin:
        print(json.dumps(_guarded_run(json.loads(line), on, hello["hide"])), flush=True)


def once() -> None:
    """One request without fork: limits are the parent's, who ends this process."""
    request = json.loads(sys.stdin.readline())
    out = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)
    _run(request, out)
    os._exit(0)


def _warm(labs: list[str]) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    for lab in labs:
        tasks = import_module(f"minibatcher.labkit.tasks.{lab}")
        for name in getattr(tasks, "WARM", ()):  # what each answer would import again, for seconds
            with suppress(ImportError):
                import_module(name)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _protections(hide: list[str]) -> dict[str, bool]:
    """Which ones work here, found out in a child."""
    on = {"own user": False, "name spaces": False}
    global _kept
    if os.geteuid() == 0:
        on["own user"] = _succeeds(_become_nobody)
        if not on["own user"] and sys.platform == "linux":
            _kept = _READ_ALL
            on["own user"] = _succeeds(_become_nobody)
            _kept = _kept if on["own user"] else 0
    if sys.platform == "linux" and _succeeds(lambda: _unshare(hide)):
        on["name spaces"] = True
    return on


def _succeeds(action: Any) -> bool:
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            action()
            os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def _user() -> int:
    return 61000 + os.getpid() % 4000


def _become_nobody(uid: int = 60999) -> None:
    os.setgroups([])
    os.setgid(uid)
    folders = [path for path in sys.path if os.path.isdir(path)]
    if _kept:
        _libc().prctl(8, 1, 0, 0, 0)  # keep capabilities when the user changes
    os.setuid(uid)
    if _kept:
        _no_capabilities()
    for folder in folders:  # raises PermissionError
        os.listdir(folder)
    open(os.__file__, "rb").close()


def _unshare(hide: list[str], own: Sequence[str] = ()) -> None:
    """Name spaces for what is forked from here on, in which the folders to hide are empty. Raises OSError."""
    libc, uid, gid = _libc(), os.geteuid(), os.getegid()
    root = uid == 0
    if libc.unshare(_NEW_NS | _NEW_PID | _NEW_NET | _NEW_IPC | (0 if root else _NEW_USER)):
        raise OSError(ctypes.get_errno(), "unshare")
    if not root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    if libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None):  # recursively private
        raise OSError(ctypes.get_errno(), "mount")
    empty = os.path.abspath("../nothing")
    for folder in filter(os.path.isdir, hide):
        if libc.mount(empty.encode(), os.fsencode(folder), None, 0x1000, None):
            raise OSError(ctypes.get_errno(), "mount")
    for folder in filter(os.path.isdir, (*own, "/dev/shm", "/var/tmp")):  # what is left in these goes with the answer
        if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=64m,mode=1777"):
            raise OSError(ctypes.get_errno(), "mount")


def _no_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _libc().capset(header, (ctypes.c_uint32 * 6)(_kept, _kept))
    _libc().prctl(38, 1, 0, 0, 0)  # no new privileges


def _die_with_parent() -> None:
    if sys.platform == "linux":
        _libc().prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _limit(request: dict, on: dict[str, bool]) -> None:
    import resource

    def cap(name: str, value: int) -> None:
        with suppress(ValueError, OSError, AttributeError):
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))

    have = 0
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        have = int(file.read().split()[0]) * resource.getpagesize()
    cap("RLIMIT_AS", have + _MEMORY)
    cap("RLIMIT_FSIZE", _FILE)
    cap("RLIMIT_CORE", 0)
    cap("RLIMIT_CPU", int(request["seconds"]) + 5)
    cap("RLIMIT_NPROC", _PROCESSES if any(on.values()) else _PROCESSES + _mine())


def _mine() -> int:
    """Threads of this user, who has no limit of his own here."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        with suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count or 1000


def _guarded_run(request: dict, on: dict[str, bool], hide: list[str]) -> dict:
    """Run one answer in a process of its own. Gives the lines that it sent, and how it ended."""
    folder = tempfile.mkdtemp(dir=os.path.abspath(".."))
    inlet, outlet = os.pipe()
    told, teller = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        with suppress(BaseException):
            _keep(request, on, hide, folder, outlet, teller)
        os._exit(1)
    os.close(outlet)
    os.close(teller)
    runner = int(os.read(told, 20) or b"0")
    os.close(told)
    try:
        sent, ended = _collect(inlet, request["seconds"])
    finally:
        for kill, pid in ((os.kill, runner), (os.killpg, runner), (os.kill, keeper)):
            if pid > 1:
                with suppress(OSError):
                    kill(pid, signal.SIGKILL)
        os.close(inlet)
        os.waitpid(keeper, 0)
        remove(folder)
    return {"sent": sent, "ended": ended}


def remove(folder: str) -> None:
    """Remove a folder with all that is in it, however deep."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", folder], check=False)


def _keep(request: dict, on: dict[str, bool], hide: list[str], folder: str, outlet: int, teller: int) -> None:
    uid = _user()
    _die_with_parent()
    if on["own user"]:
        os.chown(folder, uid, uid)
    if on["name spaces"]:
        # The package's copy is needed by the capstone alone; it holds stand-ins for answers to the other labs.
        rest = [] if request["package"] else [os.path.join(request["stage"], "minibatcher")]
        _unshare([*hide, *rest], [folder])
    pid = os.fork()
    if pid:
        os.write(teller, str(pid).encode())
        os.close(teller)
        os.close(outlet)
        os.waitpid(pid, 0)
        os._exit(0)
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)
    os.dup2(outlet, 3)
    os.closerange(4, 4096)
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder, OMP_NUM_THREADS="1")
    tempfile.tempdir = None
    if on["own user"]:
        _become_nobody(uid)
    _limit(request, on)
    if sys.platform == "linux":
        _no_capabilities()
    _die_with_parent()
    _run(request, 3)
    os._exit(0)


def _collect(inlet: int, seconds: float) -> tuple[str, str]:
    """What comes through the pipe, and whether it ended by itself ("end"), by the clock or by its size."""
    deadline, parts, size = time.monotonic() + seconds, [], 0
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([inlet], [], [], left)[0]:
            ended = "time"
            break
        part = os.read(inlet, 1 << 16)
        if not part:
            ended = "end"
            break
        parts.append(part)
        size += len(part)
        if size > _SENT:
            ended = "size"
            break
        if part.endswith(b'"done"\n'):  # a thread or a process that is left over may hold the pipe open
            ended = "end"
            break
    return b"".join(parts).decode(errors="replace"), ended


def _run(request: dict, out: int) -> None:
    """Everything that an answer's child does."""

    def send(message: Any) -> None:
        try:
            line = json.dumps(message)
        except (TypeError, ValueError, RecursionError):
            line = json.dumps(["case", [], " gave something that can't be written down", False])
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(out, data) :]

    task = import_module(f"minibatcher.labkit.tasks.{request['module']}").TASKS[request["exercise"]]
    cases = task.cases(random.Random(request["seed"]))
    sys.stdin = io.StringIO()
    sys.stdout, sys.stderr = (open(fd, "w", encoding="utf-8") for fd in (1, 2))  # noqa: SIM115 - for good
    sys.argv = [""]
    if not request["package"]:
        for name in [name for name in sys.modules if name.split(".")[0] == "minibatcher"]:
            del sys.modules[name]
        sys.meta_path.insert(0, NoMinibatcher())
        sys.path[:] = [path for path in sys.path if path != request["stage"]]
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    space |= dict.fromkeys(("check", "hint", "display", "reveal"), lambda *arguments, **options: None)
    main = type(sys)("__main__")
    main.__dict__.update(space)
    sys.modules["__main__"], space = main, main.__dict__
    for source in request["given"]:
        _try(source, space)
    for source in request["others"]:
        _try(source, space, only_definitions=True)
    for source in request["earlier"]:
        _try(source, space)
    space.pop(request["name"], None)
    send("answer")
    try:
        error = _each(request["answer"], space)
        if error is not None and request["name"] not in space:
            raise error
        answer = space[request["name"]]
    except BaseException as error:
        if isinstance(error, KeyError) and request["name"] not in space:
            send(["broken", f"the cell defines no {request['name']}"])
        else:
            send(["broken", f"the cell raised {_said(error)}"])
        send("done")
        return
    for arguments in cases:
        try:
            outcome = guarded(lambda function, *given: function(*given), task, arguments, answer)
        except BaseException as error:
            outcome = Outcome([], f" raised {_said(error)}")
        send(["case", outcome.seen, outcome.trouble, outcome.unwritten])
    send("done")


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:
        return "an error that can't be shown"


def _try(source: str, space: dict, only_definitions: bool = False) -> None:
    """Run code whose errors are nobody's business here."""
    with suppress(BaseException):
        tree = ast.parse(plain(source))
        for node in tree.body:
            if not only_definitions or _defines(node):
                with suppress(BaseException):
                    _run_statement(node, space, "cell")


def _run_statement(node: ast.stmt, space: dict, name: str) -> None:
    """As a notebook would, without this module's own `from __future__`."""
    exec(compile(ast.Module([node], []), name, "exec", dont_inherit=True), space)


def _each(source: str, space: dict) -> Exception | None:
    """Run an answer's cell statement by statement; the first error, which is nothing if the answer is defined.

    A check or a trial that stands in the same cell may fail here.
    """
    first = None
    for node in ast.parse(plain(source)).body:
        try:
            _run_statement(node, space, "answer")
        except Exception as error:
            first = first or error
    return first


def _defines(node: ast.stmt) -> bool:
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    return isinstance(node, kinds) or (isinstance(node, ast.Try) and all(map(_defines, node.body)))


def plain(source: str) -> str:
    """Python without the magics of notebooks."""
    try:
        ast.parse(source)
        return source
    except SyntaxError:
        lines = source.split("\n")
        if lines and lines[0].startswith("%%"):
            lines = lines[1:]
        return "\n".join(
            line[: len(line) - len(line.lstrip())] + "pass" if _MAGIC.match(line) else line for line in lines
        )
