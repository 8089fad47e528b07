"""One amount of memory, cut into slots or into blocks."""

from __future__ import annotations

from ..errors import RequestRefused
from .blocks import BlockKV
from .prefix import PrefixKV
from .slots import SlotKV


def make_kv(
    layout: str,
    num_tokens: int,
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    enable_prefix_caching: bool = False,
) -> BlockKV:
    """A pool of `num_tokens` tokens: "slots" of max_model_len each, at most max_num_seqs, or "paged" in blocks.

    enable_prefix_caching: blocks can be shared; slots never are. Raises RequestRefused if not even one slot fits.
    """
    if layout == "paged":
        return (PrefixKV if enable_prefix_caching else BlockKV)(max(1, num_tokens // block_size), block_size)
    num_slots = min(max_num_seqs, num_tokens // max_model_len)
    if num_slots == 0:
        raise RequestRefused(
            f"a KV pool of {num_tokens} tokens has no room for one slot of max_model_len",
            need=max_model_len,
            have=num_tokens,
            unit="tokens",
            hint="raise kv_cache_tokens or lower max_model_len",
        )
    return SlotKV(num_slots, max_model_len)
