"""KV in host memory: where a request's blocks go while it has to make room on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..scheduling.plan import Swap


class HostPool:
    """Per layer, keys and values of shape [num_blocks, block_size, num_kv_heads, head_dim] in host memory.

    pool: the device's, per layer (k_cache, v_cache) with blocks of the same shape; pinned where that is a GPU.
    """

    def __init__(self, pool: Sequence[tuple[Tensor, Tensor]], num_blocks: int) -> None:
        self.layers = [
            tuple(
                torch.empty((num_blocks, *cache.shape[1:]), dtype=cache.dtype, pin_memory=cache.is_cuda)
                for cache in caches
            )
            for caches in pool
        ]

    def copy(self, pool: Sequence[tuple[Tensor, Tensor]], swaps: Sequence[Swap]) -> None:
        """Make the copies one after the other; the host waits for each."""
        for swap in swaps:
            for caches, host_caches in zip(pool, self.layers):
                for cache, host in zip(caches, host_caches):
                    if swap.out:
                        host[swap.host_blocks] = cache[swap.device_blocks].to(host.device)
                    else:
                        cache[swap.device_blocks] = host[swap.host_blocks].to(cache.device)
