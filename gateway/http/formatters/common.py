"""Formats what all answers share: server-sent events, OpenAI's errors, log-probabilities."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import msgspec

from common.errors import ErrorCode, RequestError
from common.wire.packed_logprobs import PackedLogprobs, unpack_logprobs
from gateway.requests.output_processor import INTERNAL_ERROR, Delta, OutputStream

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI uses this value

encode_json = msgspec.json.Encoder().encode

ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error", 499: "aborted_error",
    504: "timeout_error",
}  # fmt: skip


def as_json(value: Any) -> msgspec.Raw:
    """A part of an answer that is encoded already."""
    return msgspec.Raw(encode_json(value))


def json_list(items: Iterable[Any]) -> Iterator[bytes]:
    """The parts of a list in JSON, one for each item."""
    before = b"["
    for item in items:
        yield before + encode_json(item)
        before = b","
    yield b"]"


def sse_event(data: Any) -> bytes:
    return b"data: " + encode_json(data) + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """A server-sent event whose name clients dispatch on."""
    return b"event: " + name.encode() + b"\ndata: " + encode_json(data) + b"\n\n"


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kind = ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": str(error.code)}}


def prompt_logprob_entries(output: OutputStream) -> list[tuple[int, PackedLogprobs | None]]:
    """Prompt tokens from ``logprob_start`` on with their log-probabilities; the first has none."""
    first = output.request.logprob_start
    if first is None:
        return []
    return list(zip(output.request.prompt[first:], chain([None], output.prompt_logprobs, repeat(None)), strict=False))


@contextmanager
def prompt_logprobs_of(output: OutputStream) -> Iterator[None]:
    """For code that unpacks the log-probabilities of a prompt, the only ones that are not checked as they come.

    Raises RequestError: they are damaged; it names the node that sent them.
    """
    try:
        yield
    except (msgspec.DecodeError, OverflowError) as error:  # a token id that the tokenizer cannot take overflows
        message = f"node {output.prompt_node} sent log-probabilities of the prompt that cannot be read"
        log.error("%s", message)
        raise RequestError(ErrorCode.NODE_LOST, message) from error


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def token_text(piece: bytes) -> str:
    """A token as text; bytes that are no valid UTF-8 alone as ``bytes:\\xe2\\x82``, as OpenAI and vLLM show them."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def token_logprobs(packed: PackedLogprobs, token: int, shown: Callable[[int], dict[str, Any]]) -> msgspec.Raw:
    """The log-probabilities at one position, as chats and responses show them, in JSON: as objects they would take
    several times the memory.

    Args:
        shown: a token as it is shown, with its text and its bytes.
    """
    entry = unpack_logprobs(packed)
    tops = [{**shown(top), "logprob": finite(logprob)} for top, logprob in entry.top]
    return as_json({**shown(token), "logprob": finite(entry.token), "top_logprobs": tops})


def ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    """The header that names the fields of a body that had no effect; empty without any."""
    return {"x-baton-ignored": ", ".join(ignored)} if ignored else {}


def as_error(error: BaseException) -> RequestError:
    """Any exception as a ``RequestError``; an unexpected one becomes an internal error."""
    if isinstance(error, RequestError):
        return error
    return RequestError(ErrorCode.INTERNAL, INTERNAL_ERROR)


class ResponseFormatter(ABC):
    """Formats the outputs of one HTTP request."""

    def first(self, outputs: Sequence[OutputStream]) -> bytes:
        """The bytes that begin a stream, before those of any output."""
        return b""

    @abstractmethod
    def chunk(self, output: OutputStream, delta: Delta) -> bytes:
        """The bytes of one more piece of a stream; empty if there is nothing to show."""

    @abstractmethod
    def last(self, outputs: Sequence[OutputStream]) -> bytes:
        """The bytes that end a stream. Those with many log-probabilities are made on a thread."""

    def error(self, error: RequestError) -> bytes:
        """The bytes that end a stream that failed after its beginning."""
        return sse_event(error_body(error))

    @abstractmethod
    def answer(self, outputs: Sequence[OutputStream]) -> Iterator[bytes]:
        """The parts of the whole answer, in JSON. Those of one with many log-probabilities are made on a thread."""

    def keep(self) -> None:
        """Store what ``last`` or the first part of ``answer`` has made, before it is sent, if this API stores it."""
        return
