"""The steps that the ledger measures, built without an engine, and the ways in which they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import RaggedBatch, sdpa, store_kv
from ..compiled.model import CompiledModel
from ..model.llama import LlamaModel
from ..model.loader import LoadedModel

BLOCK_SIZE = 16


class Case(NamedTuple):
    """query_lens: tokens of each request in the step; contexts: tokens in its cache afterwards."""

    query_lens: list[int]
    contexts: list[int]


CASES = {
    "1 decode": Case([1], [150]),
    "8 decodes": Case([1] * 8, [150] * 8),
    "64 decodes": Case([1] * 64, [150] * 64),
    "chunk of 256": Case([256], [256]),
    "32 decodes and a chunk": Case([1] * 32 + [224], [150] * 32 + [300]),
}


class Step:
    """All that a step takes: random tokens, random keys and values before them, blocks in random order.

    token_ids, positions: int64 [T]. newest: int64 [R], the last token of each request. pool: a (k_cache, v_cache) for
    each layer, in the model's dtype.
    """

    def __init__(self, loaded: LoadedModel, case: Case, seed: int = 0) -> None:
        config, generator = loaded.config, torch.Generator().manual_seed(seed)
        blocks = [-(-context // BLOCK_SIZE) for context in case.contexts]
        shuffled = torch.randperm(sum(blocks), generator=generator)
        tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        positions, slots = [], []
        for table, own, num_queries, context in zip(tables, shuffled.split(blocks), *case):
            table[: len(own)] = own
            places = torch.arange(context - num_queries, context)
            positions.append(places)
            slots.append(own[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE)
        starts = torch.tensor([0, *case.query_lens]).cumsum(0)
        self.token_ids = torch.randint(config.vocab_size, (int(starts[-1]),), generator=generator)
        self.positions, self.newest = torch.cat(positions), starts[1:] - 1
        contexts = torch.tensor(case.contexts, dtype=torch.int32)
        self.batch = RaggedBatch(torch.cat(slots), starts.int(), contexts, tables, case.query_lens, case.contexts)
        size = (2, sum(blocks), BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        caches = [torch.randn(size, generator=generator).to(loaded.dtype) / 2 for _ in range(config.num_layers)]
        self.pool = [(cache[0], cache[1]) for cache in caches]
        self.scale = config.head_dim**-0.5


def plain_step(model: LlamaModel) -> Callable[[Step], Tensor]:
    """PyTorch's step: logits [R, vocab_size] of the newest tokens."""

    def forward(step: Step) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store_kv(k, v, *step.pool[layer], step.batch.slot_mapping)
            return sdpa.ragged_attention(q, *step.pool[layer], step.batch, step.scale)

        return model.logits(model(step.token_ids, step.positions, attend)[step.newest])

    return forward


def compiled_step(loaded: LoadedModel, *without: str) -> Callable[[Step], Tensor]:
    """The compiled path's, with some of compiled.library.SWITCHES turned off."""
    model = CompiledModel(loaded.model, loaded.dtype, without=without)
    return lambda step: model.step(step.token_ids, step.positions, step.batch, step.newest, step.pool)[0]


def one_query_row(forward: Callable[[Step], Tensor]) -> Callable[[Step], Tensor]:
    """The same, but each decode hands PyTorch's attention its one query alone, whatever the precision."""
    ours = sdpa._attend_request

    def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if len(q) > 1:
            return ours(q, keys, values, scale)
        rows = q.view(1, keys.shape[1], -1, q.shape[-1])
        keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        return F.scaled_dot_product_attention(rows, keys, values, scale=scale).reshape(q.shape)

    def patched(step: Step) -> Tensor:
        sdpa._attend_request = attend
        try:
            return forward(step)
        finally:
            sdpa._attend_request = ours

    return patched
