"""A loaded model as the compiled library wants it: weights packed once, and each step one call."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import cast

import torch
from torch import Tensor

from ..attention import RaggedBatch
from ..model.config import ModelConfig
from ..model.llama import DecoderLayer, LlamaModel, rope_cos_sin
from .library import DTYPES, library

HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128)
PARTS = ("norms", "products", "rotation", "attention", "logits")
MULTIPLE = 16  # numbers in the widest vector: rows must fill them


def obstacle(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """A sentence that says why the compiled path can't serve such a model; None if it can, given a compiler."""
    if device.type != "cpu":
        return f"it is for CPUs, and the model is on {device}"
    if dtype not in DTYPES:
        return f"it serves float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if config.head_dim not in HEAD_DIMS:
        return f"it serves heads of {', '.join(map(str, HEAD_DIMS))} dimensions, not {config.head_dim}"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % MULTIPLE:
            return f"{name} must be a multiple of {MULTIPLE}, not {getattr(config, name)}"
    return None


class _Weights(ctypes.Structure):
    _fields_ = [("panels", c_void_p), ("outputs", c_int64), ("inner", c_int64)]


class _Layer(ctypes.Structure):
    _fields_ = [(name, _Weights) for name in ("qkv", "o", "gate_up", "down")] + [
        (name, c_void_p) for name in ("norm1", "norm2", "qkv_bias", "q_norm", "k_norm")
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *[(name, c_int64) for name in ("hidden", "intermediate", "num_layers", "num_heads", "num_kv_heads")],
        *[(name, c_int64) for name in ("head_dim", "vocab")],
        ("eps", c_float),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", _Weights),
        ("layers", c_void_p),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *[(name, c_int64) for name in ("num_tokens", "num_requests", "num_newest", "max_blocks")],
        *[(name, c_int64) for name in ("block_size", "num_threads")],
        *[(name, c_void_p) for name in ("token_ids", "positions", "slot_mapping", "query_starts", "context_lens")],
        *[(name, c_void_p) for name in ("block_tables", "newest", "cos", "sin", "k_caches", "v_caches")],
        *[(name, c_void_p) for name in ("logits", "best")],
        *[("workspace", c_void_p), ("seconds", c_void_p)],
    ]


class CompiledModel:
    """The same function as LlamaModel over packed tokens, attention and logits included.

    Holds a second copy of the weight matrices, packed for the products; later changes to the model are not seen.
    target, without: as compiled.library.library. Raises DeviceError where the library can't be had.
    """

    def __init__(
        self, model: LlamaModel, dtype: torch.dtype, target: str | None = None, without: tuple[str, ...] = ()
    ) -> None:
        config = model.config
        self._lib = library(dtype, target, without)
        self._kept: list[object] = []  # what the structures point to
        self._inverse_frequencies = model.inverse_frequencies
        self._cos = self._sin = torch.empty(0, 0)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._one_step = threading.Lock()  # engines in several threads share the workspace
        self.seconds: Tensor | None = None  # float64 [len(PARTS)]: where there is one, each step adds its time to it
        layers = (_Layer * config.num_layers)(*[self._layer(cast(DecoderLayer, layer)) for layer in model.layers])
        embedding = model.embed_tokens.weight
        output = embedding if model.lm_head is None else model.lm_head.weight
        self._kept += [layers, embedding]
        self.vocab_size = config.vocab_size
        self._model = _Model(
            config.hidden_size,
            config.intermediate_size,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            config.rms_norm_eps,
            embedding.data_ptr(),
            self._floats(model.norm.weight),
            self._pack(output),
            ctypes.addressof(layers),
        )
        self._stride = self._lib.logits_stride(ctypes.addressof(self._model))

    def step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        newest: Tensor,
        pool: Sequence[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """One step: stores the T tokens' keys and values in the pool; returns logits [N, vocab_size], float32, and the
        token of the largest logit of each row, int64 [N].

        token_ids, positions: int64 [T]. batch, pool: as attention.reference.ragged_attention. newest: int64 [N],
        ascending: the tokens whose logits are wanted.
        """
        with self._one_step:
            num_tokens, num_newest, threads = len(token_ids), len(newest), torch.get_num_threads()
            self._make_room(num_tokens, threads, max(batch.context_lens_list))
            logits, best = torch.empty(num_newest, self._stride), torch.empty(num_newest, dtype=torch.int64)
            caches = [(c_void_p * len(pool))(*[layer[i].data_ptr() for layer in pool]) for i in (0, 1)]  # of k and v
            step = _Step(
                num_tokens,
                len(batch.query_lens),
                num_newest,
                batch.block_tables.shape[1],
                pool[0][0].shape[1],
                threads,
                *[array.data_ptr() for array in (token_ids, positions, batch.slot_mapping, batch.cu_seqlens_q)],
                *[array.data_ptr() for array in (batch.context_lens, batch.block_tables, newest, self._cos, self._sin)],
                *[ctypes.addressof(cache) for cache in caches],
                logits.data_ptr(),
                best.data_ptr(),
                self._workspace.data_ptr(),
                None if self.seconds is None else self.seconds.data_ptr(),
            )
            self._lib.forward(ctypes.addressof(self._model), ctypes.addressof(step))
        return logits[:, : self.vocab_size], best

    def _make_room(self, num_tokens: int, threads: int, longest: int) -> None:
        need = self._lib.workspace_bytes(ctypes.addressof(self._model), num_tokens, threads)
        if need > len(self._workspace):
            self._workspace = torch.empty(need, dtype=torch.uint8)
        if longest > len(self._cos):
            positions = torch.arange(1 << (longest - 1).bit_length())
            cos, sin = (table.squeeze(1) for table in rope_cos_sin(positions, self._inverse_frequencies))
            half = cos.shape[1] // 2
            self._cos, self._sin = cos[:, :half].contiguous(), sin[:, half:].contiguous()

    def _layer(self, layer: DecoderLayer) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = (attention.q_norm, attention.k_norm) if attention.has_qk_norm else ()
        return _Layer(
            self._pack(attention.qkv_proj.weight),
            self._pack(attention.o_proj.weight),
            self._pack(mlp.gate_up_proj.weight, pairs=True),
            self._pack(mlp.down_proj.weight),
            self._floats(layer.input_layernorm.weight),
            self._floats(layer.post_attention_layernorm.weight),
            self._floats(attention.qkv_proj.bias),
            *[self._floats(norm.weight) for norm in norms],
        )

    def _pack(self, weight: Tensor, pairs: bool = False) -> _Weights:
        """weight [outputs, inner] as panels. pairs: gates above, ups below."""
        outputs, inner = weight.shape
        panels = torch.empty(self._lib.packed_numbers(outputs, inner), dtype=weight.dtype)
        self._lib.pack(weight.data_ptr(), outputs, inner, pairs, panels.data_ptr())
        self._kept.append(panels)
        return _Weights(panels.data_ptr(), outputs, inner)

    def _floats(self, vector: Tensor | None) -> int | None:
        if vector is None:
            return None
        self._kept.append(kept := vector.detach().float().contiguous().clone())
        return kept.data_ptr()
