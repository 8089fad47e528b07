"""Who owns which piece of KV memory. Bookkeeping only: the tensors belong to the runners."""

from .blocks import BlockKV
from .pool import make_kv
from .prefix import PrefixKV
from .slots import SlotKV

__all__ = ["BlockKV", "PrefixKV", "SlotKV", "make_kv"]
