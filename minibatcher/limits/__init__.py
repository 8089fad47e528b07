"""How much may wait, and how much each tenant may ask for: refused at the door rather than queued without bound."""

from .bounds import OTHERS, Limits, TenantLimit
from .bucket import TokenBucket
from .door import Door

__all__ = ["OTHERS", "Door", "Limits", "TenantLimit", "TokenBucket"]
