"""The book's claims as functions: each computes its figures afresh. A chapter prints them, a test asserts them.

Every function says which row of the syllabus it belongs to. No torch: claims run in virtual time, on hardware and models
from the shipped tables.
"""

from .chunked import BudgetPoint, Stall, budget_sweep, prefill_stall
from .common import machine
from .continuous import (
    FairShare,
    TrafficPoint,
    UtilisationRow,
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
