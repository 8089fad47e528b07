"""Who owns which piece of KV memory. Bookkeeping only: the tensors belong to the runners."""

from .blocks import BlockKV
from .slots import SlotKV

__all__ = ["BlockKV", "SlotKV"]
