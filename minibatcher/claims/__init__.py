"""The book's claims as functions: each computes its figures afresh. A chapter prints them, a test asserts them.

Every function says which row of the syllabus it belongs to. No torch: claims run in virtual time, on hardware and
models from the shipped tables.
"""

from .chunked import BudgetPoint, Stall, budget_sweep, prefill_stall
from .common import machine
from .continuous import (
    FairShare,
    TrafficPoint,
    UtilisationRow,
    Verdict,
    fair_share,
    low_traffic,
    utilisation_sweep,
    utilisation_verdicts,
)
from .disaggregated import Serving, disaggregation
from .intensity import (
    Intensity,
    PhaseBounds,
    SharedStream,
    decode_intensity,
    mixed_intensity,
    phase_bounds,
    prefill_intensity,
    shared_stream,
    step_intensity,
)
from .memory import Concurrency, KVSize, concurrency, kv_size, kv_sizes
from .padding import (
    BatchWaste,
    FastestFinisher,
    PaddedRow,
    batch_waste,
    bucketing,
    ended_rows,
    fastest_finisher,
    padded_prefill,
    padding_factors,
)
from .paging import PoolUse, Reservation, pool_use, reservations
from .static import (
    BatchEnd,
    DelayPoint,
    EqualLengths,
    TailLatency,
    batch_ends,
    closed_loop_delay,
    delay_sweep,
    equal_lengths,
    tail_latency,
)

__all__ = [
    "BatchEnd",
    "BatchWaste",
    "BudgetPoint",
    "Concurrency",
    "DelayPoint",
    "EqualLengths",
    "FairShare",
    "FastestFinisher",
    "Intensity",
    "KVSize",
    "PaddedRow",
    "PhaseBounds",
    "PoolUse",
    "Reservation",
    "Serving",
    "SharedStream",
    "Stall",
    "TailLatency",
    "TrafficPoint",
    "UtilisationRow",
    "Verdict",
    "batch_ends",
    "batch_waste",
    "bucketing",
    "budget_sweep",
    "closed_loop_delay",
    "concurrency",
    "decode_intensity",
    "delay_sweep",
    "disaggregation",
    "ended_rows",
    "equal_lengths",
    "fair_share",
    "fastest_finisher",
    "kv_size",
    "kv_sizes",
    "low_traffic",
    "machine",
    "mixed_intensity",
    "padded_prefill",
    "padding_factors",
    "phase_bounds",
    "pool_use",
    "prefill_intensity",
    "prefill_stall",
    "reservations",
    "shared_stream",
    "step_intensity",
    "tail_latency",
    "utilisation_sweep",
    "utilisation_verdicts",
]
