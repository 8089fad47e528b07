"""Contiguous KV memory: one slice of fixed size per slot, as servers had it before paging."""

from __future__ import annotations

from .blocks import BlockKV


class SlotKV(BlockKV):
    """`num_slots` slices of `slot_size` tokens; a request takes a whole slice however short it is.

    A slot is a block as large as the longest request. Paging is what you get by making it smaller.
    """

    def __init__(self, num_slots: int, slot_size: int) -> None:
        super().__init__(num_blocks=num_slots, block_size=slot_size)
