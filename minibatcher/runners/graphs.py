"""Decode steps as CUDA graphs: all of a step's kernels recorded once, and then launched by one call.

A step of a small model is hundreds of kernels of a few microseconds, and launching each from Python takes longer than
running it. A recording has fixed shapes and fixed addresses, so there is one for each of a few batch sizes, and a step
of n requests runs in the smallest that holds n: the rows left over are padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention import RaggedBatch
from ..transfer import to_device
from .packed import PackedStep

NOWHERE = -1  # the slot of a padding row: its key and value are not stored

Forward = Callable[[Tensor, Tensor, RaggedBatch], Tensor]  # as RaggedRunner.forward
Recording = tuple[Callable[[], None], Tensor]  # replay, and where the output then lies


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a recording: powers of two, from 8 on also those times one and a half, and max_num_seqs."""
    sizes, size = [], 1
    while size < max_num_seqs:
        sizes += [size, size * 3 // 2] if size >= 8 else [size]
        size *= 2
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def record_cuda_graph(run: Callable[[], Tensor], memory: Any) -> Recording:
    """Record what `run` puts on the device. memory: a pool that recordings share, since one runs at a time."""
    run()  # compiles kernels and sets up libraries, which can't be recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        out = run()
    return graph.replay, out


class DecodeGraphs:
    """Recordings of decode steps for each of `sizes` requests, and the input buffers that they read.

    max_blocks: the longest block table. record: record_cuda_graph, or a stand-in where there is no GPU.
    """

    def __init__(self, sizes: list[int], max_blocks: int, device: torch.device, record=record_cuda_graph) -> None:
        self.sizes, self._record = sorted(sizes), record
        most = self.sizes[-1]
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slot_mapping = torch.full((most,), NOWHERE, dtype=torch.int64, device=device)
        self._context_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(most, max_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._recordings: dict[int, Recording] = {}

    def can_run(self, step: PackedStep) -> bool:
        return step.only_decodes and step.num_tokens <= self.sizes[-1]

    @torch.inference_mode()
    def capture(self, forward: Forward) -> None:
        """Record every size, the largest first: the others then fit into its memory."""
        memory = torch.cuda.graph_pool_handle() if self._token_ids.is_cuda else None
        for size in reversed(self.sizes):
            batch = RaggedBatch(
                self._slot_mapping[:size],
                self._starts[: size + 1],
                self._context_lens[:size],
                self._block_tables[:size],
                [1] * size,
                [0] * size,  # lengths on the host would be those of the recording: no kernel may use them
            )
            inputs = self._token_ids[:size], self._positions[:size], batch
            self._recordings[size] = self._record(lambda inputs=inputs: forward(*inputs), memory)

    def run(self, step: PackedStep) -> Tensor:
        """Hidden states [size, hidden_size] of the smallest size that holds the step; its rows come first."""
        size = next(size for size in self.sizes if size >= step.num_tokens)
        spare = (0, size - step.num_tokens)
        arrays = [
            np.pad(step.token_ids, spare),
            np.pad(step.positions, spare),
            np.pad(step.slot_mapping, spare, constant_values=NOWHERE),
            np.pad(step.context_lens, spare),
        ]
        *rows, tables = to_device([*arrays, step.block_tables], self._token_ids.device)
        buffers = self._token_ids, self._positions, self._slot_mapping, self._context_lens
        for buffer, row in zip(buffers, rows):
            buffer[:size].copy_(row)
        self._block_tables[: len(tables), : tables.shape[1]].copy_(tables)
        replay, hidden = self._recordings[size]
        replay()
        return hidden
