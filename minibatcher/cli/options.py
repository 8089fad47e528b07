"""Options that several commands share, and the types that turn a bad value into a sentence."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from ..errors import InvalidParameter


def positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def natural_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return value


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def positive_number(text: str) -> float:
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def rate(text: str) -> float:
    """Requests per second; `inf` lets all arrive at once."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of requests per second (or inf)")
    return value


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and device")
    group.add_argument(
        "--model",
        default="bard",
        help="bard (the small Shakespeare model in the package), a folder with a Hugging Face checkpoint (Llama, "
        "Qwen2, Qwen3), a .gguf file, or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct (default: bard)",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: float32 on a CPU)")
    group.add_argument("--attention", default="auto", help="auto, reference or sdpa (default: auto)")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--max-num-seqs", type=positive_int, help="slots: most requests in one step (default: 16)")
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive_int,
        help="token budget of a step: chunked fills it, continuous packs prompts up to it (default: 256)",
    )
    group.add_argument("--max-model-len", type=positive_int, help="longest prompt + output, in tokens")
    group.add_argument("--block-size", type=positive_int, help="tokens in a KV block (default: 16)")
    group.add_argument(
        "--kv-cache-tokens",
        type=positive_int,
        help="size of the KV pool in tokens; small values make requests wait or be preempted (default: room for all)",
    )
    group.add_argument("--gpu-memory-utilization", type=number, help="share of a GPU's memory to use (default: 0.9)")
    group.add_argument("--batch-timeout-s", type=number, help="static: longest wait for a full batch (default: 0.5)")
    group.add_argument("--max-queue-delay-s", type=number, help="dynamic: longest wait for company (default: 0)")
    group.add_argument(
        "--bucket-by-length", action="store_true", default=None, help="dynamic: batch prompts of similar length"
    )
    group.add_argument(
        "--prefill-first",
        action="store_true",
        default=None,
        help="chunked: serve prompts before decodes, to see why not",
    )


ENGINE_OPTIONS = (
    "device",
    "dtype",
    "attention",
    "seed",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "kv_cache_tokens",
    "gpu_memory_utilization",
    "batch_timeout_s",
    "max_queue_delay_s",
    "bucket_by_length",
    "prefill_first",
)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options that were given; the engine knows the defaults of the others."""
    return {name: value for name in ENGINE_OPTIONS if (value := getattr(args, name, None)) is not None}


def write_json(data: Any, path: str) -> None:
    """To a file, or to standard output for "-". Raises InvalidParameter where the file can't be written."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidParameter(f"can't write {path}: {error.strerror}") from error


def check_writable(path: str | None) -> None:
    """Say before a long run, not after it, that its result has nowhere to go."""
    if path and path != "-" and not Path(path).resolve().parent.is_dir():
        raise InvalidParameter(f"can't write {path}: the folder {Path(path).resolve().parent} does not exist")
