"""How fast the kernels are on this GPU, as shares of what this very GPU was measured to copy and to multiply."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..attention.triton_support import interpret, why_not
from ..errors import DeviceError
from .arithmetic import attention_flops, kv_bytes, store_bytes
from .cases import CALLS, Case, Shape, launchers, random_case
from .child import failure
from .timer import Timer, timer_for

HEADS = (32, 8, 128, 16)  # query heads, KV heads, head size, block size: Llama 3.1 8B's
COPY_BYTES = 2 << 30
MATRIX_SIZES = (4096, 8192)


@dataclass(frozen=True)
class Job:
    """One launch to time. kind: decode, prefill, mixed or store; kernel: the launcher's name in cases.launchers()."""

    kind: str
    kernel: str
    shape: Shape
    what: str


def jobs(
    num_requests: tuple[int, ...] = (64, 16, 128, 256),
    contexts: tuple[int, ...] = (2048, 8192),
    prompt: int = 4096,
    num_decodes: int = 32,
    heads: tuple[int, int, int, int] = HEADS,
) -> list[Job]:
    """What is timed, the goals' own cases first, since time may run out. num_decodes: beside the chunk of a prompt."""
    decodes = [
        Job("decode", "decode_attention", Shape((1,) * n, (m,) * n, *heads), f"{n} requests of {m:,} tokens")
        for m in contexts
        for n in num_requests
    ]
    chunk = prompt // 8
    chunked = Shape((*[1] * num_decodes, chunk), (prompt,) * (num_decodes + 1), *heads)
    mixed = f"{num_decodes} decodes and a chunk of {chunk}, contexts of {prompt:,}"
    return [
        Job("prefill", "ragged_attention", Shape((prompt,) * 4, (prompt,) * 4, *heads), f"4 prompts of {prompt:,}"),
        *decodes[: len(num_requests)],
        Job("mixed", "ragged_attention", chunked, mixed),
        Job("store", "store_kv", Shape((prompt,) * 4, (prompt,) * 4, *heads), f"{4 * prompt:,} tokens"),
        *decodes[len(num_requests) :],
    ]


def rows(device: str = "cuda", tiny: bool = False) -> Iterator[dict[str, Any]]:
    """The section: {"total": rows to come}, the two rates, then a row for each job. tiny: shapes for a trial."""
    if torch.device(device).type == "cpu":
        interpret()
    dtype = torch.bfloat16 if why_not(torch.device(device), torch.bfloat16) is None else torch.float16
    if (reason := why_not(torch.device(device), dtype)) is not None:
        raise DeviceError(reason)
    small: dict[str, Any] = {
        "num_requests": (2,),
        "contexts": (24,),
        "prompt": 16,
        "num_decodes": 2,
        "heads": (2, 1, 16, 16),
    }
    rates: dict[str, Any] = {"copy_bytes": 1 << 20, "matrix_sizes": (64,)} if tiny else {}
    yield from measure(
        timer_for(torch.device(device)), torch.device(device), dtype, jobs(**small if tiny else {}), **rates
    )


def measure(
    timer: Timer,
    device: torch.device,
    dtype: torch.dtype,
    todo: list[Job],
    copy_bytes: int = COPY_BYTES,
    matrix_sizes: tuple[int, ...] = MATRIX_SIZES,
) -> Iterator[dict[str, Any]]:
    """Rates of the device first, then each job: seconds, bytes_per_s of K and V, flop_per_s, and their shares.

    Shares are of the copy bandwidth (read and written bytes counted) and of the rate of square matrix products. peers:
    what others take for the same, in seconds, or why they don't. A job that fails gives a row with `failure`, one that
    does not fit in memory a row with `skipped`, each with the reason.
    """
    yield {"total": len(todo) + 1}
    rates = {
        "kind": "device",
        "dtype": str(dtype).removeprefix("torch."),
        "copy_bytes_per_s": copy_bandwidth(timer, device, copy_bytes),
        "matrix_flop_per_s": matrix_rate(timer, device, dtype, matrix_sizes),
    }
    yield rates
    launch = launchers()
    for job in todo:
        case = None  # the last one's memory is free before the next one's is taken
        row = {
            "kind": job.kind,
            "what": job.what,
            "num_requests": len(job.shape.query_lens),
            "context": min(job.shape.context_lens),
            "dtype": rates["dtype"],
        }
        row |= work(job, dtype.itemsize)
        if (lack := _lacks_memory(job, device, dtype)) is not None:
            yield {**row, "skipped": lack}
            continue
        try:
            case = random_case(job.shape, dtype, device, seed=0, poison=False)
            seconds = timer(_launch(job, launch[job.kernel], case))
        except Exception as problem:
            yield {**row, "failure": failure(problem)}
            continue
        row |= {"seconds": seconds} | speeds(row, seconds, rates)
        yield {**row, "peers": _peers(timer, case) if job.kind != "store" else {}}


def work(job: Job, itemsize: int) -> dict[str, int]:
    """Bytes and FLOPs that the job can't do without. Queries and outputs, small beside K and V, are left out."""
    shape = job.shape
    if job.kind == "store":
        return {"bytes": store_bytes(sum(shape.query_lens), shape.num_kv_heads, shape.head_dim, itemsize), "flops": 0}
    return {
        "bytes": kv_bytes(shape.context_lens, shape.num_kv_heads, shape.head_dim, itemsize),
        "flops": attention_flops(shape.query_lens, shape.context_lens, shape.num_heads, shape.head_dim),
    }


def speeds(row: dict[str, Any], seconds: float, rates: dict[str, Any]) -> dict[str, float]:
    """Bytes/s and FLOP/s of the work in `row`, and what shares of the device's rates they are."""
    bytes_per_s, flop_per_s = row["bytes"] / seconds, row["flops"] / seconds
    return {
        "bytes_per_s": bytes_per_s,
        "flop_per_s": flop_per_s,
        "share_of_copy": bytes_per_s / rates["copy_bytes_per_s"],
        "share_of_matrix": flop_per_s / rates["matrix_flop_per_s"],
    }


def copy_bandwidth(timer: Timer, device: torch.device, num_bytes: int = COPY_BYTES) -> float:
    """Bytes/s of a copy, read and written together; num_bytes: of both buffers."""
    source = torch.ones(num_bytes // 8, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / timer(lambda: target.copy_(source))


def matrix_rate(timer: Timer, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...] = MATRIX_SIZES) -> float:
    """FLOP/s of the best of several square products, of random numbers: zeros would draw less power and run faster."""
    best = 0.0
    for n in sizes:
        a, b = torch.randn(2, n, n, device=device).to(dtype)
        best = max(best, 2 * n**3 / timer(partial(torch.matmul, a, b)))
    return best


def _launch(job: Job, launcher, case: Case):
    if job.kind == "store":
        return lambda: launcher(case.k, case.v, case.k_cache, case.v_cache, case.slot_mapping)
    return lambda: CALLS[job.kernel](launcher, case)


def _peers(timer: Timer, case: Case) -> dict[str, Any]:
    from .peers import peers

    found: dict[str, Any] = {}
    for name, prepare in peers(case).items():
        try:
            found[name] = {"seconds": timer(prepare())}
        except Exception as problem:
            found[name] = {"failure": failure(problem, 200)}
    return found


def _lacks_memory(job: Job, device: torch.device, dtype: torch.dtype) -> str | None:
    """The pool, a contiguous copy for the peers, and room for what is drawn in float32 on the way."""
    if device.type != "cuda":
        return None
    shape = job.shape
    torch.cuda.empty_cache()
    need = 3 * kv_bytes(shape.context_lens, shape.num_kv_heads, shape.head_dim, dtype.itemsize)
    free = torch.cuda.mem_get_info(device)[0]
    return None if need < free else f"needs {need / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"
