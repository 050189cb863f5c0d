"""What every request passes before its handler: its origin, its key, and the limits of its body.

FastAPI's path functions use these checks as dependencies, the generating endpoints call ``RequestChecks.admit``.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request
from starlette.types import Receive, Scope

from common.errors import ErrorCode, RequestError
from gateway.http.access.auth import HEADER, Authenticator, Caller
from gateway.http.access.origins import SAFE_METHODS, AllowedOrigins
from gateway.http.errors import HttpError
from gateway.http.limits import LIGHT_BYTES, MAX_DEPTH, check_weight

#: Paths that need no key: they reveal nothing about requests or configuration.
OPEN_PATHS = frozenset({"/", "/docs", "/health", "/ready", "/metrics"})
#: Begins the paths of the files of the pages, which need no key either.
STATIC = "/static/"
#: The caller of each request where no key is configured.
ANYONE = Caller(tenant="", is_admin=True)


class RequestChecks:
    """Checks the origin, the caller and the body of each request.

    Args:
        max_values: the most values that a body may have now; more get 413.
        on_rejected: called with each error of a body.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        origins: AllowedOrigins,
        *,
        max_values: Callable[[], int],
        on_rejected: Callable[[RequestError], None],
    ) -> None:
        self._authenticator = authenticator
        self._origins = origins
        self._max_values = max_values
        self._on_rejected = on_rejected
        self._is_stopping = False

    def begin_stop(self) -> None:
        """Refuse further POST and PUT requests, and ``/ready``, with 503."""
        self._is_stopping = True

    async def admit(self, scope: Scope, receive: Receive) -> tuple[str, bytes]:
        """The tenant and the body of a request. Raises RequestError."""
        headers = headers_of(scope)
        return self._caller(scope, headers).tenant, await self._body(headers, receive)

    # ---- dependencies of FastAPI -------------------------------------------------------------------------------------

    async def caller(self, request: Request) -> Caller:
        """The caller, known by its key or the tenant header. Raises RequestError: no valid key where one is needed."""
        return self._caller(request.scope, headers_of(request.scope))

    async def tenant(self, request: Request) -> str:
        """The tenant of the caller; empty for none. Raises RequestError."""
        return self._caller(request.scope, headers_of(request.scope)).tenant

    async def admin(self, request: Request) -> None:
        """For endpoints that change the state of others. Raises RequestError: the caller is no admin."""
        headers = headers_of(request.scope)
        self._authenticator.check_admin(self._caller(request.scope, headers))
        if has_body(headers):
            _check_content_type(headers)

    async def body(self, request: Request) -> bytes:
        """The body, of the type JSON. Raises RequestError."""
        return await self._body(headers_of(request.scope), request.receive)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check_admin(self, caller: Caller) -> None:
        """Raises RequestError: the caller is no admin."""
        self._authenticator.check_admin(caller)

    def _caller(self, scope: Scope, headers: Mapping[str, str]) -> Caller:
        path, method = scope["path"], scope["method"]
        if method not in SAFE_METHODS and ("origin" in headers or "sec-fetch-site" in headers):
            self._origins.check(headers)
        caller = ANYONE
        if HEADER in headers and sum(name == HEADER.encode() for name, _ in scope["headers"]) > 1:
            message = f"{HEADER}: was sent twice; a proxy must replace the header of its client, not add another one"
            raise RequestError(ErrorCode.INVALID_REQUEST, message, param=HEADER)
        if self._authenticator.has_keys or HEADER in headers:
            is_open = path in OPEN_PATHS or path.startswith(STATIC)
            caller = self._authenticator.caller(headers, is_open=is_open)
        if self._is_stopping and (method in ("POST", "PUT") or path == "/ready"):
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the server is stopping")
        return caller

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        try:
            _check_content_type(headers)
            _check_encoding(headers)
            if "content-length" not in headers and "transfer-encoding" not in headers:
                raise HttpError(411, "a body is needed; give its Content-Length")
            message: Any = await receive()
            body: bytes = message.get("body", b"")
            if message.get("more_body"):
                body = await _read(receive, body)
            if len(body) > LIGHT_BYTES or body.count(b"[") + body.count(b"{") > MAX_DEPTH:
                await check_weight(body, self._max_values())
        except RequestError as error:
            self._on_rejected(error)
            raise
        return body


def headers_of(scope: Scope) -> dict[str, str]:
    """The headers of a request; of several with one name the first."""
    return {
        name.decode("latin-1"): value.decode(errors="surrogateescape") for name, value in reversed(scope["headers"])
    }


def has_body(headers: Mapping[str, str]) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _check_content_type(headers: Mapping[str, str]) -> None:
    """Raises HttpError: the body is not JSON. A page of another site cannot send JSON without asking the server."""
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(415, "the Content-Type must be application/json")


def _check_encoding(headers: Mapping[str, str]) -> None:
    """Raises HttpError: the body is compressed."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"a body with the Content-Encoding {encoding[:32]!r} is not read; send it without one"
        raise HttpError(415, message)


async def _read(receive: Receive, first: bytes) -> bytes:
    """The whole body, of which ``first`` has been received."""
    parts, has_more = [first], True
    while has_more:
        message: Any = await receive()
        parts.append(message.get("body", b""))
        has_more = message.get("more_body", False)
    return b"".join(parts)
