"""The FastAPI application: its routes, its exception handlers, and what users add to it.

Generating endpoints are plain Starlette routes (``gateway.http.generate``); all other endpoints are path functions of
FastAPI in ``gateway.http.routes``.
"""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from common.errors import ErrorCode, RequestError
from common.version import VERSION
from gateway.http.access.request_checks import RequestChecks
from gateway.http.errors import HttpError, api_headers, error_response
from gateway.http.formatters.common import as_error
from gateway.http.generate import GenerateApp
from gateway.http.http_connection import REQUEST_ID
from gateway.http.json_response import JsonResponse
from gateway.http.openapi.document import complete
from gateway.http.routes import (
    adapters,
    advice,
    health,
    live,
    messages,
    models,
    page,
    profile,
    requests,
    responses,
    tokenize,
    traces,
    unsupported,
    workers,
)
from gateway.http.services import Services

#: What paths of vLLM and SGLang are called here.
OTHER_PATHS = {
    "/health_generate": "/ready",
    "/ping": "/health",
    "/version": "/server_info",
    "/get_server_info": "/server_info",
    "/model_info": "/get_model_info",
    "/get_load": "/v1/live",
    "/load": "/v1/live",
    "/reset_prefix_cache": "/flush_cache",
}

#: Headers of answers that web pages of other origins may read.
READABLE_HEADERS = "x-request-id request-id retry-after traceparent idempotent-replayed x-baton-ignored".split()

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


class GatewayApp(FastAPI):
    """Hands requests to generating endpoints directly, without middleware, as long as no user has added any."""

    def __init__(self, generating: Sequence[GenerateApp], **options: Any) -> None:
        super().__init__(**options)
        self.router.routes.extend(Route(app.path, app, methods=list(app.endpoint.methods)) for app in generating)
        self._endpoints = [app.endpoint for app in generating]
        self._completed: dict[str, Any] | None = None
        self._direct = {(method, app.path): app for app in generating for method in app.endpoint.methods}

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        if document is not self._completed:
            complete(document, self._endpoints)
            self._completed = document
        return document

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        app = None
        if scope["type"] == "http" and not self.user_middleware:
            app = self._direct.get((scope["method"], scope["path"]))
        return super().__call__(scope, receive, send) if app is None else app(scope, receive, send)


def make_app(
    services: Services,
    checks: RequestChecks,
    generating: Iterable[GenerateApp],
    *,
    lifespan: Lifespan,
    plugins: Iterable[Callable[[FastAPI], object]] = (),
) -> FastAPI:
    app = GatewayApp(
        list(generating),
        title="Baton",
        version=VERSION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's page loads scripts of other servers, which could read the key of the live page
        redoc_url=None,
        dependencies=[Depends(checks.tenant)],
        default_response_class=JsonResponse,
    )
    routers = (
        models, adapters, tokenize, responses, messages, requests, traces, workers, advice, profile, health, live,
        page,
        unsupported,
    )  # fmt: skip
    for module in routers:
        app.include_router(module.make_router(services, checks))
    _handle_exceptions(app)
    if services.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=services.config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=READABLE_HEADERS,
        )
    for plugin in plugins:
        plugin(app)
    return app


def _handle_exceptions(app: FastAPI) -> None:
    """Make an answer of each exception, in the form of the path's API."""

    def id_of(request: Request) -> str:
        request_id: str = request.scope["state"].get(REQUEST_ID, "")
        return request_id

    def respond(request: Request, error: RequestError) -> Response:
        return error_response(error, request.scope["path"], id_of(request))

    async def on_error(request: Request, error: Exception) -> Response:
        return respond(request, as_error(error))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            message = f"this path does not exist; {_other_path(app, request.scope)}"
            return respond(request, RequestError(ErrorCode.NOT_FOUND, message))
        if error.status_code != 405:
            return respond(request, HttpError(error.status_code, str(error.detail)))
        allow = ", ".join(_methods(app, request.scope))
        if request.method == "OPTIONS":
            headers = {"allow": allow, **api_headers(request.scope["path"], id_of(request))}
            return Response(status_code=204, headers=headers)
        message = f"the method {request.method[:16]} is not allowed for this path; use {allow}"
        return respond(request, HttpError(405, message, allow=allow))

    async def on_invalid_parameter(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return respond(request, RequestError(ErrorCode.INVALID_REQUEST, f"{name}: {first['msg']}", param=name))

    app.add_exception_handler(RequestError, on_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_invalid_parameter)
    app.add_exception_handler(Exception, on_error)


def _other_path(app: FastAPI, scope: Scope) -> str:
    """What to do about a path that does not exist: clients often have a base URL with or without the ``/v1``."""
    path = scope["path"]
    plain = path.replace("//", "/").rstrip("/")
    for other in (f"/v1{path}", path.removeprefix("/v1"), plain, OTHER_PATHS.get(path, path)):
        if other != path and _is_served(app, {**scope, "path": other}):
            return f"did you mean {other}?"
    return "/openapi.json lists all that do"


def _methods(app: FastAPI, scope: Scope) -> list[str]:
    """The methods that the path of a request takes."""
    methods = ("DELETE", "GET", "PATCH", "POST", "PUT")
    allowed = [method for method in methods if _is_served(app, {**scope, "method": method})]
    return [*allowed, *(["HEAD"] if "GET" in allowed else []), "OPTIONS"]


def _is_served(app: FastAPI, scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)
