"""Whatever goes wrong, as a status and the error object that OpenAI's clients understand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from ..errors import InvalidParameter, QueueFull, RateLimited, RequestRefused

KINDS = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}
LONGEST_WAIT_S = 2**31 - 1  # that every client can read
LONGEST_VALUE = 60  # characters of a client's value that its error repeats


class ApiError(Exception):
    """An answer that is an error. status: of HTTP. param: the field at fault. code: for programs to tell errors apart.

    retry_after_s: after so many seconds, rounded up to at least 1, the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(min(retry_after_s, LONGEST_WAIT_S))))

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        # escaped, so that whatever a client has sent can be repeated to it
        return Response(json.dumps(self.body), self.status, self.headers, media_type="application/json")


def explain(error: Exception, param: str | None = None) -> ApiError:
    """What a client is told of an exception. param: the field that is at fault if the request can't be served."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (QueueFull, RateLimited)):
        if error.for_good:
            return ApiError(400, str(error), code="request_too_large")
        code = "queue_full" if isinstance(error, QueueFull) else "rate_limit_exceeded"
        return ApiError(429, str(error), code=code, retry_after_s=error.retry_after_s or 1)
    if isinstance(error, RequestRefused):
        return ApiError(400, str(error), param=param, code="context_length_exceeded")
    if isinstance(error, InvalidParameter):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    return ApiError(500, "the server has failed; its log says how", code="internal_error")


def _invalid(error: RequestValidationError) -> ApiError:
    """The first field that is wrong; where it may be of several types, what is wrong for each."""
    faults = error.errors()
    places = [_place(fault["loc"]) for fault in faults]
    param = places[0].split(".")[0]
    mine = [(place, fault) for place, fault in zip(places, faults) if place.split(".")[0] == param]
    why = dict.fromkeys(f"{place}: {fault['msg']}" for place, fault in mine[:4])
    value = _shortened(mine[0][1].get("input"))
    message = f"{'; or '.join(why)}, not {value}" if param else f"the body must be a JSON object, not {value}"
    missing = mine[0][1]["type"] == "missing"
    return ApiError(
        400,
        f"{param} is missing; the body must have it" if missing and param == places[0] else message,
        param=param or None,
        code="missing_required_parameter" if missing else "invalid_value",
    )


def _place(loc: tuple[Any, ...]) -> str:
    """("body", "messages", 0, "content", "list[TextPart]", 1) → messages.0.content.1, without the names of types."""
    parts = [str(part) for part in loc[1:]]
    return ".".join(part for part in parts if part not in ("str", "constrained-str") and "[" not in part)


def _shortened(value: Any) -> str:
    if isinstance(value, (str, list, dict)):
        value = value[:LONGEST_VALUE] if isinstance(value, (str, list)) else f"an object of {len(value)} fields"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
