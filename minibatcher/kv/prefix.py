"""Prefix caching: requests that begin with the same tokens share the blocks that hold them.

Source: Kwon et al., SOSP 2023, section 4.4, and vLLM's automatic prefix caching (2024): full blocks only, found by what
they hold and what comes before it, kept when nobody uses them, and given away the longest unused first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from .blocks import BlockKV, TokenSlice

ROOT = -1  # what stands before a first block
Key = tuple[int, tuple[int, ...]]  # the block before, and the token ids


class PrefixKV(BlockKV):
    """A pool whose full blocks can be found by their tokens.

    ROOT ── block 7: "To be or" ── block 2: "not to be" ── block 5: "that is"
                                └─ block 9: "not, Tom,"

    A block is published once its tokens are computed. Its key is the block before it and its own token ids: the tokens
    themselves, so that no two contents can be taken for each other. Published blocks are shared by counting their
    owners. One that has lost its last owner is cached: it stays findable until its place is needed.
    Whoever owns a block owns those before it, and gives back the last one first. So block 2 is evicted before block 7,
    and a key never names a block whose content has changed.
    """

    shares_prefixes = True

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._reset()

    def _reset(self) -> None:
        self._owners = [0] * self.num_blocks
        self._block_of: dict[Key, int] = {}  # key → published block
        self._key_of: dict[int, Key] = {}  # the other way round
        self._cached: OrderedDict[int, None] = OrderedDict()  # published blocks without an owner, longest unused first
        self._num_published: dict[str, int] = {}  # how many blocks of a request's table are
        self._num_shared = 0
        self._looked_up: TokenSlice | None = None  # who waits at the head of the queue is looked up at every step:
        self._trail: list[tuple[Key, int]] = []  # keys and blocks that were found for it the last time

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def num_shared_blocks(self) -> int:
        return self._num_shared

    def lookup(self, tokens: TokenSlice, num_tokens: int) -> list[int]:
        """Published blocks that hold the head of these tokens; never the last token, which must give the next one."""
        if tokens != self._looked_up:
            self._looked_up, self._trail = tokens, []
        keys, size = self._key_of, self.block_size
        most = (num_tokens - 1) // size
        trail = list(takewhile(lambda step: keys.get(step[1]) is step[0], self._trail))  # not evicted since
        for i in range(len(trail), most):
            parent = trail[-1][1] if trail else ROOT
            block = self._block_of.get((parent, tuple(tokens(i * size, (i + 1) * size))))
            if block is None:
                break
            trail.append((keys[block], block))
        self._trail = trail
        return [block for _, block in trail[:most]]

    def demand(
        self, request_id: str, num_tokens: int, tokens: TokenSlice | None = None, without: Sequence[str] = ()
    ) -> int:
        need = self.missing_blocks(request_id, num_tokens)
        if tokens is None:
            return need
        gone = self._count_owned(without)
        return need - sum(self._owners[block] > gone[block] for block in self.lookup(tokens, num_tokens))

    def released_by(self, request_ids: Sequence[str]) -> int:
        return sum(self._owners[block] == n for block, n in self._count_owned(request_ids).items())

    def _count_owned(self, request_ids: Sequence[str]) -> Counter[int]:
        return Counter(block for request_id in request_ids for block in self.table(request_id))

    def start(self, request_id: str, tokens: TokenSlice, num_tokens: int) -> int:
        found = self.lookup(tokens, num_tokens)
        for block in found:
            self._own(block)
        self._tables[request_id] = list(found)
        self._num_published[request_id] = len(found)
        self.allocate(request_id, num_tokens)
        return len(found) * self.block_size

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        missing = self.missing_blocks(request_id, num_tokens)
        if missing > self.num_available_blocks:
            return False
        if missing:
            table = self._tables.setdefault(request_id, [])
            table.extend(self._take() for _ in range(missing))
        return True

    def _take(self) -> int:
        """A block for new content: a free one, else the cached one that was not used for longest."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._owners[block] = 1
        return block

    def _own(self, block: int) -> None:
        self._cached.pop(block, None)
        self._num_shared += self._owners[block] > 0
        self._owners[block] += 1

    def _disown(self, block: int) -> None:
        self._owners[block] -= 1
        if self._owners[block]:
            self._num_shared -= 1
        elif block in self._key_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    def publish(self, request_id: str, tokens: TokenSlice, num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens of this request are computed: its full blocks may be shared.

        Where somebody else has published the same meanwhile, that block takes the place of the request's own.
        """
        table, size = self._tables.get(request_id), self.block_size
        full = num_computed_tokens // size
        if table is None or full <= (done := self._num_published.get(request_id, 0)):
            return
        fresh = False
        for i in range(done, full):
            key = (table[i - 1] if i else ROOT, tuple(tokens(i * size, (i + 1) * size)))
            twin = self._block_of.setdefault(key, table[i])
            if twin == table[i]:
                self._key_of[twin] = key
            else:
                if not fresh:  # a list that does not only grow is another one: see BlockKV.table
                    table, fresh = list(table), True
                    self._tables[request_id] = table
                self._own(twin)
                self._disown(table[i])
                table[i] = twin
        self._num_published[request_id] = full

    def free(self, request_id: str) -> None:
        self._num_published.pop(request_id, None)
        for block in reversed(self._tables.pop(request_id, ())):
            self._disown(block)

    def clear(self) -> None:
        super().clear()
        self._reset()

    def check(self) -> None:
        owners = self._count_owned(list(self._tables))
        extra = sum(n - 1 for n in self._owners if n)
        if extra != self._num_shared or any(owners[block] != n for block, n in enumerate(self._owners)):
            raise RuntimeError(
                f"KV blocks have {dict(owners)} owners, and {self._owners} are counted, {self._num_shared} times shared"
            )
        held = sorted([*owners, *self._free, *self._cached])
        if held != list(range(self.num_blocks)):
            raise RuntimeError(
                f"KV blocks are not conserved: {len(self._free)} free + {len(self._cached)} cached + {len(owners)} "
                f"owned of {self.num_blocks}"
            )
        for key, block in self._block_of.items():
            if self._key_of.get(block) != key or (key[0] != ROOT and key[0] not in self._key_of):
                raise RuntimeError(f"KV block {block} is published wrongly, under block {key[0]}")
        if len(self._block_of) != len(self._key_of) or not self._key_of.keys() >= self._cached.keys():
            raise RuntimeError("KV blocks are cached that can't be found")
