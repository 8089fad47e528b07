"""No batching: one request at a time, alone. The yardstick for speed, and for the right answer."""

from __future__ import annotations

from dataclasses import replace

from .config import SchedulerConfig
from .static import StaticScheduler


class SoloScheduler(StaticScheduler):
    """A static batch of one, which is always full: nothing is padded and nobody waits for a neighbour to end."""

    name = "solo"

    def __init__(self, kv, config: SchedulerConfig) -> None:
        super().__init__(kv, replace(config, max_num_seqs=1))
