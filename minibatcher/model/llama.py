"""A Llama-family decoder (Llama, Qwen2, Qwen3) over packed tokens, top to bottom.

There is no batch dimension: a step's tokens, of any requests, stand in one row of T tokens. All layers but attention
treat each token by itself, so they need not know whose it is; attention is handed in by the caller, who does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig

# attend(layer, q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]) -> [T, num_heads, head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class LlamaModel(nn.Module):
    """Token ids to hidden states to logits. Weights are as PyTorch initialises them until a loader fills them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.inverse_frequencies = rope_inverse_frequencies(config)  # no buffer: it must stay float32 in any dtype
        self.requires_grad_(False)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass over T packed tokens.

        token_ids, positions: int64 [T]; a token's position is its place in its own request.
        attend: stores the new keys and values and lets each query look at its own request's; called once a layer.
        Returns hidden states [T, hidden_size] in the model's dtype, after the last norm.
        """
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        cos, sin = rope_cos_sin(positions, self.inverse_frequencies)
        x = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden_size] to logits [N, vocab_size], float32."""
        if self.lm_head is None:  # tied: the embeddings serve both ways
            return F.linear(hidden, self.embed_tokens.weight).float()
        return self.lm_head(hidden).float()


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Grouped-query attention: num_heads query heads share num_kv_heads key/value heads."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        heads = config.num_heads + 2 * config.num_kv_heads
        # One product instead of three: rows are the query heads, then the key heads, then the value heads.
        self.qkv_proj = nn.Linear(config.hidden_size, heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.has_qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        qk, v = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.has_qk_norm:
            q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        q, k = rotate(qk, cos, sin).split([self.num_heads, self.num_kv_heads], dim=1)
        return self.o_proj(attend(self.index, q, k, v).reshape(x.shape[0], -1))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)). Source: Shazeer, «GLU Variants Improve Transformer», 2020."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the rms in float32. Source: Zhang and Sennrich, 2019."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotation per position of each pair of dimensions, float32 [head_dim / 2] on the CPU.

    Source: Su et al., «RoFormer», 2021, section 3.2; Llama-3 scaling as in Meta's llama-models: long wavelengths are
    stretched by `factor`, short ones kept, those between blended.
    """
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / config.rope_theta ** (steps / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return stretched
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * stretched


def rope_cos_sin(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [T, 1, head_dim] each, for the half-split convention; the sine's first half is negated for `rotate`."""
    angles = positions.unsqueeze(1).float() * inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=1).unsqueeze(1), torch.cat([-sin, sin], dim=1).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) of x [T, heads, head_dim], in float32."""
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)
