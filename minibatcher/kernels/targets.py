"""The compile table for several GPUs, a process for each, some of them at the same time. No torch."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import MinibatcherError
from .child import SectionFailed, SectionInterrupted, run_section

# The most shared memory that one block may ask for, in bytes, by compute capability times ten. Source: NVIDIA CUDA C++
# Programming Guide, technical specifications per compute capability (the largest, with opt-in).
SHARED_MEMORY = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
TARGETS = tuple(SHARED_MEMORY)


def compile_targets(
    targets: Sequence[int], jobs: int = 2, progress: Callable[[str, int, int | None], None] | None = None
) -> tuple[list[dict[str, Any]], list[str], bool]:
    """The rows of compile.rows for each target, in this order, a sentence for each target that broke off, and whether a
    Ctrl-C ended it all.

    Nothing compiled before is reused: the caches are new and temporary. progress: ("compile", done, total).
    """
    rows: dict[int, list] = {target: [] for target in targets}
    totals: dict[int, int] = {}
    errors: list[str] = []
    lock, interrupted = threading.Lock(), threading.Event()

    def one(target: int) -> None:
        with tempfile.TemporaryDirectory(prefix="minibatcher-compile-") as cache:
            env = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": cache}
            try:
                for row in run_section("compile", {"target": target}, env=env):
                    if interrupted.is_set():
                        break  # which ends the process, should Ctrl-C have reached this one alone
                    with lock:
                        if "total" in row:
                            totals[target] = row["total"]
                        else:
                            rows[target].append(row)
                        if progress is not None:
                            every = sum(totals.values()) if len(totals) == len(targets) else None
                            progress("compile", sum(map(len, rows.values())), every)
            except SectionInterrupted:
                interrupted.set()
            except (SectionFailed, MinibatcherError) as error:
                errors.append(f"the compilation for {target / 10:.1f} broke off: {error}")

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(one, targets))
        except KeyboardInterrupt:
            interrupted.set()
            pool.shutdown(wait=True, cancel_futures=True)
    return [row for target in targets for row in rows[target]], errors, interrupted.is_set()
