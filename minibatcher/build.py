"""Putting an engine together on a real model: which pool, which runner, how much memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

import torch

from .attention.choose import choose_attention
from .engine import Engine
from .errors import DeviceError, InvalidParameter
from .kv import BlockKV, make_kv
from .model.loader import LoadedModel, load_model
from .provenance import provenance
from .runners.padded import PaddedRunner
from .runners.ragged import RaggedRunner
from .scheduling import SchedulerConfig, make_scheduler, strategy


@dataclass(frozen=True)
class EngineOptions:
    """Everything that `Engine.from_model` takes beside the model and the scheduler's own knobs (SchedulerConfig).

    device: "auto" (a GPU if there is one), "cpu" or "cuda". dtype: "auto", "float32", "bfloat16" or "float16".
    attention: "auto" or a backend's name. max_model_len: longest prompt + output; None is the model's context.
    block_size: tokens a KV block (paged strategies). kv_cache_tokens: size of the KV pool in tokens; None is room for
    max_num_seqs full contexts, as far as memory allows. gpu_memory_utilization: the share of a GPU's memory to use.
    """

    strategy: str = "continuous"
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "kv_cache_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidParameter(f"{name} must be a whole number of at least 1, not {value!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidParameter(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization!r}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise InvalidParameter(f"seed must be a whole number of at least 0, not {self.seed!r}")


def build_engine(model: str | LoadedModel = "bard", **options) -> Engine:
    """An engine for a model (a name, or one already loaded) and any of EngineOptions' and SchedulerConfig's fields."""
    known = {f.name for f in fields(EngineOptions)}
    knobs = {f.name for f in fields(SchedulerConfig)}
    unknown = set(options) - known - knobs
    if unknown:
        raise InvalidParameter(
            f"unknown engine option {sorted(unknown)[0]!r}; known: {', '.join(sorted(known | knobs))}"
        )
    config = SchedulerConfig(**{k: v for k, v in options.items() if k in knobs})
    options = EngineOptions(**{k: v for k, v in options.items() if k in known})
    cls = strategy(options.strategy)
    if isinstance(model, str):
        model = load_model(model, device=resolve_device(options.device), dtype=options.dtype)
    attention = choose_attention(options.attention, model.device, model.dtype)
    max_model_len = _max_model_len(model, options.max_model_len)
    kv = _make_kv(model, cls.kv_layout, max_model_len, config, options)
    if cls.kv_layout == "slots":
        config = replace(config, max_num_seqs=kv.num_blocks)  # a batch is full when every slot is taken
    scheduler = make_scheduler(options.strategy, kv, config)
    runner = (PaddedRunner if cls.kv_layout == "slots" else RaggedRunner)(model, kv, attention, options.seed)
    return Engine(
        scheduler,
        runner,
        max_model_len=max_model_len,
        tokenizer=model.tokenizer,
        eos_token_ids=model.config.eos_token_ids,
        vocab_size=model.config.vocab_size,
        header={"seed": options.seed, **provenance(model, attention)},
    )


def resolve_device(name: str) -> torch.device:
    """ "auto", "cpu", "cuda" or "cuda:1" as a torch device. Raises DeviceError where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise DeviceError(f"unknown device {name!r}; known: auto, cpu, cuda, cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device cuda was asked for, but PyTorch finds no CUDA GPU here; use --device cpu")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise DeviceError(
            f"device {name} was asked for, but there are {torch.cuda.device_count()} GPUs (counted from 0)"
        )
    return torch.device(name)


def _max_model_len(model: LoadedModel, wanted: int | None) -> int:
    context = model.config.max_position_embeddings
    if wanted is not None and wanted > context:
        raise InvalidParameter(f"max_model_len {wanted} is above the context of {model.name}, {context} tokens")
    return wanted or context


def _make_kv(
    model: LoadedModel, layout: str, max_model_len: int, config: SchedulerConfig, options: EngineOptions
) -> BlockKV:
    tokens = options.kv_cache_tokens
    if tokens is None:
        bytes_per_token = model.config.kv_bytes_per_token(model.dtype.itemsize)
        room = _free_memory(model.device, options.gpu_memory_utilization) // bytes_per_token
        tokens = min(config.max_num_seqs * max_model_len, room)
    return make_kv(
        layout,
        tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size=options.block_size,
    )


def _free_memory(device: torch.device, gpu_share: float) -> int:
    """Bytes that the KV pool may take: on a GPU what the allowed share leaves, on a CPU a quarter of what is free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - gpu_share) * total))
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if hasattr(os, "sysconf") else 8 << 30
    return available // 4
