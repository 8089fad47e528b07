"""Attention over a paged KV cache: a plain reference, PyTorch SDPA, and the choice between them."""

from .cache import RaggedBatch, store_kv
from .choose import AttentionBackend, choose_attention

__all__ = ["AttentionBackend", "RaggedBatch", "choose_attention", "store_kv"]
