"""What a server lets its clients do, whatever the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidParameter
from ..numeric import is_number

if TYPE_CHECKING:
    from .keys import ApiKeys
    from .metrics import ServerMetrics


@dataclass(frozen=True)
class ServeSettings:
    """Bounds on what comes in, who may come in, and what is counted.

    max_body_bytes: the longest body. body_timeout_s: seconds within which all of it must have come. max_choices:
    prompts × n of one body. max_stop: stop strings of one body. keys: who may ask, None is everybody. metrics: what
    /metrics shows, None is nothing.
    Raises InvalidParameter.
    """

    max_body_bytes: int = 1 << 20
    body_timeout_s: float = 30.0
    max_choices: int = 128
    max_stop: int = 16
    keys: ApiKeys | None = None
    metrics: ServerMetrics | None = None

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_choices", "max_stop"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidParameter(f"{name} must be a whole number of at least 1, not {value!r}")
        if not is_number(self.body_timeout_s) or self.body_timeout_s <= 0:
            raise InvalidParameter(f"body_timeout_s must be a positive number of seconds, not {self.body_timeout_s!r}")
