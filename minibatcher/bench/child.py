"""One question to one benchmarked engine, in a process of its own: `python -m minibatcher.bench.child IN OUT`.

IN is JSON: {"peer", "ask", "job", "settings"}; ask is "about" (title, and why it can't run here), "environment"
(variables for the process that serves) or "serve". OUT gets {"answer": ...} or {"error": a sentence}. The interpreter
may be another environment's, so nothing of minibatcher but `bench.job` and the peer's own module is imported.
"""

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from .job import Job


def peer_module(peer: str):
    """A peer of this package by its short name, or any module by its dotted one."""
    return importlib.import_module(peer if "." in peer else f"minibatcher.bench.peers.{peer}")


def answer(question: dict[str, Any]) -> Any:
    """What OUT's "answer" holds."""
    module, ask = peer_module(question["peer"]), question["ask"]
    if ask == "about":
        return {"title": module.TITLE, "missing": module.missing(question["settings"])}
    job = Job.from_json(json.dumps(question["job"]))
    if ask == "environment":
        return module.environment(job) if hasattr(module, "environment") else {}
    begun = time.perf_counter()
    served = module.serve(job)
    return {"served": json.loads(served.to_json()), "serve_s": time.perf_counter() - begun}


def main(question_file: str, answer_file: str) -> None:
    os.dup2(2, 1)  # whatever libraries print goes to standard error
    question = json.loads(Path(question_file).read_text(encoding="utf-8"))
    try:
        told = {"answer": answer(question)}
    except Exception as error:
        traceback.print_exc()
        ours = any(kind.__name__ == "MinibatcherError" for kind in type(error).__mro__)  # these are sentences
        told = {"error": str(error) if ours else f"{type(error).__name__}: {str(error)[:500]}"}
    Path(answer_file).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
