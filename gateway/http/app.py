"""The HTTP edge: routes, keys, bodies, errors. What a handler raises becomes an answer in OpenAI's envelope here.

Built on aiohttp's low-level server: one dictionary of routes, no middleware, and a handler is cancelled as soon as its
client has gone.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_exceptions import HTTPException

from common.errors import HTTP_STATUS, ErrorCode, RequestError
from gateway.http.auth import Authenticator
from gateway.http.limits import LIGHT_BYTES, check_weight
from gateway.http.responses import as_error, encode_json, error_body

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
OnDone = Callable[[str, int], None]

#: Paths that need no key: they tell nothing about requests or configuration.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics"})
LINGER_S = 5.0
CLIENT_GONE = 499
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _OurFaults(logging.Filter):
    """Keeps tracebacks out of the log that only say that a client left, or does not speak HTTP."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return not isinstance(error, ConnectionError | HttpProcessingError)


http_log = logging.getLogger(f"{__name__}.http")
http_log.addFilter(_OurFaults())


class HttpError(RequestError):
    """A fault of the HTTP message itself, with its own status."""

    def __init__(self, status: int, message: str, *, allow: str = "") -> None:
        super().__init__(ErrorCode.INVALID_REQUEST, message)
        self._status = status
        self.allow = allow

    @property
    def status(self) -> int:
        return self._status


class HttpServer:
    """Takes HTTP requests apart and hands them to their handlers.

    Args:
        routes: handlers by path and method; a path that ends in ``/*`` stands for all below it.
        callers: knows whose key a request carries.
        max_body_bytes: larger bodies get 413.
        body_timeout_s: slower bodies get 408.
        max_values: of a body; more get 413.
        on_done: told of every answer's path and status.
    """

    def __init__(
        self, routes: Mapping[str, Mapping[str, Handler]], *, callers: Authenticator, max_body_bytes: int,
        body_timeout_s: float, max_values: Callable[[], int], on_done: OnDone,
    ) -> None:  # fmt: skip
        self._routes = routes
        self._callers = callers
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._max_values = max_values
        self._on_done = on_done
        self.is_stopping = False

    def server(self, *, header_timeout_s: float) -> web.Server:
        """The protocol factory. Needs the running event loop."""
        return web.Server(
            self.handle,
            handler_cancellation=True,
            access_log=None,
            logger=http_log,
            keepalive_timeout=header_timeout_s,
            lingering_time=LINGER_S,
        )

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request, to its answer. Only a client's disappearance raises."""
        path = self._known(request.raw_path.partition("?")[0])
        try:
            response = await self._route(request, path)
        except (ConnectionError, asyncio.CancelledError):
            self._on_done(path, CLIENT_GONE)
            raise
        except HTTPException:
            raise
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("a request for %s failed", path)
            response = error_response(as_error(error))
        self._on_done(path, response.status)
        return response

    def _known(self, path: str) -> str:
        """The route that a path takes; "other" if there is none."""
        if path in self._routes:
            return path
        parent = path.rpartition("/")[0]
        while parent:  # names of models may have slashes in them
            if f"{parent}/*" in self._routes:
                return f"{parent}/*"
            parent = parent.rpartition("/")[0]
        return "other"

    async def _route(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        methods = self._routes.get(path)
        self._callers.tenant(request.headers, is_open=path in OPEN_PATHS)
        if methods is None:
            raise RequestError(ErrorCode.NOT_FOUND, "there is nothing at this path")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allow = ", ".join(methods)
            raise HttpError(405, f"the method {request.method[:16]} is not allowed here, only {allow}", allow=allow)
        if self.is_stopping and request.method == "POST":
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the server is stopping")
        return await handler(request)

    def tenant(self, request: web.BaseRequest) -> str:
        """On whose account a request is that has come through here; empty for nobody's in particular."""
        return self._callers.tenant(request.headers)

    async def body(self, request: web.BaseRequest) -> bytes:
        """The JSON body's bytes. Raises RequestError: not JSON, too large, too slow, too much in it."""
        kind = request.headers.get("Content-Type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise HttpError(415, "the Content-Type must be application/json")
        if request.content_length is not None and request.content_length > self._max_body_bytes:
            raise self._too_large()
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(CONTINUE)
        try:
            if request.content.is_eof() and request.content.total_bytes <= self._max_body_bytes:
                body = request.content.read_nowait()  # all of it came with the headers
            else:
                async with asyncio.timeout(self._body_timeout_s):
                    body = await self._read(request)
        except TimeoutError as error:
            raise HttpError(408, f"the body did not arrive within {self._body_timeout_s:g} s") from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise HttpError(400, "the body cannot be read: its transfer or content encoding is broken") from error
        if len(body) > LIGHT_BYTES:
            await check_weight(body, self._max_values())
        return body

    async def _read(self, request: web.BaseRequest) -> bytes:
        body = bytearray()
        while chunk := await request.content.readany():
            body += chunk
            if len(body) > self._max_body_bytes:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> RequestError:
        return RequestError(ErrorCode.BODY_TOO_LARGE, f"the body is larger than {self._max_body_bytes} bytes")


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer in JSON."""
    return web.Response(body=encode_json(data), status=status, headers=headers, content_type="application/json")


def error_response(error: RequestError) -> web.Response:
    """An error in OpenAI's envelope, with the headers that belong to its status."""
    status = error.status if isinstance(error, HttpError) else HTTP_STATUS[error.code]
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, HttpError) and error.allow:
        headers["Allow"] = error.allow
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error, status), status, headers)
