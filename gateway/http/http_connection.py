"""One HTTP connection: uvicorn's httptools protocol with the limits and the cancellation that a public server needs.

uvicorn parses requests, queues those that a client pipelines, and applies back-pressure. This module adds that

- a request is cancelled as soon as its client closes the connection or its sending side,
- headers, bodies and unread answers have limits of size and time, which hold for every ASGI application,
- every answer carries ``x-request-id`` and ``date``.
"""

import asyncio
import math
import os
import re
import socket
import urllib.parse
from collections import deque
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from common.errors import RequestError
from gateway.http.errors import HttpError
from gateway.http.formatters.common import encode_json, error_body
from gateway.http.request_cycle import STALL_S, ConnectionOptions, RequestCycle, http_date, num_read
from gateway.siblings.connection import BUFFER_BYTES, is_same_user

#: Bytes of a request line and its headers together; more get 431.
MAX_HEADER_BYTES = 64 << 10
#: Requests that one client may send ahead of their answers before reading stops, and the most that one read may bring;
#: the connection ends after those.
PIPELINED, MAX_PIPELINED = 16, 100
#: How long the rest of a body that was answered early is read and dropped, so that the client sees the answer.
LINGER_S = 5.0
#: Bytes of an answer that the kernel takes before it can send them. Without this bound they are megabytes, or tens of
#: thousands of tokens, until a client that does not read is noticed.
MAX_UNSENT_BYTES = 128 << 10
#: Key of ``scope["state"]``: the value of ``x-request-id``.
REQUEST_ID = "request_id"
#: Key of ``scope["state"]``: the value of ``traceparent``, if there is one.
TRACEPARENT = "traceparent"
#: Key of ``scope["state"]``: the value of ``idempotency-key``, if there is one; empty if there are several.
IDEMPOTENCY_KEY = "idempotency_key"
#: The names of the headers that ``_read_header`` reads.
_READ_HEADERS = frozenset((b"content-length", b"x-request-id", b"traceparent", b"idempotency-key", b"host", b"expect"))
_PLAIN_PATH = re.compile(rb"/[A-Za-z0-9/_.-]*")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class HttpConnection(HttpToolsProtocol):
    """One timer serves all timeouts of a connection. It is not reset for each request: if it runs out too early, it is
    set again for the rest.

    Attributes:
        options: the limits of this connection.
        content_length: as the headers of the last request say; None without one.
    """

    cycle: RequestCycle | None  # type: ignore[assignment]  # not one of uvicorn's

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], options: ConnectionOptions
    ) -> None:
        super().__init__(config, server_state, app_state, asyncio.get_running_loop())
        self.options = options
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf  # when it runs out
        self._times_out_at = math.inf
        self._num_read: float = -math.inf  # what the client had read when the timer last ran out
        self._active: RequestCycle | None = None
        self._pipelined: deque[RequestCycle] = deque()  # they wait for the end of the answer before them
        self._is_discarding = False  # what this client sends is no HTTP
        self._is_in_headers = False
        self._num_header_bytes = 0
        self._num_unparsed = 0  # bytes since the parser last found something
        self._request_id = b""
        self.content_length: int | None = None
        self._host: bytes | None = None
        self._refusal: RequestError | None = None

    # ---- the connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        own = transport.get_extra_info("socket")
        self.options.open_files.note(own.fileno())
        if own.family == socket.AF_UNIX:  # of a sibling gateway
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            if not is_same_user(own):
                transport.abort()
        else:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        self._time_out_after(self.options.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_request()
        if self._timer is not None:
            self._timer.cancel()
        self.connections.discard(self)
        if self.cycle is not None:
            self.cycle.disconnect()
        self.flow.resume_writing()
        # No cycle of references is left behind.
        self.cycle = self._active = None
        self.parser = None  # type: ignore[assignment]

    def eof_received(self) -> None:
        """End the request in flight: a client that has closed its sending side counts as gone."""
        self._cancel_request()
        self.close()

    def close(self) -> None:
        """Close the connection once the client has read everything, or has read nothing for ``STALL_S``."""
        if not self.transport.is_closing():  # a transport of TLS cannot be closed twice
            self.transport.close()
        self._num_read = num_read(self.transport)
        self._time_out_after(STALL_S)

    def _time_out_after(self, seconds: float) -> None:
        self._times_out_at = self.loop.time() + seconds
        if self._times_out_at < self._timer_at:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._times_out_at
        self._timer = self.loop.call_at(self._timer_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        if self.loop.time() < self._times_out_at < math.inf:
            self._set_timer()
        elif self._times_out_at < math.inf:
            before, self._num_read = self._num_read, num_read(self.transport)
            if not (self.transport.get_write_buffer_size() or self.transport.is_closing()):
                self.close()
            elif self._num_read > before:  # the client reads its last answer, but slowly
                self._time_out_after(STALL_S)
            else:
                self.transport.abort()

    def _cancel_request(self) -> None:
        self._pipelined.clear()
        if self._active is not None:
            self._active.on_client_gone()

    # ---- parsing -----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_discarding:
            return
        self._num_unparsed += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or HttpError(400, "this is not a valid HTTP request"))
        else:
            if self._num_unparsed > MAX_HEADER_BYTES:  # one endless header or trailer
                self._refuse(_headers_too_large())

    def _feed(self, data: bytes) -> None:
        """Parses; an offer to speak another protocol, such as HTTP/2, is ignored."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser takes the body for data of the other protocol, and drops it if the connection is to close.
                # So a new one parses the request again without the offer.
                data = self._head_without_offer() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it

    def _head_without_offer(self) -> bytes:
        method = self.parser.get_method()
        lines = [b"%b %b HTTP/1.1" % (method, self.url)]
        lines += [b"%b: %b" % line for line in self.headers if line[0] not in (b"connection", b"upgrade")]
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close")
        return b"\r\n".join([*lines, b"\r\n"])

    def _refuse(self, error: RequestError) -> None:
        """Answer a message that cannot be parsed, or fail the request whose body it was; then the connection ends."""
        self._is_discarding = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            body = encode_json(error_body(error))
            answer = _head(error.status, self.request_id, len(body))
            if self.parser.get_method() != b"HEAD":
                answer += body
            self.transport.write(answer)
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._time_out_after(LINGER_S)  # until the client has closed its side, so that it sees the answer
        else:
            cycle.keep_alive = False
            if cycle.more_body:
                cycle.fail(HttpError(400, "the body cannot be decoded: its Transfer-Encoding is broken"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._num_unparsed = 0
        self._request_id = b""
        self.content_length = None
        self._host = None

    def on_url(self, url: bytes) -> None:
        self._num_unparsed = 0
        self._num_header_bytes += len(url)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise self._refused(_headers_too_large())
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_unparsed = 0
        self._num_header_bytes += len(name) + len(value) + 4
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise self._refused(_headers_too_large())
        if self._is_in_headers:  # and not in the trailers of a chunked body
            name = name.lower()
            if name in _READ_HEADERS:
                self._read_header(name, value)
            self.headers.append((name, value))

    def _read_header(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            self.content_length = int(value)
        elif name == b"x-request-id":
            if _REQUEST_ID.fullmatch(value):
                self._request_id = value
        elif name == b"traceparent":
            state = self.scope["state"]
            state[TRACEPARENT] = "" if TRACEPARENT in state else value.decode("latin-1")  # two of them are none
        elif name == b"idempotency-key":
            state = self.scope["state"]
            state[IDEMPOTENCY_KEY] = "" if IDEMPOTENCY_KEY in state else value.decode("latin-1")
        elif name == b"host":
            if self._host is not None:
                raise self._refused(HttpError(400, "a request has one Host header"))
            self._host = value
        elif value.lower() == b"100-continue":  # of Expect, the only other one
            self.expect_100_continue = True

    def _refused(self, error: RequestError) -> RequestError:
        """Keep the error for the answer: the parser turns every exception into one of its own."""
        self._refusal = error
        return error

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():  # since the end of the body before
            return
        self._is_in_headers = False
        self._times_out_at = math.inf
        if self._host is not None and not self.options.hosts.allows(self._host):  # every browser sends it
            raise self._refused(_wrong_host(self._host))
        if len(self._pipelined) >= MAX_PIPELINED:
            raise OverflowError
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise NotImplementedError("this server is not a proxy")
            return
        previous = self.cycle
        self._fill_scope()
        http_version = self.scope["http_version"]
        cycle = RequestCycle(self, is_kept_alive=http_version != "1.0" and self.parser.should_keep_alive())
        self.cycle = cycle
        if previous is None or previous.response_complete:
            self._start(cycle)
        else:
            self._pipelined.append(cycle)
            if len(self._pipelined) >= PIPELINED:
                self.flow.pause_reading()

    def _fill_scope(self) -> None:
        scope = self.scope
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = self.parser.get_http_version()
        raw_path, query = self.url, b""
        if not _PLAIN_PATH.fullmatch(raw_path):
            url = httptools.parse_url(raw_path)
            raw_path, query = url.path or b"/", url.query or b""
        path = raw_path.decode("ascii")
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["raw_path"] = raw_path
        scope["query_string"] = query
        scope["state"][REQUEST_ID] = self.request_id.decode("ascii")

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        assert self.cycle is not None
        if not self.cycle.response_complete:
            self.cycle.on_body(body)

    def on_message_complete(self) -> None:
        self._num_unparsed = 0
        if self.parser.should_upgrade():
            return
        assert self.cycle is not None
        self.cycle.on_body_end()
        if self.cycle.response_complete:  # the rest of a body that was answered early
            if self.cycle.keep_alive:
                self._time_out_after(self.options.header_timeout_s)
            else:
                self.close()

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _start(self, cycle: RequestCycle) -> None:
        self._active = cycle
        self.tasks.add(cycle.start(self.app))

    def on_response_complete(self) -> None:
        """Begin the next request, wait for it, or close. A body that has not been read may still be sent before."""
        assert self._active is not None
        is_kept_alive, is_body_read, self._active = self._active.keep_alive, not self._active.more_body, None
        if not is_kept_alive:
            if is_body_read:
                self.close()
            elif self.transport.can_write_eof():
                self.transport.write_eof()
        if self.transport.is_closing():
            return
        if self._pipelined:
            self._start(self._pipelined.popleft())
            if len(self._pipelined) < PIPELINED:
                self.flow.resume_reading()
        else:
            if self.flow.read_paused:
                self.flow.resume_reading()
            self._time_out_after(self.options.header_timeout_s if is_body_read else LINGER_S)

    def resume_reading(self) -> None:
        """Go on reading, unless enough is queued already."""
        if self.cycle is None:  # the connection has ended
            return
        if len(self._pipelined) < PIPELINED and self.cycle.num_unread <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def shutdown(self) -> None:
        """Close the connection, after the answer to the request in flight if there is one."""
        if self._active is None:
            self.close()
        else:
            self._active.keep_alive = False
            self._pipelined.clear()

    @property
    def request_id(self) -> bytes:
        """The client's ``x-request-id``, or a new one."""
        if not self._request_id:
            self._request_id = os.urandom(16).hex().encode("ascii")
        return self._request_id


def _wrong_host(host: bytes) -> HttpError:
    name = host[:200].decode("latin-1")
    return HttpError(421, f"the host {name!r} is not served here; the gateway's --allowed-hosts can name it")


def _headers_too_large() -> HttpError:
    return HttpError(431, f"the request line and the headers exceed {MAX_HEADER_BYTES} bytes")


def _head(status: int, request_id: bytes, length: int) -> bytes:
    """The head of the last answer of a connection, to a message that is no request."""
    lines = (
        (b"date", http_date()),
        (b"x-request-id", request_id),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % length),
        (b"connection", b"close"),
    )
    return STATUS_LINE[status] + b"".join(b"%b: %b\r\n" % line for line in lines) + b"\r\n"
