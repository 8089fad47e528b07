"""`minibatcher info`: what will run here, where, and why."""

from __future__ import annotations

import argparse

from ..errors import DeviceError
from .options import add_model_options, check_file, load_for, write_json
from .surroundings import short, surroundings, told, version

EXTRAS = {
    "huggingface_hub": ("hub", "models by hub id"),
    "gguf": ("gguf", "GGUF files"),
    "jupyterlab": ("lab", "the notebooks (make lab)"),
    "nvidia-ml-py": ("gpu", "GPU utilisation, memory and power"),
}


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "info",
        help="versions, device, and what will run where and why",
        description="Say in sentences what minibatcher will use on this machine, and why; for every report of a bug.",
    )
    add_model_options(parser)
    parser.add_argument("--json", metavar="FILE", help="the same as JSON (- for stdout)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    facts = collect(args)
    if args.json:
        write_json(facts, args.json)
    if args.json != "-":
        print("\n".join(sentences(facts)))
    return 0


def collect(args: argparse.Namespace) -> dict:
    """All that `sentences` tells, as plain data."""
    import torch

    from ..attention.choose import choose_attention
    from ..provenance import hardware, software

    around = surroundings()  # before anything here sets a variable
    model = load_for(args)
    attention = choose_attention(args.attention, model.device, model.dtype)
    config = model.config
    return {
        "software": software(),
        "hardware": hardware(model.device),
        "cuda_available": torch.cuda.is_available(),
        "model": {
            "name": model.name,
            "source": short(model.source),
            "architecture": config.architecture,
            "parameters": config.num_parameters,
            "dtype": str(model.dtype).removeprefix("torch."),
            "context": config.max_position_embeddings,
            "kv_bytes_per_token": config.kv_bytes_per_token(model.dtype.itemsize),
            "has_tokenizer": model.tokenizer is not None,
        },
        "attention": {"name": attention.name, "why": attention.why},
        "triton_kernels": _triton(model.device, model.dtype),
        "extras": {name: version(name) for name in EXTRAS},
        "surroundings": around,
    }


def sentences(facts: dict) -> list[str]:
    software, hardware, model = facts["software"], facts["hardware"], facts["model"]
    versions = ", ".join(f"{name} {version}" for name, version in software.items() if name != "system")
    lines = [f"{versions} on {software['system']}."]
    if "threads" in hardware:
        threads = f"{hardware['threads']} thread{'s' if hardware['threads'] > 1 else ''}"
        lines.append(f"Runs on the CPU, {hardware['device']}, with {threads}.")
        if not facts["cuda_available"]:
            lines.append("PyTorch finds no CUDA GPU here; everything in this package works without one.")
    else:
        lines.append(
            f"Runs on the GPU, {hardware['device']}, with {hardware['memory_bytes'] / 2**30:.0f} GiB "
            f"(compute capability {hardware['compute_capability']})."
        )
    lines.append(
        f"Model {model['name']} ({model['architecture']}, {model['parameters']:,} parameters) in {model['dtype']}, "
        f"context {model['context']:,} tokens, {model['kv_bytes_per_token']:,} bytes of KV cache a token; "
        f"from {model['source']}."
    )
    if not model["has_tokenizer"]:
        lines.append("It has no tokenizer.json: token ids in, token ids out.")
    lines.append(f"Attention: {facts['attention']['name']}; {facts['attention']['why']}.")
    lines.append(f"Triton kernels: {facts['triton_kernels']}.")
    for name, (extra, purpose) in EXTRAS.items():
        version = facts["extras"][name]
        found = f"{name} {version}" if version else f"not installed: pip install 'minibatcher[{extra}]'"
        lines.append(f"For {purpose}: {found}.")
    return lines + told(facts["surroundings"])


def _triton(device, dtype) -> str:
    """Whether our kernels run here, whatever was chosen."""
    from ..attention.choose import triton_obstacle
    from ..attention.triton_support import is_interpreted

    try:
        obstacle = triton_obstacle(device, dtype)
    except DeviceError as error:
        obstacle = str(error)
    if obstacle:
        return f"can't run here: {obstacle}"
    if device.type == "cpu" or is_interpreted():
        return "run here in Triton's interpreter, to be studied and checked (minibatcher kernels --check)"
    return "run here compiled (minibatcher kernels --check, --bench)"
