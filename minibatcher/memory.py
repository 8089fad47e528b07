"""How much memory the KV pool may take."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .host_memory import host_memory
from .model.loader import LoadedModel
from .model.logprobs import log_probabilities
from .model.sampling import sample
from .request import MOST_LOGPROBS, SamplingParams

CPU_SHARE = 4  # on a CPU the pool may take a quarter of what is free: the rest is for the reader's other programs


def kv_pool_bytes(model: LoadedModel, max_tokens: int, max_num_seqs: int, workspace: int, gpu_share: float) -> int:
    """Bytes that the KV pool may take beside everything else; at least 0.

    max_tokens, max_num_seqs: the largest step, whose activations are measured on a GPU by running it without attention.
    workspace: bytes that attention needs beside them. gpu_share: of a GPU's memory, what this engine may fill
    (gpu_memory_utilization), other programs' share included.
    """
    if model.device.type != "cuda":
        return host_memory()[1] // CPU_SHARE
    activations = measure_activations(model, max_tokens, max_num_seqs)
    free, total = torch.cuda.mem_get_info(model.device)
    cached = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return gpu_pool_bytes(free + cached, total, activations + workspace, gpu_share)


def gpu_pool_bytes(free: int, total: int, needed: int, gpu_share: float) -> int:
    """What is left of `total * gpu_share` bytes once what others hold and `needed` are taken off."""
    used = total - free
    return max(0, int(total * gpu_share) - used - needed)


MEASURED_TOKENS = 2048  # activations grow with the tokens of a step, so a longer one need not be run to know


@torch.inference_mode()
def measure_activations(model: LoadedModel, num_tokens: int, num_seqs: int) -> int:
    """Most bytes that a step of `num_tokens` tokens, `num_seqs` of them sampled, takes on the GPU beside attention."""
    measured = min(num_tokens, MEASURED_TOKENS)
    layers = _peak(model, lambda zeros: model.model(zeros, zeros, lambda _, q, k, v: torch.empty_like(q)), measured)
    return layers * num_tokens // measured + _peak(model, lambda zeros: _sample_from(model, zeros), num_seqs)


def _sample_from(model: LoadedModel, zeros: torch.Tensor) -> torch.Tensor:
    """Sampling at its worst: each row with all that a request may ask for."""
    num_seqs = len(zeros)
    logits = model.model.logits(model.model.embed_tokens(zeros))
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=MOST_LOGPROBS)
    token_ids = sample(logits, [params] * num_seqs, [0.5] * num_seqs, [[0]] * num_seqs)
    log_probabilities(logits, token_ids, [params.logprobs] * num_seqs)
    return token_ids


def _peak(model: LoadedModel, run: Callable[[torch.Tensor], torch.Tensor], length: int) -> int:
    """Most bytes that run(zeros, int64 [length]) holds at once."""
    zeros = torch.zeros(length, dtype=torch.int64, device=model.device)
    run(zeros)  # sets up libraries, whose own memory is not a step's
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    run(zeros)
    return torch.cuda.max_memory_allocated(model.device) - before
