"""Errors that a user can cause. Each is a sentence: what was wrong, with the values, and what to do."""

from __future__ import annotations


class MinibatcherError(Exception):
    """A user's mistake. The command line prints the sentence and exits with code 2."""


class InvalidParameter(MinibatcherError, ValueError):
    """A parameter is out of its range, not a number, or does not go with another."""


class UnknownName(MinibatcherError, ValueError):
    """A strategy, profile, model or device name that does not exist; the sentence lists the known ones."""

    def __init__(self, kind: str, name: str, known: list[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(known)}")
        self.known = known


class ModelError(MinibatcherError):
    """A checkpoint that is missing, incomplete, damaged or of an unsupported architecture."""


class DeviceError(MinibatcherError):
    """A device or precision that this machine does not have."""


class OutOfMemory(DeviceError):
    """The device has no memory left for what was asked of it."""


class WorkloadError(MinibatcherError):
    """A workload that is missing, empty or malformed; names the line where there is one."""


class MissingDependency(MinibatcherError, ImportError):
    """An optional package is not installed; the sentence says which and how to get it."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the sentence alone, since the way to it helps nobody."""
        return [f"Missing: {self}"]


class PlanError(MinibatcherError):
    """A scheduler broke its contract: the sentence says what it planned, and what it may plan."""


class RequestRefused(MinibatcherError):
    """A request that could never be served, refused when it is submitted.

    Attributes: `need` and `have` in tokens (or blocks, as `unit` says) and `hint`, what to change. retry_after_s:
    seconds after which the same request may be let in; None where that is unknown or waiting would not help. for_good:
    it would not, and neither would trying again.
    """

    def __init__(
        self,
        what: str,
        *,
        need: int,
        have: int,
        unit: str,
        hint: str,
        retry_after_s: float | None = None,
        for_good: bool = False,
    ) -> None:
        super().__init__(f"{what}: need {need} {unit}, have {have}; {hint}")
        self.need, self.have, self.unit, self.hint = need, have, unit, hint
        self.retry_after_s, self.for_good = retry_after_s, for_good


class QueueFull(RequestRefused):
    """Too much waits already (limits.Limits).

    `retry_after_s` is an estimate from how fast the queue has moved lately; None if it has not moved yet, or if the
    request is larger than the queue.
    """


class RateLimited(RequestRefused):
    """The tenant has had its share for now (limits.TenantLimit). `retry_after_s` is exact; None: it can never be."""


class RequestFailed(MinibatcherError):
    """A request whose stream is being read has ended with an error: the sentence says which."""
