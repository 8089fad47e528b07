"""A model of a known shape with random weights: as fast as the trained one, and there without a download."""

from __future__ import annotations

import torch

from ..model.config import ModelConfig
from ..model.loader import LoadedModel, empty_model

# The sizes of Llama 3.2 1B. Source: config.json of huggingface.co/meta-llama/Llama-3.2-1B; its context is cut to 8,192.
LLAMA_1B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_theta": 500_000.0,
}
TINY = LLAMA_1B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def random_model(config: dict, name: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> LoadedModel:
    """A model of a Hugging Face configuration: matrices normal with deviation 0.02, norms 1, biases 0. No tokenizer."""
    parsed = ModelConfig.from_hf(config)
    model = empty_model(parsed, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02, generator=generator)
        else:
            parameter.fill_(0.0 if key.endswith("bias") else 1.0)
    return LoadedModel(model, parsed, None, name, "random weights", dtype, device, f"random-{seed}")
