"""Paged KV memory: a pool of equal blocks, a free list, and one block table per request.

Source: Kwon et al., «Efficient Memory Management for Large Language Model Serving with PagedAttention», SOSP 2023,
section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import InvalidParameter

TokenSlice = Callable[[int, int], Sequence[int]]  # Request.token_slice: token ids from one position to another


class BlockKV:
    """A pool of `num_blocks` blocks of `block_size` tokens each.

    A request's token at position p lives in block `table(request_id)[p // block_size]` at offset `p % block_size`.
    Blocks come one at a time as a request grows, and all return at once when it ends.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InvalidParameter(
                f"a KV pool needs at least one block of at least one token, not {num_blocks} blocks of {block_size}"
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is still warm in the cache
        self._tables: dict[str, list[int]] = {}

    shares_prefixes = False

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that belong to nobody but hold what may be wanted again (prefix.PrefixKV): free all the same."""
        return 0

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be handed out: free ones, and cached ones, whose content is then forgotten."""
        return self.num_free_blocks + self.num_cached_blocks

    @property
    def num_shared_blocks(self) -> int:
        """Blocks more that would be in use if every request had its own: one for each owner but the first."""
        return 0

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_available_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def missing_blocks(self, request_id: str, num_tokens: int) -> int:
        """Blocks that the request would still need in order to hold `num_tokens` tokens in all."""
        return max(0, self.blocks_for(num_tokens) - len(self._tables.get(request_id, ())))

    def demand(
        self, request_id: str, num_tokens: int, tokens: TokenSlice | None = None, without: Sequence[str] = ()
    ) -> int:
        """Free or cached blocks that `start` would take, once the requests of `without` were gone."""
        return self.missing_blocks(request_id, num_tokens)

    def released_by(self, request_ids: Sequence[str]) -> int:
        """Blocks that nobody would own any more if these requests were gone."""
        return sum(len(self.table(request_id)) for request_id in request_ids)

    def start(self, request_id: str, tokens: TokenSlice, num_tokens: int) -> int:
        """Make room for the first `num_tokens` tokens of a request; returns how many of them are computed already.

        tokens: its token ids from one position to another. `demand` says beforehand whether there is room.
        """
        self.allocate(request_id, num_tokens)
        return 0

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens of this request in all. Where blocks run short, take none: False."""
        missing = self.missing_blocks(request_id, num_tokens)
        if missing > len(self._free):
            return False
        if missing:
            table = self._tables.setdefault(request_id, [])
            table.extend(self._free.pop() for _ in range(missing))
        return True

    def lookup(self, tokens: TokenSlice, num_tokens: int) -> list[int]:
        """Blocks that hold the beginning of these tokens already (prefix.PrefixKV); here none."""
        return []

    def publish(self, request_id: str, tokens: TokenSlice, num_computed_tokens: int) -> None:
        """So many tokens of a request are computed (prefix.PrefixKV may share them); here nobody is told."""

    def free(self, request_id: str) -> None:
        """Give all blocks of this request back. A request without blocks is no error: it may never have started."""
        self._free.extend(reversed(self._tables.pop(request_id, ())))

    def clear(self) -> None:
        """Give everything back at once, whatever state an interrupt has left."""
        self._tables.clear()
        self._free = list(range(self.num_blocks - 1, -1, -1))

    def resize(self, num_blocks: int) -> None:
        """Become a pool of `num_blocks` empty blocks. Raises RuntimeError if anybody still owns one."""
        if self._tables:
            raise RuntimeError(f"{len(self._tables)} requests still own KV blocks; free them before resize")
        self.num_blocks = num_blocks
        self.clear()

    def table(self, request_id: str) -> list[int]:
        """The block table: pool indices in order of position. The caller must not change it.

        It is the same list as long as it only grows.
        """
        return self._tables.get(request_id, [])

    def check(self) -> None:
        """Raise RuntimeError unless every block is either free or owned by exactly one request."""
        owned = [block for table in self._tables.values() for block in table]
        if sorted(owned + self._free) != list(range(self.num_blocks)):
            raise RuntimeError(
                f"KV blocks are not conserved: {len(self._free)} free + {len(owned)} owned of {self.num_blocks}, "
                f"{len(owned) + len(self._free) - len(set(owned + self._free))} of them twice"
            )
