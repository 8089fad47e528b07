"""What both real runners share: the KV pool's tensors, and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..attention import RaggedBatch
from ..attention.choose import AttentionBackend
from ..cpu_path import CpuPath
from ..errors import OutOfMemory
from ..kv.blocks import BlockKV
from ..model.loader import LoadedModel
from ..model.logprobs import Logprobs, log_probabilities
from ..model.sampling import request_seed, sample, uniform
from ..request import Request
from ..scheduling.plan import StepPlan
from .base import StepResult
from .swap import HostPool


@dataclass(slots=True)
class Launched:
    """A step that the device may still be working on.

    requests: those that get a token. token_ids: int64 [len(requests)] on the device; None if nobody does. logprobs: of
    the requests that ask for them; None if nobody does.
    """

    requests: Sequence[Request]
    token_ids: Tensor | None
    num_computed_tokens: int | None
    device: torch.device
    logprobs: Logprobs | None = None

    def result(self) -> StepResult:
        """Wait for the sampled tokens: the only time in a step that the host waits for the device."""
        if self.token_ids is not None:
            token_ids = self.token_ids.tolist()
            asked = self.logprobs.read(token_ids) if self.logprobs else ()  # they were on their way before the tokens
            logprobs = {self.requests[row]: logprob for row, logprob in asked}
            return StepResult(dict(zip(self.requests, token_ids)), None, self.num_computed_tokens, logprobs)
        if self.device.type == "cuda":
            # So that the time of a step without a token is its own.
            torch.cuda.current_stream(self.device).synchronize()
        return StepResult({}, None, self.num_computed_tokens)


def is_out_of_memory(error: Exception) -> bool:
    """Whether PyTorch or NumPy says with it that memory has run out; on a CPU that is any RuntimeError."""
    words = ("DefaultCPUAllocator", "not enough memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in words)


class ModelRunner:
    """A model, its KV pool and a sampler.

    The pool holds, per layer, keys and values of shape [num_blocks, block_size, num_kv_heads, head_dim]; `kv` says who
    owns which block. num_host_blocks: room in host memory for requests that are swapped out. Random numbers depend on
    the request and the position of the token alone, never on the batch. cpu_path: what runs the model on a CPU; None
    is PyTorch as it stands.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        kv: BlockKV,
        attention: AttentionBackend,
        seed: int = 0,
        num_host_blocks: int = 0,
        cpu_path: CpuPath | None = None,
    ) -> None:
        self.model, self.config, self.device = loaded.model, loaded.config, loaded.device
        self.compiled = None
        if cpu_path is not None:
            self.model, self.compiled = cpu_path.model, cpu_path.compiled
        self.kv, self.attention, self.seed, self.dtype = kv, attention, seed, loaded.dtype
        self.scale = self.config.head_dim**-0.5
        self._eos = tuple(self.config.eos_token_ids)
        self.num_host_blocks = num_host_blocks

    @cached_property
    def pool(self) -> list[tuple[Tensor, Tensor]]:
        """(k_cache, v_cache) of each layer; made when first asked for, so that one engine can wait for another's."""
        kv, config = self.kv, self.config
        shape = (2, kv.num_blocks, kv.block_size, config.num_kv_heads, config.head_dim)
        try:
            layers = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(config.num_layers))
            return [(layer[0], layer[1]) for layer in layers]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            gib = kv.num_blocks * kv.block_size * config.kv_bytes_per_token(self.dtype.itemsize) / 2**30
            raise OutOfMemory(
                f"a KV pool of {gib:.1f} GiB does not fit on {self.device}, beside what is there already; "
                "lower kv_cache_tokens, or drop engines built before"
            ) from None

    @cached_property
    def host_pool(self) -> HostPool:
        """Made when somebody is first swapped out."""
        return HostPool(self.pool, self.num_host_blocks)

    def on_device(self) -> AbstractContextManager:
        """Within, the model's GPU is the current one: Triton launches there and nowhere else."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def allocate(self) -> None:
        """Take the memory now, not in the first step."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what an earlier engine has left may be in pieces of the wrong size
        self.pool  # noqa: B018 - made by being asked for

    def release(self) -> None:
        """Give the pool's memory back. The next step makes one of as many blocks as `kv` has by then."""
        self.__dict__.pop("pool", None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, plan: StepPlan) -> StepResult:
        """One forward pass for the plan, from start to end."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Launched:
        """Put one forward pass on its way, and do not wait for it. Raises OutOfMemory."""
        try:
            with torch.inference_mode(), self.on_device():
                if plan.swaps:
                    self.host_pool.copy(self.pool, plan.swaps)
                return self._launch(plan)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            sentence = str(error)
        raise OutOfMemory(sentence)  # out here, where no traceback holds the tensors of the failed step

    def _launch(self, plan: StepPlan) -> Launched:
        raise NotImplementedError

    def store(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        """Write this step's keys and values into the pool; returns the layer's (k_cache, v_cache)."""
        k_cache, v_cache = self.pool[layer]
        self.attention.store(k, v, k_cache, v_cache, slot_mapping)
        return k_cache, v_cache

    def sample(self, hidden: Tensor, requests: Sequence[Request], num_computed_tokens: int | None = None) -> Launched:
        """Next token of each request from the hidden state [N, hidden_size] of its newest token."""
        if not requests:
            return Launched([], None, num_computed_tokens, self.device)
        return self.sample_from(self.model.logits(hidden), requests, num_computed_tokens)

    def run_compiled(
        self, token_ids: Tensor, positions: Tensor, batch: RaggedBatch, newest: Tensor, requests: Sequence[Request]
    ) -> Launched:
        """The whole step in one call: next token of each request, whose newest tokens are `newest`, int64 [N]."""
        assert self.compiled is not None
        logits, best = self.compiled.step(token_ids, positions, batch, newest, self.pool)
        if not requests:
            return Launched([], None, None, self.device)
        return self.sample_from(logits, requests, greedy=best)

    def sample_from(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        num_computed_tokens: int | None = None,
        greedy: Tensor | None = None,
    ) -> Launched:
        """Next token of each request from its logits [N, vocab_size]; greedy: as model.sampling.sample."""
        params = [r.params for r in requests]
        uniforms = [0.0 if p.temperature == 0 else self._uniform(r) for r, p in zip(requests, params)]
        banned = [self._banned(request) for request in requests]
        token_ids = sample(logits, params, uniforms, banned, greedy)
        logprobs = log_probabilities(logits, token_ids, [p.logprobs for p in params])
        return Launched(requests, token_ids, num_computed_tokens, self.device, logprobs)

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
