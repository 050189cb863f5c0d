"""The errors of requests, of starts and of our own code.

A request ends in tokens or in exactly one ``ErrorCode``, which nodes, gateway and clients see. Its HTTP status is
defined here. A ``ConfigError`` ends a process at start, with a message that names the flag.
"""

from enum import StrEnum


class ErrorCode(StrEnum):
    """Cause of a failed request; clients see the value as ``error.code``."""

    INVALID_REQUEST = "invalid_request"
    AUTHENTICATION = "authentication"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    BODY_TOO_LARGE = "body_too_large"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    POOL_TOO_SMALL = "pool_too_small"
    NOT_SUPPORTED = "not_supported"
    QUEUE_FULL = "queue_full"
    NO_ROUTE = "no_route"
    NODE_LOST = "node_lost"
    TRANSFER_FAILED = "transfer_failed"
    OUT_OF_PAGES = "out_of_pages"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ABORTED = "aborted"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"


HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.AUTHENTICATION: 401,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.BODY_TOO_LARGE: 413,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.POOL_TOO_SMALL: 400,
    ErrorCode.NOT_SUPPORTED: 400,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.NO_ROUTE: 503,
    ErrorCode.NODE_LOST: 502,
    ErrorCode.TRANSFER_FAILED: 502,
    ErrorCode.OUT_OF_PAGES: 503,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.ABORTED: 499,
    ErrorCode.SHUTTING_DOWN: 503,
    ErrorCode.INTERNAL: 500,
}


class BatonError(Exception):
    """Base class of Baton's errors, except for failed assertions."""


class ConfigError(BatonError):
    """A flag, environment variable or file is wrong; the message names it and says what to do."""


class UnsupportedModelError(ConfigError):
    """Baton does not support the checkpoint; the message lists what it supports."""


class RequestError(BatonError):
    """One request failed.

    Attributes:
        code: cause of the failure.
        message: description for the client.
        param: name of the body field that is wrong; None if no field is.
        retry_after_s: with ``QUEUE_FULL``, seconds after which a retry should succeed.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        return HTTP_STATUS[self.code]


class InvariantError(AssertionError):
    """The state of our own code is inconsistent; the message says where. Every ``check`` raises it."""


def invariant(holds: object, message: str) -> None:
    """Raise ``InvariantError`` unless ``holds``. Unlike ``assert`` it also checks under ``python -O``."""
    if not holds:
        raise InvariantError(message)
