"""The routes of OpenAI's interface, and a router to the engine of the model that a body names."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import InvalidParameter, RequestRefused
from .asking import Call
from .bodies import GuardedRoute
from .chat import chat
from .completions import complete
from .failures import ApiError, explain
from .host import EngineHost
from .protocol import ChatBody, CompletionBody, SamplingBody, check_supported
from .settings import ServeSettings
from .shapes import ChatAnswer, CompletionAnswer, ErrorAnswer, Health, ModelCard, ModelList

LOG = logging.getLogger(__name__)
OWNER = "minibatcher"
LONGEST_ID = 200  # characters of a client's X-Request-Id
EVENTS = {"text/event-stream": {"schema": {"type": "string", "description": "server-sent events, if stream is true"}}}
WHY = {
    400: "The body makes no sense, or asks for what this server or model does not do.",
    401: "The API key is missing or unknown.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is not declared as JSON.",
    429: "Too much waits already, or this key has had its share: see Retry-After.",
    500: "The server has failed.",
    503: "The server is shutting down.",
}


def create_app(hosts: Mapping[str, EngineHost], settings: ServeSettings) -> FastAPI:
    """An application that serves `hosts` by name; start them before it answers, and stop them after."""
    app = FastAPI(
        title="minibatcher",
        description="OpenAI's interface to minibatcher's engine.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # clients of an API don't follow a POST elsewhere
    )
    app.state.hosts, app.state.settings = dict(hosts), settings
    api = APIRouter(
        prefix="/v1",
        route_class=GuardedRoute,
        dependencies=[Security(HTTPBearer(auto_error=False))] if settings.keys is not None else [],
    )
    _add_generation(api)
    _add_models(api)
    app.include_router(api)
    _add_operations(app)
    for kind in (ApiError, RequestValidationError, HTTPException, InvalidParameter, RequestRefused):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(Outermost)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    return app


def _answer_error(http: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # its words are the status's
        path = http.url.path[:LONGEST_ID]
        message = f"{http.method} {path}: {error.detail}; /openapi.json says what this server answers"
        return ApiError(error.status_code, message, headers=error.headers).response()
    return explain(error).response()


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorAnswer, "description": WHY[status]} for status in statuses}


def _add_generation(api: APIRouter) -> None:
    errors = _errors(*WHY)

    @api.post("/completions", response_model=CompletionAnswer, responses=errors | {200: {"content": EVENTS}})
    async def completions(http: Request, body: CompletionBody) -> Response:
        return await complete(http, await _call(http, body, "cmpl", "prompt"), body)

    @api.post("/chat/completions", response_model=ChatAnswer, responses=errors | {200: {"content": EVENTS}})
    async def chat_completions(http: Request, body: ChatBody) -> Response:
        return await chat(http, await _call(http, body, "chatcmpl", "messages"), body)


async def _call(http: Request, body: SamplingBody, prefix: str, prompt_field: str) -> Call:
    host = _host_of(http, body)
    host.check_open()
    check_supported(body, await http.json())
    answer_id = f"{prefix}-{http.state.request_id}"
    return Call(host, http.app.state.settings, http.state.key, answer_id, int(time.time()), prompt_field)


def _host_of(http: Request, body: SamplingBody) -> EngineHost:
    hosts: dict[str, EngineHost] = http.app.state.hosts
    if body.model is not None:
        return _named(hosts, body.model)
    if len(hosts) > 1:
        raise ApiError(400, f"model is missing; give one of {', '.join(hosts)}", param="model")
    return next(iter(hosts.values()))


def _named(hosts: dict[str, EngineHost], name: str) -> EngineHost:
    if name not in hosts:
        known = ", ".join(hosts)
        raise ApiError(
            404, f"there is no model {name[:100]!r} here; known: {known}", param="model", code="model_not_found"
        )
    return hosts[name]


def _add_models(api: APIRouter) -> None:
    @api.get("/models", responses=_errors(401))
    async def models(http: Request) -> ModelList:
        return ModelList(object="list", data=[_card(host) for host in http.app.state.hosts.values()])

    @api.get("/models/{model_id:path}", responses=_errors(400, 401, 404))
    async def model(http: Request, model_id: str) -> ModelCard:
        return _card(_named(http.app.state.hosts, model_id))


def _card(host: EngineHost) -> ModelCard:
    return ModelCard(
        id=host.name,
        object="model",
        created=host.created,
        owned_by=OWNER,
        root=host.name,
        max_model_len=host.max_model_len,
        vocab_size=host.engine.vocab_size,
        special_token_ids=list(host.special_token_ids),
    )


def _add_operations(app: FastAPI) -> None:
    @app.get("/health", responses=_errors(500, 503))
    async def health(http: Request) -> Health:
        for host in http.app.state.hosts.values():
            host.check_open()
        return Health(status="ok")

    @app.get("/metrics", response_class=Response, responses=_errors(404) | {200: {"content": {"text/plain": {}}}})
    async def metrics(http: Request) -> Response:
        server_metrics = http.app.state.settings.metrics
        if server_metrics is None:
            raise ApiError(404, "this server keeps no metrics")
        text, kind = server_metrics.exposition(http.headers.get("accept"))
        return Response(text, headers={"Content-Type": kind})


def _schema(app: FastAPI) -> dict[str, Any]:
    """FastAPI's, without the 422 that it answers to bad bodies: ours is a 400."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema


class Outermost:
    """Names each request in a header, and answers also where the server itself has failed."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        shown = given.decode("latin-1")[:LONGEST_ID] or request_id
        begun = False

        async def named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["X-Request-Id"] = shown
            await send(message)

        try:
            _check_http(scope)
            await self.app(scope, receive, named)
        except ApiError as error:
            await error.response()(scope, receive, named)
        except Exception as error:
            LOG.exception("a request has failed")
            if begun:
                raise  # the server ends the connection
            await explain(error).response()(scope, receive, named)


def _check_http(scope: Scope) -> None:
    """Raise ApiError for what h11 lets through.

    Of a body with a length and an encoding a proxy may believe the one and we the other: to each, another request
    would come after it.
    """
    names = {name for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise ApiError(400, "a body has Content-Length or Transfer-Encoding, not both", headers={"Connection": "close"})
    if scope["http_version"] not in ("1.0", "1.1"):
        version = scope["http_version"]
        raise ApiError(505, f"this server speaks HTTP/1.1, not HTTP/{version}", headers={"Connection": "close"})
