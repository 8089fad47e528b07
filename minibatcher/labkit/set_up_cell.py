# @title Set-up: run this cell first
import importlib.util
import os
import subprocess
import sys

if getattr(importlib.util.find_spec("minibatcher"), "origin", None) is None:  # not there, or a folder of that name
    # Where it is to be had: git+https://… of your copy, or its folder.
    SOURCE = os.environ.get("MINIBATCHER_SOURCE", "")
    if not SOURCE:
        raise RuntimeError("minibatcher is not installed here; write in SOURCE, in this cell, where it is to be had")
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", SOURCE], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"minibatcher could not be installed from {SOURCE!r}:\n{done.stderr[-1000:]}")
    importlib.invalidate_caches()

from minibatcher.here import prepare

here = prepare()
