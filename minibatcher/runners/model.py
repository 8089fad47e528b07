"""What both real runners share: the KV pool's tensors, and sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..attention import store_kv
from ..attention.choose import AttentionBackend
from ..kv.blocks import BlockKV
from ..model.loader import LoadedModel
from ..model.sampling import request_seed, sample, uniform
from ..request import Request


class ModelRunner:
    """A model, its KV pool and a sampler.

    The pool holds, per layer, keys and values of shape [num_blocks, block_size, num_kv_heads, head_dim]; `kv` says who
    owns which block. Random numbers depend on the request and the position of the token alone, never on the batch.
    """

    def __init__(self, loaded: LoadedModel, kv: BlockKV, attention: AttentionBackend, seed: int = 0) -> None:
        self.model, self.config, self.device = loaded.model, loaded.config, loaded.device
        self.kv, self.attention, self.seed = kv, attention, seed
        shape = (kv.num_blocks, kv.block_size, self.config.num_kv_heads, self.config.head_dim)
        self.pool = [
            (
                torch.zeros(shape, dtype=loaded.dtype, device=self.device),
                torch.zeros(shape, dtype=loaded.dtype, device=self.device),
            )
            for _ in range(self.config.num_layers)
        ]
        self.scale = self.config.head_dim**-0.5
        self._eos = tuple(self.config.eos_token_ids)

    def store(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's keys and values into the pool; returns the layer's (k_cache, v_cache)."""
        k_cache, v_cache = self.pool[layer]
        store_kv(k, v, k_cache, v_cache, slot_mapping)
        return k_cache, v_cache

    def sample(self, hidden: torch.Tensor, requests: Sequence[Request]) -> dict[Request, int]:
        """Next token of each request from the hidden state [N, hidden_size] of its newest token."""
        if not requests:
            return {}
        logits = self.model.logits(hidden)
        params = [r.params for r in requests]
        numbers = [0.0 if p.temperature == 0 else self._uniform(r) for r, p in zip(requests, params)]
        banned = [self._banned(request) for request in requests]
        uniforms = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return dict(zip(requests, sample(logits, params, uniforms, banned).tolist()))

    def _banned(self, request: Request) -> tuple[int, ...]:
        """What must not come yet: whatever would end the request before its min_tokens."""
        params = request.params
        if request.num_output_tokens >= params.min_tokens:
            return ()
        return params.stop_token_ids if params.ignore_eos else (*self._eos, *params.stop_token_ids)

    def _uniform(self, request: Request) -> float:
        seed = request.params.seed
        if seed is None:
            seed = request_seed(self.seed, request.request_id)
        return uniform(seed, request.num_output_tokens)
