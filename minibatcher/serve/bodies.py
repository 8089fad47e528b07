"""Bodies as they come in: who may send one, how long, in what time, and whether it is JSON at all."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute

from .failures import ApiError
from .settings import ServeSettings


class GuardedRoute(APIRoute):
    """A route that looks at a client's key before anything else, and reads the body itself.

    FastAPI would hold a body of any length, for as long as a client cares to send it, and takes NaN for JSON.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, has_body = super().get_route_handler(), self.body_field is not None

        async def guarded(request: Request) -> Response:
            settings: ServeSettings = request.app.state.settings
            request.state.key = _key_of(request, settings)
            if has_body:
                _check_type(request)
                body = await _read(request, settings)
                request = _ReadRequest(request.scope, request.receive, body, parse(body))
            return await handle(request)

        return guarded


class _ReadRequest(Request):
    """One whose body has been read and parsed."""

    def __init__(self, scope, receive, body: bytes, parsed: Any) -> None:
        super().__init__(scope, receive)
        self._body, self._json = body, parsed


def _key_of(request: Request, settings: ServeSettings) -> Any:
    """The ApiKey of a client; None where everybody may ask. Raises ApiError."""
    if settings.keys is None:
        return None
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    key = settings.keys.find(secret.strip() if scheme.lower() == "bearer" else None)
    if key is None:
        raise ApiError(
            401,
            "this server wants an API key that it knows, as the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return key


def _check_type(request: Request) -> None:
    """A web page may send anybody's server text without asking, but not JSON."""
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body must be JSON, with Content-Type: application/json, not {given[:60]!r}")


async def _read(request: Request, settings: ServeSettings) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:19]) > settings.max_body_bytes:
        raise _too_long(settings)
    try:
        return await asyncio.wait_for(_receive(request, settings), settings.body_timeout_s)
    except asyncio.TimeoutError:
        raise ApiError(
            408, f"the body did not come within {settings.body_timeout_s:g} s", headers={"Connection": "close"}
        ) from None


async def _receive(request: Request, settings: ServeSettings) -> bytes:
    pieces, size = [], 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the connection ended before the body did")  # nobody is left to read it
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > settings.max_body_bytes:
            raise _too_long(settings)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_long(settings: ServeSettings) -> ApiError:
    return ApiError(
        413,
        f"the body is longer than {settings.max_body_bytes:,} bytes, the most that this server reads",
        code="body_too_large",
        headers={"Connection": "close"},  # what is left of it is not read
    )


def parse(body: bytes) -> Any:
    """JSON in UTF-8, and nothing that merely looks like it: no NaN, no lone surrogates, no thousands of digits.

    Raises ApiError.
    """
    # A million lists in one body make Python look for garbage among them again and again, for seconds: there is none.
    collects = gc.isenabled()
    gc.disable()
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON in UTF-8: {error}", code="invalid_json") from None
    finally:
        if collects:
            gc.enable()
