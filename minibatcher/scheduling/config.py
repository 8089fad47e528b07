"""The knobs of all strategies."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidParameter, UnknownName
from ..numeric import is_number

ADMISSIONS = ("worst-case", "optimistic", "preempt")
ORDERINGS = ("fcfs", "shortest-prompt", "priority", "fair-share")
PREEMPTIONS = ("recompute", "swap")


@dataclass(frozen=True)
class SchedulerConfig:
    """Each strategy reads those that it has.

    max_num_seqs: slots, the most requests in one step.
    max_num_batched_tokens: token budget of a step (a bound on prompt packing for `continuous`).
    batch_timeout_s: `static` launches a batch that is not full once its oldest request has waited this long.
    max_queue_delay_s: the same for `dynamic`; 0 means never wait for company, as is the default of NVIDIA Triton
    Inference Server.
    bucket_by_length: `dynamic` fills a batch with the waiting prompts that are nearest in length to the oldest one.
    prefill_first: `chunked` serves prompts before decodes, to show what that costs.
    admission: for how much KV a request must find room before it is let in (scheduling/admission.py).
    watermark: share of the KV blocks that admission leaves free for running requests to grow into.
    ordering: who of those that wait is served next (scheduling/ordering/).
    ageing_s: `priority`: seconds of waiting that lift a request by one class; `shortest-prompt`: seconds of waiting
    that make up for 1,000 tokens of prompt.
    preemption: what becomes of the KV of a request that has to make room: "recompute" drops it, "swap" copies it to
    host memory. swap_tokens: room there, in tokens; None is as much as on the device.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    batch_timeout_s: float = 0.5
    max_queue_delay_s: float = 0.0
    bucket_by_length: bool = False
    prefill_first: bool = False
    admission: str = "preempt"
    watermark: float = 0.0
    ordering: str = "fcfs"
    ageing_s: float = 30.0
    preemption: str = "recompute"
    swap_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidParameter(f"{name} must be a whole number of at least 1, not {value!r}")
        for name in ("batch_timeout_s", "max_queue_delay_s"):
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise InvalidParameter(f"{name} must be a number of seconds, at least 0, not {value!r}")
        if not is_number(self.ageing_s) or self.ageing_s <= 0:
            raise InvalidParameter(f"ageing_s must be a number of seconds above 0, not {self.ageing_s!r}")
        if not is_number(self.watermark) or not 0 <= self.watermark < 1:
            raise InvalidParameter(f"watermark must be a share from 0 to below 1, not {self.watermark!r}")
        if self.swap_tokens is not None and (type(self.swap_tokens) is not int or self.swap_tokens < 0):
            raise InvalidParameter(f"swap_tokens must be a whole number of at least 0, not {self.swap_tokens!r}")
        for name, known in (("admission", ADMISSIONS), ("ordering", ORDERINGS), ("preemption", PREEMPTIONS)):
            if getattr(self, name) not in known:
                raise UnknownName(name, getattr(self, name), list(known))
