"""A model without arithmetic, for scheduler and engine tests: it stores token ids as its «KV» and reads them back."""

from __future__ import annotations

import zlib

from minibatcher.clock import VirtualClock
from minibatcher.engine import Engine
from minibatcher.kv import BlockKV, SlotKV
from minibatcher.runners.base import StepResult
from minibatcher.scheduling import SchedulerConfig, make_scheduler, strategy


def next_token(token_ids: list[int]) -> int:
    """The one right continuation of a token sequence, which depends on every token in it."""
    return zlib.crc32(bytes(str(token_ids), "ascii")) % 1000


class MemoryRunner:
    """Writes each planned token into the pool through the block table, then answers from what the pool holds.

    A lost block, a block shared by two requests, a token computed twice or never: each changes the answer.
    """

    def __init__(self, kv: BlockKV, seconds_per_token: float = 0.001) -> None:
        self.kv, self.seconds_per_token = kv, seconds_per_token
        self.pool: list[int | None] = [None] * (kv.num_blocks * kv.block_size)

    def _place(self, request, position: int) -> int:
        block = self.kv.table(request.request_id)[position // self.kv.block_size]
        return block * self.kv.block_size + position % self.kv.block_size

    def run(self, plan) -> StepResult:
        for row in plan.rows:
            first = row.request.num_computed_tokens
            for position, token in enumerate(row.request.token_slice(first, first + row.num_tokens), first):
                self.pool[self._place(row.request, position)] = token
        token_ids: list[int | None] = []
        for row in plan.rows:
            done = row.num_tokens > 0 and row.num_tokens == row.request.num_pending_tokens
            seen = [self.pool[self._place(row.request, p)] for p in range(row.request.num_tokens)] if done else []
            token_ids.append(next_token(seen) if done else None)
        return StepResult(token_ids, seconds=self.seconds_per_token * plan.num_computed_tokens)


def fake_engine(
    name: str, *, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 64, eos=(), **knobs
) -> Engine:
    config = SchedulerConfig(**knobs)
    if strategy(name).kv_layout == "slots":
        kv: BlockKV = SlotKV(config.max_num_seqs, max_model_len)
    else:
        kv = BlockKV(num_blocks, block_size)
    runner = MemoryRunner(kv)
    scheduler = make_scheduler(name, kv, config)
    return Engine(scheduler, runner, VirtualClock(), max_model_len=max_model_len, eos_token_ids=eos)


def solo_answer(prompt: list[int], max_tokens: int, eos=()) -> list[int]:
    tokens, out = list(prompt), []
    while len(out) < max_tokens and not (out and out[-1] in eos):
        out.append(next_token(tokens))
        tokens.append(out[-1])
    return out
