"""One HTTP connection: uvicorn's httptools protocol with the limits and the cancellation that a public server needs.

uvicorn parses requests, queues those that a client pipelines, and applies back-pressure. This module adds that

- a request is cancelled as soon as its client closes the connection or its sending side,
- headers, bodies and unread answers have limits of size and time, which hold for every ASGI application,
- every answer carries ``x-request-id`` and ``date``.
"""

import asyncio
import logging
import math
import os
import re
import socket
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import httptools
from starlette.types import Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from common.errors import RequestError
from gateway.http.access.hosts import AllowedHosts
from gateway.http.errors import HttpError, openai_envelope, too_large
from gateway.http.formatters.common import encode_json
from gateway.siblings.connection import BUFFER_BYTES, is_same_user

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGIReceiveEvent, ASGISendEvent

log = logging.getLogger(__name__)

#: Bytes of a request line and its headers together; more get 431.
MAX_HEADER_BYTES = 64 << 10
#: Requests that one client may send ahead of their answers before reading stops, and the most that one read may bring;
#: the connection ends after those.
PIPELINED, MAX_PIPELINED = 16, 100
#: The rest of a body that was answered early is read and dropped for so long, so that the client sees the answer.
LINGER_S = 5.0
#: A client that reads nothing for so long is disconnected, unless the request allows more; see ``RESPONSE_TIMEOUT``.
STALL_S = 60.0
#: Bytes of an answer that the kernel takes before it can send them. Without this bound they are megabytes, or tens of
#: thousands of tokens, until a client that does not read is noticed.
MAX_UNSENT_BYTES = 128 << 10
#: Key of ``scope["state"]``: seconds from a request's start after which a client that does not read is disconnected.
RESPONSE_TIMEOUT = "response_timeout_s"
#: Key of ``scope["state"]``: the value of ``x-request-id``.
REQUEST_ID = "request_id"
#: Key of ``scope["state"]``: the value of ``traceparent``, if there is one.
TRACEPARENT = "traceparent"
#: Key of ``scope["state"]``: the value of ``idempotency-key``, if there is one; empty if there are several.
IDEMPOTENCY_KEY = "idempotency_key"
CLIENT_GONE = 499

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON_ANSWER = (
    b"HTTP/1.1 200 OK\r\ndate: %b\r\nx-request-id: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"%b\r\n%b"
)
#: The names of the headers that ``_read_header`` reads.
_READ_HEADERS = frozenset((b"content-length", b"x-request-id", b"traceparent", b"idempotency-key", b"host", b"expect"))
_PLAIN_PATH = re.compile(rb"/[A-Za-z0-9/_.-]*")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Attributes:
    header_timeout_s: for the headers of a request, from the connection or the previous answer on.
    body_timeout_s: for the body of a request, from the first attempt to read it on.
    max_body_bytes: larger bodies get 413.
    on_answer: called with the scope of each ended request and its status; 499 if the client left before the end.
    hosts: requests for other hosts get 421.
    """

    header_timeout_s: float
    body_timeout_s: float
    max_body_bytes: int
    on_answer: Callable[[dict[str, Any], int], None]
    hosts: AllowedHosts


class HttpConnection(HttpToolsProtocol):
    """One timer serves all timeouts of a connection. It is not set anew for each request: if it runs out too early, it
    is set again for the rest.

    Attributes:
        options: the limits of this connection.
    """

    cycle: "RequestCycle | None"  # type: ignore[assignment]  # not one of uvicorn's

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], options: ConnectionOptions
    ) -> None:
        super().__init__(config, server_state, app_state, asyncio.get_running_loop())
        self.options = options
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf  # when it runs out
        self._times_out_at = math.inf
        self._active: RequestCycle | None = None
        self._pipelined: deque[RequestCycle] = deque()  # they wait for the end of the answer before them
        self._is_discarding = False  # what this client sends is no HTTP
        self._is_in_headers = False
        self._num_header_bytes = 0
        self._num_unparsed = 0  # bytes since the parser last found something
        self._request_id = b""
        self._content_length: int | None = None
        self._host: bytes | None = None
        self._refusal: RequestError | None = None

    # ---- the connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        own = transport.get_extra_info("socket")
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
        self.parser = None  # type: ignore[assignment]  # it refers to this object

    def eof_received(self) -> None:
        """Ends the request in flight: a client that has closed its sending side counts as gone."""
        self._cancel_request()
        self.close()

    def close(self) -> None:
        """Closes the connection once the client has read everything, or after ``STALL_S``."""
        if not self.transport.is_closing():  # a transport of TLS cannot be closed twice
            self.transport.close()
        if self.transport.get_write_buffer_size():
            self._time_out_after(STALL_S)
        else:
            self._times_out_at = math.inf

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
            if self.transport.get_write_buffer_size():  # the client does not even read its last answer
                self.transport.abort()
            elif not self.transport.is_closing():
                self.transport.close()

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
                # The parser takes the body for data of the other protocol, so it parses the request again without the
                # offer.
                data = self._head_without_offer() + data[upgrade.args[0] :]

    def _head_without_offer(self) -> bytes:
        method = self.parser.get_method()
        lines = [b"%b %b HTTP/1.1" % (method, self.url)]
        lines += [b"%b: %b" % line for line in self.headers if line[0] not in (b"connection", b"upgrade")]
        return b"\r\n".join([*lines, b"\r\n"])

    def _refuse(self, error: RequestError) -> None:
        """Answers a message that cannot be parsed, or fails the request whose body it was; then the connection ends."""
        self._is_discarding = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            body = encode_json(openai_envelope(error, ""))
            head = _head(error.status, self.request_id, len(body))
            self.transport.write(head + body)
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
        self._content_length = None
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
            self._content_length = int(value)
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
        elif value.lower() == b"100-continue":
            self.expect_100_continue = True

    def _refused(self, error: RequestError) -> RequestError:
        """Keeps the error for the answer: the parser turns every exception into one of its own."""
        self._refusal = error
        return error

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._times_out_at = math.inf
        if self._host is not None and not self.options.hosts.allows(self._host):  # every browser sends it
            raise self._refused(_wrong_host(self._host))
        if len(self._pipelined) >= MAX_PIPELINED:
            raise OverflowError
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise NotImplementedError("this server is no proxy")
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
            self._time_out_after(self.options.header_timeout_s)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _start(self, cycle: "RequestCycle") -> None:
        self._active = cycle
        self.tasks.add(cycle.start(self.app))

    def on_response_complete(self) -> None:
        """Begins the next request, or waits for it. If its body has not been read, the client may still send that."""
        assert self._active is not None
        is_body_read, self._active = not self._active.more_body, None
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
        """Goes on reading, unless enough is queued already."""
        assert self.cycle is not None
        if len(self._pipelined) < PIPELINED and self.cycle.num_unread <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def shutdown(self) -> None:
        """Closes the connection, after the answer to the request in flight if there is one."""
        if self._active is None:
            self.close()
        else:
            self._active.keep_alive = False
            self._pipelined.clear()

    @property
    def content_length(self) -> int | None:
        return self._content_length

    @property
    def request_id(self) -> bytes:
        """The client's ``x-request-id``, or a new one."""
        if not self._request_id:
            self._request_id = os.urandom(16).hex().encode("ascii")
        return self._request_id


class RequestCycle:
    """One request and its answer: the ``receive`` and ``send`` of its ASGI application, and the task that runs it.

    Attributes:
        status: of the answer; 0 until it begins.
        more_body: the body has not arrived to its end.
        disconnected: the client has left, or the answer broke off.
        keep_alive: the connection takes further requests.
    """

    def __init__(self, connection: HttpConnection, *, is_kept_alive: bool) -> None:
        self.scope: Any = connection.scope
        self.status = 0
        self.more_body = True
        self.disconnected = False
        self.keep_alive = is_kept_alive
        self.response_complete = False
        self._connection = connection
        self._transport = connection.transport
        self._flow = connection.flow
        self._loop = connection.loop
        self._request_id = connection.request_id
        self._max_body_bytes = connection.options.max_body_bytes
        self._task: asyncio.Task[None] | None = None
        self._has_begun = False
        self._began_at = 0.0
        self._waiter: asyncio.Future[None] | None = None  # of ``receive``
        self._body = bytearray()  # what has arrived and was not given to the application
        self._num_body_bytes = 0
        self._is_body_given = False
        self._waits_for_continue = connection.expect_100_continue
        self._is_chunked = False
        self._num_left = 0  # bytes that the announced length still lacks
        self._failure: RequestError | None = None
        self._head = b""  # of the answer, until it is written
        if (connection.content_length or 0) > self._max_body_bytes:
            self._failure = too_large(self._max_body_bytes)

    # ---- the application ---------------------------------------------------------------------------------------------

    def start(self, app: "ASGI3Application") -> "asyncio.Task[None]":
        """Runs the application in a task, which is cancelled if the client leaves before the end of the answer."""
        self._began_at = self._loop.time()
        self._task = self._loop.create_task(self._run(app))
        return self._task

    async def _run(self, app: "ASGI3Application") -> None:
        self._has_begun = True
        scope = self.scope
        if scope["method"] == "HEAD":  # answered like GET; ``send`` leaves the body out
            scope = {**scope, "method": "GET"}
        try:
            await app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            pass  # the client has gone, or the server stops
        except Exception:
            log.exception("a request for %s failed", self.scope["path"])
        finally:
            self._end(scope)

    def _end(self, scope: dict[str, Any]) -> None:
        if not self.response_complete and not self.disconnected:
            self.disconnected = True
            self._transport.abort()
        is_whole = self.response_complete and self.status
        if self._task is not None:
            self._connection.tasks.discard(self._task)
        self._connection.options.on_answer(scope, self.status if is_whole else CLIENT_GONE)
        self._task = None  # no cycle of references is left behind

    def on_client_gone(self) -> None:
        """Cancels the application, unless it has answered already."""
        if not self.response_complete and not self.disconnected:
            self.disconnected = True
            if self._task is not None:
                self._task.cancel()
                if not self._has_begun:  # and never will
                    self._end(self.scope)

    def disconnect(self) -> None:
        """Tells the application that the connection has ended, if it waits for the client."""
        self.disconnected = self.disconnected or not self.response_complete
        self._wake()

    # ---- the body ----------------------------------------------------------------------------------------------------

    @property
    def num_unread(self) -> int:
        """Bytes of the body that have arrived and were not given to the application."""
        return len(self._body)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._num_body_bytes > self._max_body_bytes:
            self.fail(too_large(self._max_body_bytes))
            return
        self._body += body
        if len(self._body) > HIGH_WATER_LIMIT:
            self._flow.pause_reading()
        if self._waiter is not None:
            self._wake()

    def on_body_end(self) -> None:
        self.more_body = False
        if self._waiter is not None:
            self._wake()

    def fail(self, error: RequestError) -> None:
        """Makes ``receive`` raise this error, unless it has raised one already."""
        self._failure = self._failure or error
        self._body.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _change(self) -> None:
        """Waits until something has come from the client, or the answer is complete."""
        self._waiter = self._loop.create_future()
        await self._waiter
        self._waiter = None

    async def receive(self) -> "ASGIReceiveEvent":
        """The next part of the body, or the end of the connection. Raises RequestError: too large, slow or broken."""
        if not self._is_body_given and not self.response_complete:
            if self._failure is None and (self._waits_for_continue or self.more_body):
                await self._more_body()
            if self._failure is not None:
                raise self._failure
            body, self._body = bytes(self._body), bytearray()
            if self._flow.read_paused:
                self._connection.resume_reading()
            self._is_body_given = not self.more_body
            if not self.disconnected:
                return {"type": "http.request", "body": body, "more_body": self.more_body}
        while not self.disconnected and not self.response_complete:
            await self._change()
        return {"type": "http.disconnect"}

    async def _more_body(self) -> None:
        if self._waits_for_continue:
            self._waits_for_continue = False
            self._transport.write(CONTINUE)
        if self._body or not self.more_body:
            return
        self._connection.resume_reading()
        timeout_s = self._connection.options.body_timeout_s
        try:
            async with asyncio.timeout_at(self._began_at + timeout_s):
                while self.more_body and not self._body and self._failure is None and not self.disconnected:
                    await self._change()
        except TimeoutError:
            self.fail(HttpError(408, f"the body did not arrive within {timeout_s:g} s"))

    # ---- the answer --------------------------------------------------------------------------------------------------

    async def send(self, message: "ASGISendEvent") -> None:
        """Writes a part of the answer; waits while the client does not read, up to the limit of time."""
        if self._flow.write_paused and not self.disconnected:
            await self._until_writable()
        if self.disconnected:
            return
        if self.can_write_chunk and message.get("more_body"):  # most messages are events of streams
            body: Any = message.get("body", b"")
            if body:
                self.write_chunk(body)
        elif message["type"] == "http.response.start":
            self._begin_answer(message["status"], message.get("headers", ()))
            self._loop.call_soon(self._flush)  # unless the body follows at once: then both leave in one segment
        elif message["type"] == "http.response.body":
            self._write_body(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")

    @property
    def can_write(self) -> bool:
        """Whether ``write_json`` may be called now; ``send`` is always right."""
        return not (self._flow.write_paused or self.disconnected or self._waits_for_continue)

    def write_json(self, body: bytes) -> None:
        """Writes a whole answer to a request that is no HEAD, as ``send`` does, but at once: most answers are such."""
        assert not self.status, "an application begins its answer once"
        self.status = 200
        close = b"" if self.keep_alive else b"connection: close\r\n"
        self._transport.write(JSON_ANSWER % (http_date(), self._request_id, len(body), close, body))
        self._end_answer()

    @property
    def can_write_chunk(self) -> bool:
        """Whether ``write_chunk`` may be called now; ``send`` is always right."""
        return self._is_chunked and not (self._head or self._flow.write_paused or self.disconnected)

    def write_chunk(self, data: bytes) -> None:
        """Writes a part of a chunked answer that has begun, as ``send`` does, but at once."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def _until_writable(self) -> None:
        """Waits until the client reads. Aborts the connection, which cancels the task, if it does not."""
        limit = self.scope["state"].get(RESPONSE_TIMEOUT)
        delay = STALL_S if limit is None else self._began_at + limit - self._loop.time()
        timer = self._loop.call_later(max(0.0, delay), self._transport.abort)
        try:
            await self._flow.drain()
        finally:
            timer.cancel()

    def _begin_answer(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        assert not self.status, "an application begins its answer once"
        self.status = status
        if self._waits_for_continue:  # whether its body follows is unknown
            self.keep_alive = False
        is_empty = self.scope["method"] == "HEAD" or status in (204, 304)
        length: int | None = None
        content = [STATUS_LINE[status], b"date: %b\r\nx-request-id: %b\r\n" % (http_date(), self._request_id)]
        for name, value in headers:
            name = name.lower()
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                self.keep_alive = self.keep_alive and b"close" not in value.lower()
                continue
            content.append(b"%b: %b\r\n" % (name, value))
        lines = b"".join(content)
        if lines.count(b"\n") != len(content) + 1 or lines.count(b"\r") != len(content) + 1 or b"\0" in lines:
            raise RuntimeError("a header contains a line break")
        is_chunked = length is None and not is_empty
        self._num_left = 0 if is_empty else length or 0
        if is_chunked and self.scope["http_version"] == "1.0":  # ends with the connection instead
            is_chunked, self._num_left = False, -1
        self._is_chunked = is_chunked
        if is_chunked:
            lines += b"transfer-encoding: chunked\r\n"
        if not self.keep_alive:
            lines += b"connection: close\r\n"
        self._head = lines + b"\r\n"

    def _flush(self) -> None:
        if self._head:
            self._write(b"")

    def _write(self, data: bytes) -> None:
        head, self._head = self._head, b""
        if head or data:
            self._transport.write(head + data)

    def _write_body(self, body: bytes, *, is_last: bool) -> None:
        assert self.status and not self.response_complete, "an answer has a beginning and one end"
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._write(chunk + b"0\r\n\r\n" if is_last else chunk)
        elif self.scope["method"] == "HEAD":
            self._write(b"")
        else:
            if self._num_left >= 0:
                self._num_left -= len(body)
                assert self._num_left >= 0, "the body is longer than its Content-Length"
            self._write(body)
        if is_last:
            assert self._num_left <= 0, "the body is shorter than its Content-Length"
            self._end_answer()

    def _end_answer(self) -> None:
        self.response_complete = True
        if self._waiter is not None:
            self._wake()
        if not self.keep_alive:
            self._connection.close()
        self._connection.on_response_complete()


def cycle_of(send: Send) -> RequestCycle | None:
    """The cycle that this ``send`` belongs to; None if a middleware has put its own in front."""
    cycle = getattr(send, "__self__", None)
    return cycle if isinstance(cycle, RequestCycle) else None


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


def http_date() -> bytes:
    """The value of ``date``."""
    return _formatted_date(int(time.time()))


@lru_cache(maxsize=1)
def _formatted_date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode("ascii")
