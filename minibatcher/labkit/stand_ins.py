"""The parts of the earlier labs that the capstone's loop is played with, so that it is judged apart from them."""

from __future__ import annotations

from collections.abc import Iterable


def next_batch(
    running: list[str], finished: Iterable[str], waiting: list[str], max_num_seqs: int
) -> tuple[list[str], list[str]]:
    """Who has finished leaves, who waits longest enters."""
    gone = set(finished)
    stay = [name for name in running if name not in gone]
    free = max(0, max_num_seqs - len(stay))
    return stay + list(waiting[:free]), list(waiting[free:])


def finish_reason(
    token_ids: list[int], text: str, max_tokens: int, eos: int, stop: list[str], aborted: bool
) -> str | None:
    """Why a request ends now; None if it goes on."""
    if aborted:
        return "abort"
    if token_ids[-1:] == [eos] or any(word in text for word in stop):
        return "stop"
    return "length" if len(token_ids) >= max_tokens else None


def plan_step(pending: dict[str, int], budget: int) -> dict[str, int]:
    """Those who want one token first, then the others in order, each as much as is left."""
    plan: dict[str, int] = {}
    for name in sorted(pending, key=lambda name: pending[name] > 1):  # sorted keeps the order of equals
        if tokens := min(pending[name], budget - sum(plan.values())):
            plan[name] = tokens
    return plan


class BlockPool:
    """Blocks of a KV cache, each held by one name at most."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._size, self._free = block_size, list(range(num_blocks))
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, name: str, num_tokens: int) -> bool:
        """Blocks for num_tokens tokens of `name` in all; False, and nothing taken, if too few are free."""
        missing = -(-num_tokens // self._size) - len(self._tables.get(name, []))
        if missing > len(self._free):
            return False
        table = self._tables.setdefault(name, [])
        table += [self._free.pop() for _ in range(missing)]
        return True

    def free(self, name: str) -> None:
        self._free += self._tables.pop(name, [])

    def table(self, name: str) -> list[int]:
        return list(self._tables.get(name, []))
