"""From a name to a model ready to run: the bundled one, a Hugging Face folder, a GGUF file or a hub id."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import DeviceError, MissingDependency, ModelError, UnknownName
from .config import ModelConfig
from .llama import LlamaModel
from .tokenizer import Tokenizer

BUNDLED = "bard"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class LoadedModel:
    """A model with all that its users ask about it.

    tokenizer: None where the folder has no tokenizer.json. source: the folder or file that was read.
    fingerprint: a short hash over the configuration and each weight file's name, size and ends.
    """

    model: LlamaModel
    config: ModelConfig
    tokenizer: Tokenizer | None
    name: str
    source: str
    dtype: torch.dtype
    device: torch.device
    fingerprint: str


def load_model(
    name: str | Path = BUNDLED, *, device: str | torch.device = "cpu", dtype: str | torch.dtype = "auto"
) -> LoadedModel:
    """Load a model for inference.

    name: "bard" (bundled with the package), a folder with config.json and safetensors, a .gguf file, or a hub id such
    as "org/name". dtype "auto": float32 on the CPU; on CUDA bfloat16 from compute capability 8.0 on, else float16.
    Raises ModelError, DeviceError, UnknownName (dtype) and MissingDependency, each with a sentence.
    """
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    folder = find_model(str(name))
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    config = ModelConfig.from_hf(raw, read_json(generation) if generation.exists() else None)
    files = weight_files(folder)
    model = empty_model(config, device, dtype)
    fill(model, read_tensors(files), source=folder)
    tokenizer_file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(tokenizer_file, config) if tokenizer_file.exists() else None
    return LoadedModel(model, config, tokenizer, str(name), str(folder), dtype, device, fingerprint(raw, files))


def resolve_device(device: str | torch.device) -> torch.device:
    """Raises DeviceError unless this machine can run models on it."""
    try:
        device = torch.device(device)
    except RuntimeError:
        raise DeviceError(f"{device!r} is not a device; use 'cpu' or 'cuda'") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError("PyTorch finds no CUDA GPU on this machine; use device 'cpu'")
        if (device.index or 0) >= torch.cuda.device_count():
            raise DeviceError(f"there is no GPU {device.index}; this machine has {torch.cuda.device_count()}")
    elif device.type != "cpu":
        raise DeviceError(f"device {str(device)!r} is not supported; use 'cpu' or 'cuda'")
    return device


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        # Ask the capability: torch.cuda.is_bf16_supported() also says yes where bfloat16 is only emulated.
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UnknownName("dtype", name, ["auto", *DTYPES])
    return DTYPES[name]


def find_model(name: str) -> Path:
    """The folder in which `name`'s config.json and weights stand, after conversion or download if need be."""
    if name == BUNDLED:
        return Path(__file__).with_name("bard")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {str(path)!r}; check the path")
        from .gguf import convert_gguf

        return convert_gguf(path)
    if path.exists():
        raise ModelError(f"{str(path)!r} is neither a folder nor a .gguf file; give the folder that holds config.json")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return _download(name)
    raise ModelError(
        f"no model {name!r}: it is not the bundled model ({BUNDLED!r}), there is no folder or .gguf file of that name "
        f"here ({Path.cwd()}), and it does not look like a hub id ('org/name')"
    )


def _download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingDependency(
            f"there is no folder {name!r} here; to fetch a model of that name from the Hugging Face hub, "
            "install the extra: pip install 'minibatcher[hub]'"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # the hub library has many kinds, and those of its HTTP library besides
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"no model {name!r}: there is no folder of that name here ({Path.cwd()}), and the Hugging Face hub could "
            f"not deliver it ({reason}); check the name and the network, or give a folder"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ModelError(f"folder {str(path.parent)!r} has no {path.name}; a model folder needs it")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{str(path)!r} is damaged: {error}; fetch it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{str(path)!r} holds a {type(value).__name__}, not an object; fetch it again")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors: one file, or the shards that the index lists."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{str(index)!r} lists no weights; fetch it again")
        files = [folder / name for name in sorted(set(shards.values()))]
        lacking = [file.name for file in files if not file.exists()]
        if lacking:
            raise ModelError(f"folder {str(folder)!r} lacks weight files that its index lists: {_some(lacking)}")
        return files
    if list(folder.glob("*.bin")) or list(folder.glob("*.pth")):
        raise ModelError(
            f"folder {str(folder)!r} has its weights only as pickled PyTorch files (.bin, .pth), which can run code "
            "when read; convert it to safetensors (transformers: from_pretrained, then save_pretrained)"
        )
    raise ModelError(f"folder {str(folder)!r} has no model.safetensors and no model.safetensors.index.json")


def read_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) one by one, so that no file is ever in memory as a whole."""
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{str(file)!r} is damaged or cut short ({error}); fetch it again") from None


def empty_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> LlamaModel:
    """The model in its final place and precision, contents undefined."""
    with torch.device("meta"), _Uninitialised():
        model = LlamaModel(config).to(dtype)
    return model.to_empty(device=device).eval()


class _Uninitialised(TorchFunctionMode):
    """Leaves parameters as they are: random weights would be overwritten, and on "meta" they cost a long import."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def fill(model: LlamaModel, tensors: Iterator[tuple[str, Tensor]], *, source: Path) -> None:
    """Copy each tensor of a Hugging Face checkpoint to its place. Raises ModelError unless names and shapes agree."""
    places = checkpoint_places(model)
    filled: set[str] = set()
    unexpected: list[str] = []
    for name, tensor in tensors:
        if name not in places:
            # Some checkpoints store what can be computed, or a second copy of tied embeddings.
            if not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight":
                unexpected.append(name)
            continue
        if tensor.shape != places[name].shape:
            raise ModelError(
                f"tensor {name!r} in {str(source)!r} has shape {list(tensor.shape)}, but config.json means "
                f"{list(places[name].shape)}; the two do not belong together"
            )
        places[name].copy_(tensor)
        filled.add(name)
    missing = [name for name in places if name not in filled]
    if missing:
        raise ModelError(f"the weights in {str(source)!r} lack {len(missing)} tensors: {_some(missing)}")
    if unexpected:
        raise ModelError(
            f"the weights in {str(source)!r} hold {len(unexpected)} tensors that config.json does not mean: "
            f"{_some(unexpected)}"
        )


def checkpoint_places(model: LlamaModel) -> dict[str, Tensor]:
    """The name of each tensor in a Hugging Face checkpoint, and the part of the model's parameters that it fills."""
    config = model.config
    sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
    places = {"model.embed_tokens.weight": model.embed_tokens.weight, "model.norm.weight": model.norm.weight}
    if model.lm_head is not None:
        places["lm_head.weight"] = model.lm_head.weight
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        for name, parameter in layer.named_parameters():
            module, _, kind = name.rpartition(".")
            if module == "self_attn.qkv_proj":
                parts = zip(("q_proj", "k_proj", "v_proj"), parameter.split(sizes))
                places |= {f"{prefix}self_attn.{part}.{kind}": rows for part, rows in parts}
            elif module == "mlp.gate_up_proj":
                gate, up = parameter.chunk(2)
                places |= {f"{prefix}mlp.gate_proj.{kind}": gate, f"{prefix}mlp.up_proj.{kind}": up}
            else:
                places[prefix + name] = parameter
    return places


def fingerprint(config: dict[str, Any], files: list[Path]) -> str:
    """12 hex digits that tell checkpoints apart without reading all of their weights."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 16))
            stream.seek(max(0, size - (1 << 16)))
            digest.update(stream.read())
    return digest.hexdigest()[:12]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
