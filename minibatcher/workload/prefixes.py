"""Prompts of which only lengths and prefix hashes are known, and what a cache of prefixes could find in any prompts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import overload

from .base import WorkloadRequest


class HashedPrompt(Sequence[int]):
    """Placeholder token ids of a prompt, made when they are asked for.

    Each of `prefix_hashes` stands for `tokens_per_hash` tokens, and equal tokens stand exactly where equal hashes do.
    What lies beyond the hashes belongs to the request alone. All ids are above 0 or below it: 0 is what a simulated
    runner samples, and no prompt may begin with another one's answer. They are no ids of any vocabulary.
    """

    __slots__ = ("_hashes", "_num_tokens", "_own_id", "_tokens_per_hash")

    def __init__(self, request_id: str, num_tokens: int, prefix_hashes: Sequence[int], tokens_per_hash: int) -> None:
        self._hashes, self._num_tokens, self._tokens_per_hash = prefix_hashes, num_tokens, tokens_per_hash
        # even, and no two requests have the same; those of hashes are odd
        self._own_id = 2 + 2 * int.from_bytes(request_id.encode("utf-8", "surrogatepass"), "big")

    @classmethod
    def of(cls, row: WorkloadRequest) -> HashedPrompt:
        assert row.prompt_tokens is not None  # whoever shares a prefix names the length of it all
        return cls(row.request_id, row.prompt_tokens, row.prefix_hashes, row.tokens_per_hash)

    def __len__(self) -> int:
        return self._num_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index):
        if not isinstance(index, slice):
            position = range(self._num_tokens)[index]
            return self._id_of(position // self._tokens_per_hash)
        start, stop, step = index.indices(self._num_tokens)
        if step != 1:
            return [self[position] for position in range(start, stop, step)]
        token_ids: list[int] = []
        while True:
            piece = start // self._tokens_per_hash
            end = (piece + 1) * self._tokens_per_hash
            if end >= stop or piece >= len(self._hashes):  # at once, for nearly all blocks of a KV pool
                return token_ids + [self._id_of(piece)] * (stop - start)
            token_ids += [self._id_of(piece)] * (end - start)
            start = end

    def _id_of(self, piece: int) -> int:
        if piece >= len(self._hashes):
            return self._own_id
        # hashes of pieces of another size are other hashes
        return 1 + 2 * (self._hashes[piece] << 31 | self._tokens_per_hash)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Of the hashed head: the id that each piece consists of, and how many tokens it has."""
        size = self._tokens_per_hash
        for i in range(min(len(self._hashes), -(-self._num_tokens // size))):
            yield self._id_of(i), min(size, self._num_tokens - i * size)


def shared_tokens(prompts: Iterable[Sequence[int]], block_size: int) -> Iterator[int]:
    """For each prompt, how many tokens at its head stand at the head of an earlier one, too.

    Prompts are a trie of pieces: runs of equal tokens of a HashedPrompt, else whole blocks of `block_size` token ids.
    """
    places: dict[tuple[int, Hashable], int] = {}  # (place of the piece before, piece) → its place
    longest = [0]  # tokens of the piece at each place in the prompt that has most of it; place 0 is the root
    for prompt in prompts:
        place = shared = 0
        for piece, num_tokens in prompt.pieces() if isinstance(prompt, HashedPrompt) else _blocks(prompt, block_size):
            place = places.setdefault((place, piece), len(longest))
            if place == len(longest):
                longest.append(0)
            shared += min(num_tokens, longest[place])  # none has what follows a piece that none has whole
            longest[place] = max(longest[place], num_tokens)
        yield shared


def _blocks(prompt: Sequence[int], block_size: int) -> Iterator[tuple[tuple[int, ...], int]]:
    for end in range(block_size, len(prompt) + 1, block_size):
        yield tuple(prompt[end - block_size : end]), block_size


def prefix_bound(prompts: Iterable[Sequence[int]], block_size: int) -> dict[str, int]:
    """What a prefix cache without limits would find: {"tokens": found, "of": all prompt tokens}, ready for a record.

    Whole blocks are found, and never the last token of a prompt; all of an earlier prompt counts as there at once, and
    nothing that is generated. No order of service finds more: prompts are counted from the shortest to the longest,
    since one that ends where a block ends does not look for that block, but leaves it to all others.
    """
    prompts = sorted(prompts, key=len)
    shared = zip(prompts, shared_tokens(prompts, block_size))
    found = sum(min(tokens, len(prompt) - 1) // block_size * block_size for prompt, tokens in shared)
    return {"tokens": found, "of": sum(map(len, prompts))}
