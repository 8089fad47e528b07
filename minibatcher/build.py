"""Putting an engine together on a real model: which pool, which runner, how much memory."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch

from .ahead import AheadEngine
from .attention.choose import AttentionBackend, choose_attention
from .clock import WallClock
from .cpu_path import CpuPath, choose_cpu_path
from .engine import Engine
from .errors import DeviceError, InvalidParameter
from .kv import BlockKV, make_kv
from .limits import Limits
from .memory import kv_pool_bytes
from .model.loader import LoadedModel, load_model
from .monitor import monitor_for
from .provenance import provenance
from .runners.graphs import DecodeGraphs, graph_sizes
from .runners.model import ModelRunner
from .runners.padded import PaddedRunner
from .runners.ragged import RaggedRunner
from .scheduling import Scheduler, SchedulerConfig, make_scheduler, strategy

COMPILED_ATTENTION = "compiled"


@dataclass(frozen=True)
class EngineOptions:
    """Everything that `Engine.from_model` takes beside the model and the scheduler's own knobs (SchedulerConfig).

    strategy: a name, or a Scheduler class of one's own. device: "auto" (a GPU if there is one), "cpu" or "cuda".
    dtype: "auto", "float32", "bfloat16" or "float16".
    attention: "auto" or a backend's name. cpu_path: what computes a step on a CPU, see cpu_path.choose_cpu_path.
    max_model_len: longest prompt + output; None is the model's context.
    block_size: tokens a KV block (paged strategies). kv_cache_tokens: size of the KV pool in tokens; None is room for
    max_num_seqs full contexts, as far as memory allows. enable_prefix_caching: requests that begin with the same tokens
    share KV blocks (paged strategies). gpu_memory_utilization: the share of a GPU's memory to use.
    cuda_graphs: replay steps of decodes alone from recordings for a few batch sizes, padded to the next of them (paged
    strategies on a GPU with the Triton kernels). plan_ahead: plan a step while the device works on the one before
    (paged strategies). limits: how much may wait, and how much each tenant may ask for (minibatcher.limits.Limits).
    keep_going: what fails costs its own requests and is warned of, instead of raised.
    """

    strategy: str | type[Scheduler] = "continuous"
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    cpu_path: str = "plain"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_tokens: int | None = None
    enable_prefix_caching: bool = False
    gpu_memory_utilization: float = 0.9
    cuda_graphs: bool = False
    plan_ahead: bool = False
    limits: Limits | None = None
    keep_going: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "kv_cache_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidParameter(f"{name} must be a whole number of at least 1, not {value!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidParameter(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization!r}")
        for name in ("cuda_graphs", "plan_ahead", "enable_prefix_caching", "keep_going"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.limits is not None and not isinstance(self.limits, Limits):
            raise InvalidParameter(f"limits must be a minibatcher.limits.Limits, not {self.limits!r}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise InvalidParameter(f"seed must be a whole number of at least 0, not {self.seed!r}")


def build_engine(model: str | LoadedModel = "bard", **options: Any) -> Engine:
    """An engine for a model (a name, or one already loaded) and any of EngineOptions' and SchedulerConfig's fields."""
    engine = assemble_engine(model, **options)
    model_runner(engine).allocate()
    return engine


def model_runner(engine: Engine) -> ModelRunner:
    """The runner of an engine on a real model."""
    return cast(ModelRunner, engine.runner)


def assemble_engine(model: str | LoadedModel = "bard", **given: Any) -> Engine:
    """The same, but its KV pool takes no memory before `model_runner(engine).allocate()` or the first step."""
    known = {f.name for f in fields(EngineOptions)}
    knobs = {f.name for f in fields(SchedulerConfig)}
    unknown = set(given) - known - knobs
    if unknown:
        raise InvalidParameter(
            f"unknown engine option {sorted(unknown)[0]!r}; known: {', '.join(sorted(known | knobs))}"
        )
    config = SchedulerConfig(**{k: v for k, v in given.items() if k in knobs})
    options = EngineOptions(**{k: v for k, v in given.items() if k in known})
    cls = strategy(options.strategy)
    if isinstance(model, str):
        model = load_model(model, device=resolve_device(options.device), dtype=options.dtype)
    path = choose_cpu_path(options.cpu_path, model)
    attention = _attention(options, model, path)
    max_model_len = _max_model_len(model, options.max_model_len)
    kv = _make_kv(model, attention, cls, max_model_len, config, options)
    if cls.kv_layout == "slots":
        config = replace(config, max_num_seqs=kv.num_blocks)  # a batch is full when every slot is taken
    scheduler = make_scheduler(options.strategy, kv, config)
    num_host_blocks = scheduler.host.num_blocks if scheduler.host else 0
    runner: ModelRunner
    if cls.kv_layout == "slots":
        runner = PaddedRunner(model, kv, attention, options.seed, num_host_blocks, path)
    else:
        runner = RaggedRunner(model, kv, attention, options.seed, num_host_blocks, path)
    header = {"seed": options.seed, **provenance(model, attention)}
    if model.device.type == "cpu":
        header |= {"cpu_path": path.name, "cpu_path_why": path.why}
    if options.cuda_graphs:
        _check_graphs(model, attention)
        if isinstance(runner, RaggedRunner):
            sizes = graph_sizes(config.max_num_seqs)
            runner.graphs = DecodeGraphs(sizes, kv.blocks_for(max_model_len), model.device)
            header["cuda_graph_sizes"] = sizes
    clock = WallClock()
    monitor, unwatched = monitor_for(model.device, clock)
    if unwatched:
        header["gpu_monitor"] = unwatched
    engine_class = AheadEngine if options.plan_ahead and cls.kv_layout == "paged" else Engine
    if options.plan_ahead:
        header["plan_ahead"] = engine_class is AheadEngine
    return engine_class(
        scheduler,
        runner,
        clock,
        max_model_len=max_model_len,
        tokenizer=model.tokenizer,
        eos_token_ids=model.config.eos_token_ids,
        vocab_size=model.config.vocab_size,
        header=header,
        monitor=monitor,
        limits=options.limits,
        keep_going=options.keep_going,
    )


def _attention(options: EngineOptions, model: LoadedModel, path: CpuPath) -> AttentionBackend:
    if path.compiled is None:
        return choose_attention(options.attention, model.device, model.dtype)
    if options.attention not in ("auto", COMPILED_ATTENTION):
        raise InvalidParameter(
            f"the compiled CPU path brings its own attention, so attention {options.attention!r} can't go with it; "
            "leave one of the two out"
        )
    plain = choose_attention("auto", model.device, model.dtype)
    return replace(plain, name=COMPILED_ATTENTION, why="the compiled CPU path has its own")


def _check_graphs(model: LoadedModel, attention: AttentionBackend) -> None:
    if model.device.type != "cuda":
        raise DeviceError(f"cuda_graphs needs a CUDA GPU, and the model is on {model.device}")
    if not attention.capturable or attention.interpreted:
        raise DeviceError(
            f"cuda_graphs needs attention kernels that read lengths on the device, as triton's do; {attention.name} "
            f"was chosen ({attention.why})"
        )


def resolve_device(name: str) -> torch.device:
    """ "auto", "cpu", "cuda" or "cuda:1" as a torch device. Raises DeviceError where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (":" in name and (kind == "cpu" or not index.isdigit())):
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
    model: LoadedModel,
    attention: AttentionBackend,
    cls: type[Scheduler],
    max_model_len: int,
    config: SchedulerConfig,
    options: EngineOptions,
) -> BlockKV:
    tokens = options.kv_cache_tokens
    if tokens is None:
        bytes_per_token = model.config.kv_bytes_per_token(model.dtype.itemsize)
        unit = max_model_len if cls.kv_layout == "slots" else options.block_size
        most = config.max_num_seqs * -(-max_model_len // unit) * unit
        workspace = 0  # our kernels read keys and values where they lie
        if attention.name != "triton":
            # SDPA copies a layer's out of the pool, and repeats those of prompts for each query head: of all rows of a
            # rectangle at once, of packed rows one by one.
            group = model.config.num_heads // model.config.num_kv_heads
            copied = most + group * (most if cls.kv_layout == "slots" else max_model_len)
            workspace = copied * bytes_per_token // model.config.num_layers
        longest_step = _longest_step(cls, max_model_len, config)
        room = kv_pool_bytes(model, longest_step, config.max_num_seqs, workspace, options.gpu_memory_utilization)
        tokens = min(most, room // bytes_per_token)
        if tokens < unit:
            on_gpu = "; or raise gpu_memory_utilization, or drop engines built before"
            raise DeviceError(
                f"there is no memory left for a KV pool on {model.device}, beside the model and steps of up to "
                f"{longest_step:,} tokens: {tokens:,} tokens fit, and the smallest piece has {unit:,}; "
                "lower max_model_len, max_num_seqs, max_num_batched_tokens or block_size"
                + (on_gpu if model.device.type == "cuda" else "")
            )
    return make_kv(
        cls.kv_layout,
        tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size=options.block_size,
        enable_prefix_caching=options.enable_prefix_caching,
    )


def _longest_step(cls: type[Scheduler], max_model_len: int, config: SchedulerConfig) -> int:
    """Most tokens that a step of this strategy computes."""
    if cls.kv_layout == "slots":
        return config.max_num_seqs * max_model_len
    if cls.splits_prompts:
        return config.max_num_batched_tokens
    return max(config.max_num_batched_tokens, max_model_len)
