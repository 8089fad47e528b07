"""A peer that computes nothing: settings say what it claims, and what goes wrong with it."""

import os
import subprocess
import sys
import time
from pathlib import Path

from minibatcher.bench.job import Served

TITLE = "fake engine"


def missing(settings):
    return settings.get("missing")


def environment(job):
    return {"FAKE_BENCH": str(job.threads)}


def serve(job):
    told = job.settings
    if "log" in told:
        with open(told["log"], "a", encoding="utf-8") as log:
            log.write(told["me"] + "\n")
    wrong = told.get("wrong")
    if wrong == "raises":
        raise ValueError("the weights are of cheese")
    if wrong == "dies":
        print("last words")
        sys.stdout.flush()
        os._exit(3)
    if wrong == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(told["pid_file"]).write_text(str(child.pid), encoding="utf-8")
        time.sleep(600)
    step = told.get("step_s", 0.01)
    requests = {
        r.id: ([told.get("token", 7)] * r.output_tokens, [r.arrival_s + step * (i + 1) for i in range(r.output_tokens)])
        for r in job.requests
    }
    first = job.requests[0].id
    if wrong == "one token short":
        requests[first] = tuple(part[:-1] for part in requests[first])
    if wrong == "one answer differs":
        requests[first] = ([1, *requests[first][0][1:]], requests[first][1])
    facts = {"load_s": 2.5, "warm_up": len(job.warm_up), "environment": os.environ.get("FAKE_BENCH")}
    if told.get("secret"):
        facts["ids"] = False
    return Served(requests, facts)
