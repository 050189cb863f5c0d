"""What every request passes before its handler: the key, the stop of the server, and the limits of its body.

FastAPI's path functions use these checks as dependencies, the generating endpoints call ``RequestChecks.admit``.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request
from starlette.types import Receive, Scope

from common.errors import ErrorCode, RequestError
from gateway.http.auth import HEADER, Authenticator
from gateway.http.errors import HttpError
from gateway.http.limits import LIGHT_BYTES, check_weight

#: Paths that need no key: they reveal nothing about requests or configuration.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics"})
#: Begins the paths of the files of the page at ``/``, which need no key either.
STATIC = "/static/"


class RequestChecks:
    """Args:
    max_values: the most values that a body may have now; more get 413.
    on_rejected: called with each error of a body.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        *,
        max_values: Callable[[], int],
        on_rejected: Callable[[RequestError], None],
    ) -> None:
        self._authenticator = authenticator
        self._max_values = max_values
        self._on_rejected = on_rejected
        self._is_stopping = False

    def begin_stop(self) -> None:
        """Refuses further POST and PUT requests, and ``/ready``, with 503."""
        self._is_stopping = True

    async def admit(self, scope: Scope, receive: Receive) -> tuple[str, bytes]:
        """The tenant and the body of a request. Raises RequestError."""
        headers = headers_of(scope)
        return self._tenant(scope, headers), await self._body(headers, receive)

    # ---- dependencies of FastAPI -------------------------------------------------------------------------------------

    async def tenant(self, request: Request) -> str:
        """The tenant of the key or of the tenant header; empty for none. Raises RequestError."""
        return self._tenant(request.scope, headers_of(request.scope))

    async def body(self, request: Request) -> bytes:
        """The body, of the type JSON. Raises RequestError."""
        return await self._body(headers_of(request.scope), request.receive)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _tenant(self, scope: Scope, headers: Mapping[str, str]) -> str:
        path, tenant = scope["path"], ""
        if self._authenticator.needs_key or HEADER in headers:
            is_open = path in OPEN_PATHS or path.startswith(STATIC)
            tenant = self._authenticator.tenant(headers, is_open=is_open)
        if self._is_stopping and (scope["method"] in ("POST", "PUT") or path == "/ready"):
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the server is stopping")
        return tenant

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        try:
            _check_headers(headers)
            body = await _read(receive)
            if len(body) > LIGHT_BYTES:
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


def _check_headers(headers: Mapping[str, str]) -> None:
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(415, "the Content-Type must be application/json")
    if "content-length" not in headers and "transfer-encoding" not in headers:
        raise HttpError(411, "a body is needed; give its Content-Length")


async def _read(receive: Receive) -> bytes:
    message: Any = await receive()
    if not message.get("more_body"):
        body: bytes = message.get("body", b"")
        return body
    parts = [message["body"]]
    while message.get("more_body"):
        message = await receive()
        parts.append(message.get("body", b""))
    return b"".join(parts)
