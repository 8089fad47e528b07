"""Options that several commands share, and the types that turn a bad value into a sentence."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import InvalidParameter, MinibatcherError
from ..scheduling import ADMISSIONS, ORDERINGS, PREEMPTIONS

LONGEST_STEM = 100  # characters of a file name that a run or model lends
LONGEST_SENTENCE = 2_000  # characters; a name of thousands would bury the rest
LARGEST = 1_000_000_000  # of any number: sums and products of a few stay finite, and clocks can wait that long


def whole_number(at_least: int, at_most: int) -> Callable[[str], int]:
    """An option's type: a whole number within bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = at_least - 1
        if value < at_least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {at_least}")
        if value > at_most:
            raise argparse.ArgumentTypeError(f"{text} is more than {at_most:,}, the most that makes sense here")
        return value

    return parse


positive_int = whole_number(1, LARGEST)
natural_int = whole_number(0, LARGEST)
seed = whole_number(0, 2**63 - 1)


def number(text: str) -> float:
    """A finite number, and no astronomical one."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    if abs(value) > LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is beyond {LARGEST:,}, the most that makes sense here")
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


def names_of(what: str, known: Sequence[str], several: bool = True) -> Callable[[str], tuple[str, ...]]:
    """An option's type: names separated by commas, or a single one."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name for name in text.split(",") if name))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {what} {name!r}; known: {', '.join(known)}")
        if not names or (len(names) > 1 and not several):
            raise argparse.ArgumentTypeError(f"{text!r} must name one of {', '.join(known)}")
        return names

    return parse


def switch(text: str) -> tuple[bool, ...]:
    """An option's type: off, on, or both."""
    return tuple(name == "on" for name in names_of("setting", ("off", "on"))(text))


def tenant_limit(text: str) -> tuple[str, float, float | None]:
    """An option's type: NAME=TOKENS_PER_S[:BURST]."""
    name, equals, amounts = text.rpartition("=")
    per_s, colon, burst = amounts.partition(":")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=TOKENS_PER_S or NAME=TOKENS_PER_S:BURST")
    rate, bucket = number(per_s), number(burst) if colon else None
    if rate < 0:
        raise argparse.ArgumentTypeError(f"TOKENS_PER_S of {text!r} must be at least 0")
    if bucket is not None and bucket < 1:
        raise argparse.ArgumentTypeError(f"BURST of {text!r} must be at least 1 token")
    return name, rate, bucket


def add_model_options(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """several: --model may be given more than once, and is None unless it is."""
    group = parser.add_argument_group("model and device")
    which = (
        "bard (the small Shakespeare model in the package), a folder with a Hugging Face checkpoint (Llama, "
        "Qwen2, Qwen3), a .gguf file, or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct (default: bard)"
    )
    if several:
        group.add_argument("--model", action="append", help=f"{which}; repeatable: an engine for each")
    else:
        group.add_argument("--model", default="bard", help=which)
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: float32 on a CPU)")
    group.add_argument(
        "--attention",
        default="auto",
        help="auto, reference, sdpa or triton; on a CPU Triton's kernels are interpreted, thousands of times slower: "
        "good for a few tokens (default: the fastest that runs here; see minibatcher info)",
    )
    group.add_argument(
        "--threads",
        type=whole_number(1, 1024),
        help="CPU threads (default: PyTorch's choice, but 1 for a model below 30M parameters, whose steps are too "
        "short to share)",
    )


SMALL_MODEL = 30_000_000


def load_for(args: argparse.Namespace):
    """The model that the options name, on its device, with the threads that suit it."""
    import torch

    from ..build import resolve_device
    from ..model.loader import load_model

    model = load_model(args.model, device=resolve_device(args.device), dtype=args.dtype)
    if model.device.type == "cpu" and (args.threads or model.config.num_parameters < SMALL_MODEL):
        torch.set_num_threads(args.threads or 1)
    return model


def add_engine_options(
    parser: argparse.ArgumentParser,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
    kv_cache: str = "room for all",
    several: bool = True,
) -> None:
    """max_num_seqs, max_num_batched_tokens, kv_cache: defaults, for the help. several: names make columns."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-num-seqs",
        type=whole_number(1, 1_000_000),
        help=f"slots: most requests in one step (default: {max_num_seqs})",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive_int,
        help="token budget of a step: chunked fills it, continuous packs prompts up to it "
        f"(default: {max_num_batched_tokens})",
    )
    group.add_argument("--max-model-len", type=positive_int, help="longest prompt + output, in tokens")
    group.add_argument("--block-size", type=whole_number(1, 65_536), help="tokens in a KV block (default: 16)")
    group.add_argument(
        "--kv-cache-tokens",
        type=positive_int,
        help=f"size of the KV pool in tokens; small values make requests wait or be preempted (default: {kv_cache})",
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
    add_pressure_options(parser, several)


def add_pressure_options(parser: argparse.ArgumentParser, several: bool = True) -> None:
    """What happens when memory or patience runs short. several: names separated by commas make columns."""
    names = "NAME[,NAME...]" if several else "NAME"
    columns = "; several names, one column each" if several else ""
    memory = parser.add_argument_group("when memory runs short")
    memory.add_argument(
        "--admission",
        type=names_of("admission", ADMISSIONS, several),
        metavar=names,
        help="for how much KV memory a request must find room before it is let in: worst-case (prompt + max_tokens), "
        "optimistic (a share of what is left up to max_tokens, which falls with time and rises when somebody had to be "
        f"preempted) or preempt (the tokens that it has now){columns} (default: preempt)",
    )
    memory.add_argument(
        "--watermark",
        type=number,
        help="share of the KV blocks that admission leaves free for running requests to grow into (default: 0)",
    )
    memory.add_argument(
        "--preemption",
        type=names_of("preemption", PREEMPTIONS, several),
        metavar=names,
        help="what becomes of the KV of a request that has to make room: recompute (dropped, computed again later) or "
        f"swap (copied to host memory and back){columns} (default: recompute)",
    )
    memory.add_argument(
        "--swap-tokens", type=natural_int, help="host memory for swap, in tokens (default: as much as the KV pool)"
    )
    caching = "share the KV blocks of prompts that begin alike (continuous and chunked)"
    if several:
        memory.add_argument(
            "--enable-prefix-caching",
            type=switch,
            nargs="?",
            const=(True,),
            metavar="off,on",
            help=f"{caching}; off,on makes two columns",
        )
    else:
        memory.add_argument("--enable-prefix-caching", action="store_const", const=(True,), help=caching)
    order = parser.add_argument_group("who is served, and who is not")
    order.add_argument(
        "--ordering",
        type=names_of("ordering", ORDERINGS, several),
        metavar=names,
        help="who is served next: fcfs (in order of arrival), shortest-prompt, priority (paid, interactive, batch, "
        "background: classes 0 to 3 of the workload's `priority`) or fair-share (equal service for each `tenant`)"
        f"{columns} (default: fcfs)",
    )
    order.add_argument(
        "--ageing-s",
        type=positive_number,
        help="so that nobody starves: seconds of waiting that lift a request by one class (priority) or make up for "
        "1,000 tokens of prompt (shortest-prompt) (default: 30, which changes nothing where nobody waits that long: in "
        "a short run try 2)",
    )
    if not several:
        return
    order.add_argument(
        "--max-waiting-requests", type=positive_int, help="refuse who finds so many waiting (default: no limit)"
    )
    order.add_argument(
        "--max-waiting-tokens",
        type=positive_int,
        help="refuse who would bring the prompt + max_tokens of all that wait above this (default: no limit)",
    )
    order.add_argument(
        "--tenant-limit",
        type=tenant_limit,
        action="append",
        metavar="NAME=TOKENS_PER_S[:BURST]",
        help="refuse a tenant that asks for more prompt + max_tokens than flow into its bucket, which holds BURST "
        "(default: what a minute brings); NAME * is for each tenant without one of its own; repeatable",
    )


def add_speed_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what can be switched on and compared")
    group.add_argument(
        "--cuda-graphs",
        action="store_true",
        default=None,
        help="on a GPU: replay decode steps from recordings for a few batch sizes, padded to the next of them "
        "(continuous and chunked, with Triton's kernels)",
    )
    group.add_argument(
        "--cpu-path",
        choices=("plain", "prepacked", "compiled", "auto"),
        help="what computes a step on a CPU: plain (PyTorch, as the book reads it), prepacked (PyTorch, with weights "
        "laid out for its products), compiled (C++ loops, compiled in seconds when first used; needs a C++ compiler) "
        "or auto (the fastest of these that there is) (default: plain)",
    )
    group.add_argument(
        "--plan-ahead",
        action="store_true",
        default=None,
        help="on a GPU: plan each step while the device works on the one before (continuous and chunked)",
    )


ENGINE_OPTIONS = (
    "device",
    "dtype",
    "attention",
    "cpu_path",
    "seed",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "kv_cache_tokens",
    "gpu_memory_utilization",
    "cuda_graphs",
    "plan_ahead",
    "batch_timeout_s",
    "max_queue_delay_s",
    "bucket_by_length",
    "prefill_first",
    "watermark",
    "ageing_s",
    "swap_tokens",
)
CHOICES = ("admission", "ordering", "preemption", "enable_prefix_caching")  # several values make columns


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options that were given, the same for all columns; the engine knows the defaults of the others."""
    options = {name: value for name in ENGINE_OPTIONS if (value := getattr(args, name, None)) is not None}
    options |= {name: value[0] for name in CHOICES if (value := getattr(args, name, None)) and len(value) == 1}
    limits = _limits(args)
    return options | ({"limits": limits} if limits else {})


def choices(args: argparse.Namespace) -> dict[str, tuple]:
    """Options with several values, which make columns."""
    return {name: value for name in CHOICES if (value := getattr(args, name, None)) and len(value) > 1}


def _limits(args: argparse.Namespace):
    """The limits that the options name, or None. Raises InvalidParameter."""
    names = ("max_waiting_requests", "max_waiting_tokens", "tenant_limit")
    requests, tokens, tenants = (getattr(args, name, None) for name in names)
    if requests is None and tokens is None and not tenants:
        return None
    from ..limits import Limits, TenantLimit

    by_name = {name: TenantLimit(tokens_per_s=per_s, burst_tokens=burst) for name, per_s, burst in tenants or ()}
    return Limits(max_waiting_requests=requests, max_waiting_tokens=tokens, tenants=by_name)


def characters(text: str) -> str:
    """U+FFFD for what is no character: bytes of a command line or a pipe that were not UTF-8."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def complain(who: str, message: str) -> int:
    """A sentence on standard error. Returns the exit code of a user's mistake."""
    if len(message) > LONGEST_SENTENCE:
        message = f"{message[: LONGEST_SENTENCE // 2]} […] {message[-LONGEST_SENTENCE // 4 :]}"
    with suppress(OSError):
        print(f"{who}: {message}", file=sys.stderr)
    return 2


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Say in a sentence what went wrong with a file. Raises InvalidParameter."""
    try:
        yield
    except MinibatcherError:
        raise
    except (OSError, ValueError) as error:
        raise InvalidParameter(f"can't write {path!r}: {getattr(error, 'strerror', None) or error}") from error


def write_json(data: Any, path: str) -> None:
    """To a file, or to standard output for "-". Raises InvalidParameter where the file can't be written."""
    # Standard output may have any encoding: there all but ASCII is escaped.
    with writing(path):
        text = json.dumps(data, indent=1, ensure_ascii=path == "-", allow_nan=False) + "\n"
        if path != "-":
            Path(path).write_text(characters(text), encoding="utf-8")
            return
    sys.stdout.write(text)


def check_file(path: str | None) -> None:
    """Say before a long run, not after it, that its result has nowhere to go. Raises InvalidParameter."""
    if path is None or path == "-":
        return
    with writing(path):
        target = Path(path).resolve()
        if not path or target.is_dir():
            raise InvalidParameter(f"can't write {path!r}: it is a folder, not a file")
        if not target.parent.is_dir():
            raise InvalidParameter(f"can't write {path!r}: the folder {target.parent} does not exist")
        if target.exists():
            if not os.access(target, os.W_OK):
                raise InvalidParameter(f"can't write {path!r}: it is write-protected")
        else:
            target.open("xb").close()  # no rule tells as surely as trying
            target.unlink()


def file_stems(names: Iterable[str]) -> list[str]:
    """A name of a file for each of these names: without what separates folders, and no two alike."""
    stems: list[str] = []
    for name in names:
        stem = re.sub(r"[\s/\\:\x00-\x1f]", "-", name)[:LONGEST_STEM]
        free, number = stem, 2
        while free in stems:
            free, number = f"{stem}-{number}", number + 1
        stems.append(free)
    return stems


def check_folder(path: str | None) -> None:
    """The same for a folder that is yet to be made, or there already."""
    if path is None:
        return
    with writing(path):
        if not path:
            raise InvalidParameter("a folder needs a name, not ''")
        there = Path(path).resolve()
        while not there.exists():
            there = there.parent
        if not there.is_dir():
            raise InvalidParameter(f"can't write to {path!r}: {there} is no folder")
        tempfile.TemporaryFile(dir=there).close()
