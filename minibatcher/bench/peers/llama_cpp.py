"""llama.cpp's server in a process of its own; token ids go in and come out over HTTP, one connection a request."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from ..job import Clock, Job, JobRequest, Served
from ._common import Outputs, lacks, longest, openmp, versions

TITLE = "llama.cpp server"
SETTINGS: dict[str, Any] = {
    "slots": 64,
    "batch_size": 2048,  # tokens a step may have in all, and
    "ubatch_size": 512,  # at once: both are its defaults
    "start_s": 300,  # longest wait for a loaded model, in seconds
}


def missing(settings: dict[str, Any]) -> str | None:
    wanted = settings.get("server") or os.environ.get("MINIBATCHER_LLAMA_SERVER")
    if _server(settings) is None:
        if wanted:
            return f"llama.cpp's server is not at {wanted!r}, where the settings or MINIBATCHER_LLAMA_SERVER say it is"
        return (
            "llama.cpp's server is not installed (no llama-server on the PATH; or name it in MINIBATCHER_LLAMA_SERVER)"
        )
    if lacks("gguf"):
        return "llama.cpp needs the model as a GGUF file (pip install 'minibatcher[gguf]' writes it)"
    return None


def environment(job: Job) -> dict[str, str]:
    return openmp(job, "active")  # the server inherits it; passive was a quarter slower on an idle machine


def _server(settings: dict[str, Any]) -> str | None:
    return shutil.which(settings.get("server") or os.environ.get("MINIBATCHER_LLAMA_SERVER") or "llama-server")


def serve(job: Job) -> Served:
    from ..models import write_gguf

    settings = SETTINGS | job.settings
    server = _server(settings)
    if server is None:
        raise RuntimeError(missing(settings))
    weights = Path(job.model, "model.safetensors")
    file = weights.with_name(f"llama_cpp-{job.dtype}.gguf")
    if not file.exists() or file.stat().st_mtime < weights.stat().st_mtime:
        write_gguf(job.model, file, job.dtype)
    command = [server, *arguments(job, settings, file)]
    loading = time.perf_counter()
    with _running(command, settings["start_s"]) as port:
        load_s = time.perf_counter() - loading
        if job.warm_up:
            replay(job.warm_up, port)
        outputs = replay(job.requests, port)
    version = subprocess.run([server, "--version"], capture_output=True, encoding="utf-8", timeout=60)
    facts = {
        "versions": versions("gguf") | {"llama.cpp": (version.stderr or version.stdout).strip().splitlines()[0]},
        "settings": settings | {"arguments": arguments(job, settings, Path(file.name))},
        "load_s": load_s,
        "notes": [f"keys and values are {cache_type(job)}", "times are those at which the client read the tokens"],
    }
    return Served(outputs, facts)


def arguments(job: Job, settings: dict[str, Any], file: Path) -> list[str]:
    """The server's command line, but for its port."""
    context = -(-(longest(job.warm_up + job.requests) + 1) // 256) * 256
    values = {
        "--model": file,
        "--host": "127.0.0.1",
        "--threads": job.threads,
        "--threads-batch": job.threads,
        "--parallel": settings["slots"],
        "--ctx-size": context * settings["slots"],
        "--batch-size": settings["batch_size"],
        "--ubatch-size": settings["ubatch_size"],
        "--flash-attn": "auto",
        "--cache-type-k": cache_type(job),
        "--cache-type-v": cache_type(job),
        "--cache-ram": 0,  # prompts have nothing in common
    }
    # One cache for all slots: with one each, a step is split into parts whose slots have equally many tokens.
    flags = ["--cont-batching", "--kv-unified", "--no-cache-prompt", "--no-webui"]
    return [str(part) for pair in values.items() for part in pair] + flags + settings.get("extra_arguments", [])


def cache_type(job: Job) -> str:
    """Of keys and values, as wide as the weights; beside bfloat16 float16, the default, which is faster than bf16."""
    return "f32" if job.dtype == "float32" else "f16"


@contextmanager
def _running(command: list[str], start_s: float) -> Iterator[int]:
    """The server's port, once it has loaded the model. It is ended in every case."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + start_s
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    last = log.read().decode(errors="replace").strip().splitlines()[-5:]
                    what = "is not ready" if process.poll() is None else f"ended with code {process.returncode}"
                    raise RuntimeError(f"llama.cpp's server {what}; its log ends: {' | '.join(last)}")
                time.sleep(0.05)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _healthy(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):  # not listening yet
        return False
    finally:
        connection.close()


def replay(requests: list[JobRequest], port: int) -> Outputs:
    """Send each request when its time has come, from a thread of its own, which reads the answer as it comes.

    Raises RuntimeError if any was not answered in full.
    """
    outputs: Outputs = {r.id: ([], []) for r in requests}
    problems: list[str] = []
    clock = Clock()

    def ask(request: JobRequest) -> None:
        clock.wait_until(request.arrival_s)
        try:
            _complete(request, port, clock, *outputs[request.id])
        except (OSError, HTTPException, ValueError, LookupError, RuntimeError) as error:
            problems.append(f"request {request.id!r} failed: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=ask, args=(r,), daemon=True) for r in requests]
    clock.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise RuntimeError(problems[0])
    return outputs


def _complete(request: JobRequest, port: int, clock: Clock, ids: list[int], times: list[float]) -> None:
    body = {
        "prompt": request.prompt,
        "n_predict": request.output_tokens,
        "temperature": 0.0,
        "samplers": ["temperature"],  # with temperature 0 the most probable token; no other sampler costs time
        "ignore_eos": True,
        "stream": True,
        "return_tokens": True,
        "cache_prompt": False,
    }
    connection = HTTPConnection("127.0.0.1", port)
    try:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read()[:300].decode(errors='replace')}")
        for new in token_events(response):
            ids.extend(new)
            times.extend([clock.now()] * len(new))
    finally:
        connection.close()
    if len(ids) != request.output_tokens:
        raise RuntimeError(f"{len(ids)} tokens came, {request.output_tokens} were asked for")


def token_events(lines: Iterable[bytes]) -> Iterator[list[int]]:
    """The token ids of each event of an answer's stream, up to the one that says it is complete.

    Raises RuntimeError for an error that the server tells, and for a stream that ends too early.
    """
    for line in lines:
        kind, _, data = line.decode().partition(":")
        if kind == "error":
            raise RuntimeError(f"the server says {data.strip()[:300]}")
        if kind != "data":  # blank lines and comments
            continue
        event = json.loads(data)
        if "error" in event:
            raise RuntimeError(f"the server says {json.dumps(event['error'])[:300]}")
        if event["stop"]:
            return
        yield event["tokens"]
    raise RuntimeError("the stream ended before the server said that it was complete")
