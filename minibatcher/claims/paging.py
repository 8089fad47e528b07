"""Row 4.1: KV memory that is reserved for nothing, in slices a slot and in blocks, and how many requests that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidParameter
from ..metrics import summarize
from ..runners.roofline import CostModel
from ..simulate import run_simulation
from ..timeline import Timeline
from .common import mean
from .continuous import sweep_workloads


@dataclass(frozen=True)
class Reservation:
    """One way to reserve KV memory, over the lives of some requests. used + for_later + never = 1.

    Shares of what was reserved, in tokens x steps. used: holds a token. for_later: will hold one before its request
    ends. never: will not.
    """

    rule: str
    used: float
    for_later: float
    never: float

    @property
    def unused(self) -> float:
        return self.for_later + self.never


def reservations(
    lengths: Sequence[tuple[int, int]], *, max_model_len: int, block_size: int = 16
) -> dict[str, Reservation]:
    """Row 4.1: the unused share of what is reserved for requests of (prompt, answer) tokens, from prefill to last step.

    "longest": a slice of max_model_len. "power of two": a slice of the next power of two, if the true length were known
    so well. "known": a slice of the true length, as if somebody had foretold it. "blocks": as many blocks of
    `block_size` as hold what is there. The first three are Orca (Max), (Pow2) and (Oracle) of Kwon et al., SOSP 2023,
    section 6. The last token of an answer is never stored. Raises InvalidParameter for a request that is longer than
    max_model_len.
    """
    if not lengths or max(prompt + answer for prompt, answer in lengths) > max_model_len:
        raise InvalidParameter(f"lengths must be (prompt, answer) pairs that fit max_model_len {max_model_len}")
    slices = {
        "longest": lambda total: max_model_len,
        "power of two": lambda total: min(max_model_len, 1 << (total - 1).bit_length()),
        "known": lambda total: total,
        "blocks": None,
    }
    found = {}
    for rule, size_of in slices.items():
        used = for_later = reserved = 0
        for prompt, answer in lengths:
            most = prompt + answer - 1  # tokens ever stored
            for made in range(answer):
                held = prompt + made
                size = -(-held // block_size) * block_size if size_of is None else size_of(prompt + answer)
                used, for_later, reserved = used + held, for_later + min(size, most) - held, reserved + size
        found[rule] = Reservation(rule, used / reserved, for_later / reserved, 1 - (used + for_later) / reserved)
    return found


@dataclass(frozen=True)
class PoolUse:
    """A KV pool of `pool_tokens`, cut into pieces of `block_size`, as long as somebody waits to be let in.

    A piece as long as the longest request is a contiguous slice. reserved_share: of the pool, handed out.
    used_share: of what is handed out, holds a token. num_running, most_running: requests at once, mean over steps and
    highest. output_tokens_per_s is that of the whole run.
    """

    workload: str
    block_size: int
    pool_tokens: int
    reserved_share: float
    used_share: float
    num_running: float
    most_running: int
    num_preemptions: int
    output_tokens_per_s: float


def pool_use(
    cost: CostModel,
    *,
    workloads: Sequence[str] = ("azure-conv", "equal"),
    block_sizes: Sequence[int] = (8_192, 16),
    num_requests: int = 600,
    strategy: str = "chunked",
    max_num_batched_tokens: int = 2_048,
    seed: int = 0,
) -> list[PoolUse]:
    """Row 4.1: the same requests, all there at once, on the same pool in slices and in blocks; only the size differs.

    workloads: names of `continuous.sweep_workloads`, which fit contexts of 8,192 tokens.
    """
    rows = []
    for name in workloads:
        workload = sweep_workloads(num_requests, seed)[name]
        for size in block_sizes:
            timeline = run_simulation(
                workload,
                cost,
                strategies=[strategy],
                max_model_len=8_192,
                block_size=size,
                max_num_seqs=num_requests,
                max_num_batched_tokens=max_num_batched_tokens,
            )[strategy]
            rows.append(_pool_use(timeline, name))
    return rows


def _pool_use(timeline: Timeline, workload: str) -> PoolUse:
    size = timeline.header["block_size"]
    last = max((i for i, step in enumerate(timeline.steps) if step.num_waiting), default=len(timeline.steps) - 1)
    steps, whole = timeline.steps[: last + 1], summarize(timeline)
    running = [len(step.rows) for step in steps]
    return PoolUse(
        workload,
        size,
        size * steps[0].num_blocks,
        mean(step.kv_used_blocks / step.num_blocks for step in steps),
        sum(step.kv_tokens for step in steps) / (size * sum(step.kv_used_blocks for step in steps)),
        mean(running),
        max(running),
        whole["num_preemptions"],
        whole["output_tokens_per_s"],
    )
