# @title Set-up: run this cell first
import importlib
import os
import subprocess
import sys

# Where minibatcher comes from if it is not installed here: what pip takes, such as git+https://… or a folder.
SOURCE = os.environ.get("MINIBATCHER_SOURCE", "")


class NotReady(Exception):
    def _render_traceback_(self):  # which notebooks show in place of the stack
        return [f"Not ready: {self}"]


def is_installed():
    try:
        importlib.import_module("minibatcher.here")
    except ModuleNotFoundError:
        sys.modules.pop("minibatcher", None)  # a mere folder of that name
        importlib.invalidate_caches()
        return False
    return True


def install_minibatcher():
    if not SOURCE:
        raise NotReady("minibatcher is not installed here. Write in SOURCE, in this cell, where it is to be had.")
    print(f"Installing minibatcher from {SOURCE} …")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", SOURCE]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"GIT_TERMINAL_PROMPT": "0"})
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith(("fatal:", "ERROR:"))] or lines[-3:]
        raise NotReady(
            f"minibatcher could not be installed from {SOURCE}. See that there is a network, and that the address in "
            "SOURCE, in this cell, is right; then run the cell again. pip said:\n" + "\n".join(said)
        )
    if not is_installed():
        raise NotReady(
            "minibatcher is installed, but this kernel does not see it. If a file or folder named minibatcher stands "
            f"in {os.getcwd()}, rename it. Then restart the kernel and run this cell again."
        )


def set_up():
    if not is_installed():
        install_minibatcher()
    from minibatcher.here import prepare

    return prepare()


here = set_up()
