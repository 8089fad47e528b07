"""Who owns which piece of KV memory. Bookkeeping only: the tensors belong to the runners."""

from .blocks import BlockKV
from .pool import make_kv
from .slots import SlotKV

__all__ = ["BlockKV", "SlotKV", "make_kv"]
