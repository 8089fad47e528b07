"""Dynamic batching: a maximum batch size *and* a maximum queue delay, as in NVIDIA Triton Inference Server."""

from __future__ import annotations

from ..request import Request
from .static import StaticScheduler


class DynamicScheduler(StaticScheduler):
    """Launches as soon as the engine is free and the oldest request has waited `max_queue_delay_s` (0: at once).

    Until then late arrivals may join. Once launched the batch is fixed, so it inherits the wait for the slowest row.
    `bucket_by_length` fills the batch with the prompts nearest in length to the oldest one: less padding, same wait.
    """

    name = "dynamic"

    def _patience(self) -> float:
        return self.config.max_queue_delay_s

    def _choose(self) -> list[Request]:
        if not self.config.bucket_by_length:
            return super()._choose()
        length = self.waiting.head.num_prompt_tokens  # the first in order always goes, so nobody starves
        nearest = sorted(self.waiting, key=lambda r: abs(r.num_prompt_tokens - length))  # stable: the first stays first
        return nearest[: self.config.max_num_seqs]
