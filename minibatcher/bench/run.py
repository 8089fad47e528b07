"""Every peer on the same job, round by round, each run in a fresh process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .bound import share_of_bound
from .figures import WrongAnswer, check_served, figures, output_hashes
from .job import Job, Served
from .process import ProcessFailed, ask

CHILD, RATES = "minibatcher.bench.child", "minibatcher.bench.rates"
OPENMP = ("OMP_", "KMP_", "GOMP_", "MKL_")  # variables that decide how threads wait, and where they run
QUICK_S = 120.0  # for questions that load no model; an import from a cold disk may take a while


@dataclass(frozen=True)
class Peer:
    """One column: a peer's module with its settings.

    name: as on the command line, "vllm" or "minibatcher:plain". module: a module of bench.peers, or a dotted name of
    one's own. python: the interpreter that it needs, None for this one.
    """

    name: str
    module: str
    title: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None


def about(peer: Peer) -> tuple[Peer, str | None]:
    """The peer with its title, and a sentence why it can't run here, None if it can. Raises ProcessFailed."""
    question = {"peer": peer.module, "ask": "about", "settings": dict(peer.settings)}
    told, _ = ask(CHILD, question, timeout_s=QUICK_S, python=peer.python)
    variant = peer.name.partition(":")[2]
    title = f"{told['title'].partition(' (')[0]} ({variant})" if variant else told["title"]
    return replace(peer, title=title), told["missing"]


def measure_rates(dtype: str, threads: int, seconds: float = 3.0) -> dict[str, Any]:
    """bandwidth (bytes/s), flops (FLOP/s) and source, measured in a fresh process (measure.measure_device says for how
    long), and others_share, as Usage has it. Raises ProcessFailed."""
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    question = {"dtype": dtype, "threads": threads, "seconds": seconds}
    rates, usage = ask(RATES, question, timeout_s=10 * QUICK_S, env=env)
    return rates | {"others_share": usage.others_share}


def order(peers: Sequence[Peer], round_index: int) -> list[Peer]:
    """Forwards, then backwards, then both again from the next peer on: nobody is always first, or beside the same."""
    first = round_index // 2 % len(peers)
    turned = [*peers[first:], *peers[:first]]
    return turned[::-1] if round_index % 2 else turned


def run_once(peer: Peer, job: Job, *, timeout_s: float, bound: Callable[..., dict] | None = None) -> dict[str, Any]:
    """One run of one peer, as plain data: peer, failure (None, or a sentence), figures, output_hashes, usage, facts.

    bound: called with steps and seconds where the peer tells its steps. Nothing is raised but KeyboardInterrupt.
    """
    run: dict[str, Any] = {"peer": peer.name, "failure": None}
    job = replace(job, settings=dict(peer.settings))
    question = {"peer": peer.module, "job": asdict(job)}
    threads = str(job.threads)
    env = {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    try:
        own, _ = ask(CHILD, question | {"ask": "environment"}, timeout_s=QUICK_S, python=peer.python)
        env |= own
        run["environment"] = {k: v for k, v in (os.environ | env).items() if k in env or k.startswith(OPENMP)}
        told, usage = ask(CHILD, question | {"ask": "serve"}, timeout_s=timeout_s, python=peer.python, env=env)
        served = Served(**told["served"])
        run |= {"usage": asdict(usage), "facts": {k: v for k, v in served.facts.items() if k != "steps"}}
        check_served(job, served)
    except (ProcessFailed, WrongAnswer) as problem:
        return run | {"failure": str(problem), "log": getattr(problem, "log", "")}
    run["figures"] = found = figures(job, served)
    # A peer that does not tell how long it loaded: all that it took before the replay, warm-up included.
    run["load_s"] = served.facts.get("load_s", told["serve_s"] - found["seconds"])
    run["output_hashes"] = output_hashes(served)
    if bound and served.facts.get("steps"):
        run["bound"] = bound(served.facts["steps"], found["seconds"])
    return run


def run_rounds(
    peers: Sequence[Peer],
    job: Job,
    *,
    runs: int,
    timeout_s: float,
    model=None,
    rates: Mapping[str, float] | None = None,
    progress: Callable[[Peer, int, int], None] | None = None,
) -> tuple[list[dict[str, Any]], bool]:
    """All runs that were done, each with its "round" (from 0), and whether an interrupt ended them early.

    A peer that fails is told so in its run and is not run again. model: a hardware.ModelSpec, with rates for the bound.
    progress: called before each run with the peer, the round, and how many runs are behind.
    """

    def bound(steps: list[list[float]], seconds: float) -> dict[str, Any]:
        assert rates is not None  # only called where they are
        return share_of_bound(steps, model, job.dtype, rates, seconds)

    done: list[dict[str, Any]] = []
    failed: set[str] = set()
    try:
        for index in range(runs):
            for position, peer in enumerate(order(peers, index)):
                if peer.name in failed:
                    continue
                if progress:
                    progress(peer, index, index * len(peers) + position)
                run = run_once(peer, job, timeout_s=timeout_s, bound=bound if rates and model else None)
                done.append({"round": index} | run)
                if run["failure"]:
                    failed.add(peer.name)
    except KeyboardInterrupt:
        return done, True
    return done, False
