"""The errors of requests, of starts and of our own code.

A request ends in tokens or in exactly one ``ErrorCode``, which nodes, gateway and clients see. A ``ConfigError`` ends a
process at start, with a message that names the flag.
"""

import sys
from enum import StrEnum


class ErrorCode(StrEnum):
    """Cause of a failed request, which clients see as ``error.code``, and its HTTP status."""

    status: int

    def __new__(cls, value: str, status: int) -> "ErrorCode":
        code = str.__new__(cls, value)
        code._value_, code.status = value, status
        return code

    INVALID_REQUEST = "invalid_request", 400
    AUTHENTICATION = "authentication", 401
    PERMISSION_DENIED = "permission_denied", 403
    MODEL_NOT_FOUND = "model_not_found", 404
    NOT_FOUND = "not_found", 404
    PREVIOUS_RESPONSE_NOT_FOUND = "previous_response_not_found", 400
    BODY_TOO_LARGE = "body_too_large", 413
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded", 400
    POOL_TOO_SMALL = "pool_too_small", 400
    NOT_SUPPORTED = "not_supported", 400
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused", 422
    TAKEN_OVER = "taken_over", 409
    QUEUE_FULL = "queue_full", 429
    NO_ROUTE = "no_route", 503
    NODE_LOST = "node_lost", 502
    TRANSFER_FAILED = "transfer_failed", 502
    OUT_OF_PAGES = "out_of_pages", 503
    DEADLINE_EXCEEDED = "deadline_exceeded", 504
    ABORTED = "aborted", 499
    SHUTTING_DOWN = "shutting_down", 503
    INTERNAL = "internal", 500


#: Codes with which a node reports that an attempt ended without the fault of the request: the gateway tries it again.
RECOVERABLE = frozenset(
    {
        ErrorCode.NODE_LOST,
        ErrorCode.TRANSFER_FAILED,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.QUEUE_FULL,
        ErrorCode.INTERNAL,
    }
)


def reason_of(error: Exception) -> str:
    """Why something failed; of an OSError without its number and path, for messages that name the path already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class BatonError(Exception):
    """Base class of Baton's errors, except for failed assertions."""


class ConfigError(BatonError):
    """A flag, environment variable or file is wrong; the message names it and says what to do.

    Attributes:
        exit_status: with which a process ends that cannot start.
    """

    exit_status = 2


class FetchError(ConfigError):
    """A model cannot be fetched from the hub at present; another start may succeed."""

    exit_status = 1


def needs_extra(name: str) -> str:
    """The end of an error that packages of an extra are missing, with the command that installs them."""
    command = f"{sys.executable} -m pip install -c constraints.txt '.[{name}]'"
    return f"needs the extra {name}; in a checkout of Baton, run {command}"


class RankLostError(BatonError):
    """A rank of this node has ended, or does not answer: the node cannot work any more."""


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
        return self.code.status


class InvariantError(AssertionError):
    """The state of our own code is inconsistent; the message says where. Every ``check`` raises it."""


def invariant(holds: object, message: str) -> None:
    """Raise ``InvariantError`` unless ``holds``. Unlike ``assert`` it also checks under ``python -O``."""
    if not holds:
        raise InvariantError(message)
