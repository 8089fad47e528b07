"""Attention over a paged KV cache: a plain reference, PyTorch SDPA, and the choice between them."""

from .cache import PaddedBatch, RaggedBatch, store_kv
from .choose import AttentionBackend, choose_attention

__all__ = ["AttentionBackend", "PaddedBatch", "RaggedBatch", "choose_attention", "store_kv"]
