"""Errors of HTTP itself, and the answer to an error in the form of the path's API."""

import math

from common.errors import ErrorCode, RequestError
from gateway.http.formatters.anthropic import anthropic_error
from gateway.http.formatters.common import error_body
from gateway.http.json_response import JsonResponse

#: Begins the paths of Anthropic's API.
ANTHROPIC_PATHS = "/v1/messages"


class HttpError(RequestError):
    """An invalid HTTP message, with its own status."""

    def __init__(self, status: int, message: str, *, allow: str = "") -> None:
        super().__init__(ErrorCode.INVALID_REQUEST, message)
        self._status = status
        self.allow = allow

    @property
    def status(self) -> int:
        return self._status


def too_large(max_bytes: int) -> RequestError:
    message = f"the body is larger than {max_bytes} bytes (the gateway's --max-body-bytes)"
    return RequestError(ErrorCode.BODY_TOO_LARGE, message)


def api_headers(path: str, request_id: str) -> dict[str, str]:
    """The headers of every answer of the path's API: Anthropic's clients read ``request-id``, not ``x-request-id``."""
    return {"request-id": request_id} if path.startswith(ANTHROPIC_PATHS) else {}


def error_response(error: RequestError, path: str, request_id: str) -> JsonResponse:
    """The answer to a request that has failed, with the error's status and in the form of the path's API."""
    is_anthropic = path.startswith(ANTHROPIC_PATHS)
    body = {**anthropic_error(error), "request_id": request_id} if is_anthropic else error_body(error)
    return JsonResponse(body, error.status, {**_error_headers(error), **api_headers(path, request_id)})


def _error_headers(error: RequestError) -> dict[str, str]:
    """The headers that belong to an error's status."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, HttpError) and error.allow:
        headers["allow"] = error.allow
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers
