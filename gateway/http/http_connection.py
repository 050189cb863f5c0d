"""One HTTP connection: uvicorn's httptools protocol with the limits and the cancellation that a public server needs.

uvicorn parses requests, queues those that a client pipelines, and applies back-pressure. This module adds that

- a request is cancelled as soon as its client closes the connection or its sending side,
- headers, bodies and unread answers have limits of size and time, which hold for every ASGI application,
- every answer carries ``x-request-id`` and ``date``.
"""

import asyncio
import logging
import re
import secrets
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import httptools
from starlette.types import Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
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
    """Attributes:
    options: the limits of this connection.
    """

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], options: ConnectionOptions
    ) -> None:
        super().__init__(config, server_state, app_state, asyncio.get_running_loop())
        self.options = options
        self.timeout_keep_alive = options.header_timeout_s  # type: ignore[assignment]  # a float serves as well
        self._active: RequestCycle | None = None
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
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self.cycle = self._active = None  # type: ignore[assignment]  # no cycle of references is left behind

    def eof_received(self) -> None:
        """Ends the request in flight: a client that has closed its sending side counts as gone."""
        self._cancel_request()
        self.close()

    def close(self) -> None:
        """Closes the connection once the client has read everything, or after ``STALL_S``."""
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():  # a transport of TLS cannot be closed twice
            self.transport.close()
        if self.transport.get_write_buffer_size():
            self.timeout_keep_alive_task = self.loop.call_later(STALL_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # the client does not even read its last answer
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.close()

    def _time_out_after(self, seconds: float) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _cancel_request(self) -> None:
        self.pipeline.clear()
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
            self._unset_keepalive_if_required()
            body = encode_json(openai_envelope(error, ""))
            head = _head(error.status, self.request_id, len(body))
            self.transport.write(head + body)
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._time_out_after(LINGER_S)  # until the client has closed its side, so that it sees the answer
        else:
            cycle.keep_alive = False
            if cycle.more_body:
                assert isinstance(cycle, RequestCycle)
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
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header_bytes(len(name) + len(value) + 4)
        if not self._is_in_headers:  # a trailer of a chunked body
            return
        name = name.lower()
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            self._request_id = value
        elif name == b"content-length":
            self._content_length = int(value)
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
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def _count_header_bytes(self, count: int) -> None:
        self._num_unparsed = 0
        self._num_header_bytes += count
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise self._refused(_headers_too_large())

    def _refused(self, error: RequestError) -> RequestError:
        """Keeps the error for the answer: the parser turns every exception into one of its own."""
        self._refusal = error
        return error

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._unset_keepalive_if_required()
        if self._host is not None and not self.options.hosts.allows(self._host):  # every browser sends it
            raise self._refused(_wrong_host(self._host))
        if len(self.pipeline) >= MAX_PIPELINED:
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
            self._start_asgi_task(cycle, self.app)
        else:
            self.pipeline.appendleft((cycle, self.app))
            if len(self.pipeline) >= PIPELINED:
                self.flow.pause_reading()

    def _fill_scope(self) -> None:
        scope = self.scope
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = self.parser.get_http_version()
        url = httptools.parse_url(self.url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["raw_path"] = raw_path
        scope["query_string"] = url.query or b""
        scope["state"][REQUEST_ID] = self.request_id.decode("ascii")

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        cycle = self.cycle
        assert isinstance(cycle, RequestCycle)
        if not cycle.response_complete:
            cycle.on_body(body)

    def on_message_complete(self) -> None:
        self._num_unparsed = 0
        if self.parser.should_upgrade():
            return
        cycle = self.cycle
        cycle.more_body = False
        cycle.message_event.set()
        if cycle.response_complete:  # the rest of a body that was answered early
            self._time_out_after(self.options.header_timeout_s)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: "ASGI3Application") -> None:
        assert isinstance(cycle, RequestCycle)
        self._active = cycle
        cycle.task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(cycle.task)
        cycle.task.add_done_callback(self.tasks.discard)

    def on_response_complete(self) -> None:
        assert self._active is not None
        is_body_read, self._active = not self._active.more_body, None
        super().on_response_complete()
        if len(self.pipeline) >= PIPELINED:
            self.flow.pause_reading()
        elif not self.pipeline and not is_body_read and not self.transport.is_closing():
            self._time_out_after(LINGER_S)

    def resume_reading(self) -> None:
        """Goes on reading, unless enough is queued already."""
        if len(self.pipeline) < PIPELINED and len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def shutdown(self) -> None:
        """Closes the connection, after the answer to the request in flight if there is one."""
        if self._active is None:
            self.close()
        else:
            self._active.keep_alive = False
            self.pipeline.clear()

    @property
    def content_length(self) -> int | None:
        return self._content_length

    @property
    def request_id(self) -> bytes:
        """The client's ``x-request-id``, or a new one."""
        if not self._request_id:
            self._request_id = secrets.token_hex(16).encode("ascii")
        return self._request_id


class RequestCycle(RequestResponseCycle):
    """One request and its answer: the ``receive`` and ``send`` of its ASGI application, and the task that runs it.

    Attributes:
        task: runs the application; it is cancelled if the client leaves before the end of the answer.
        status: of the answer; 0 until it begins.
    """

    def __init__(self, connection: HttpConnection, *, is_kept_alive: bool) -> None:
        super().__init__(
            scope=connection.scope,
            transport=connection.transport,
            flow=connection.flow,
            logger=connection.logger,
            access_logger=connection.access_logger,
            access_log=False,
            default_headers=[(b"date", http_date()), (b"x-request-id", connection.request_id)],
            message_event=asyncio.Event(),
            expect_100_continue=connection.expect_100_continue,
            keep_alive=is_kept_alive,
            on_response=connection.on_response_complete,
        )
        self.task: asyncio.Task[None] | None = None
        self.status = 0
        self._connection = connection
        self._loop = connection.loop
        self._max_body_bytes = connection.options.max_body_bytes
        self._num_body_bytes = 0
        self._began_at = 0.0
        self._is_body_given = False
        self._num_left = 0  # bytes that the announced length still lacks
        self._failure: RequestError | None = None
        self._head = b""  # of the answer, until it is written
        if (connection.content_length or 0) > self._max_body_bytes:
            self._failure = too_large(self._max_body_bytes)

    # ---- the application ---------------------------------------------------------------------------------------------

    async def run_asgi(self, app: "ASGI3Application") -> None:
        self._began_at = self._loop.time()
        scope: Any = self.scope
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
            self.transport.abort()
        is_whole = self.response_complete and self.status
        self._connection.options.on_answer(scope, self.status if is_whole else CLIENT_GONE)
        self.on_response = _do_nothing  # no cycle of references is left behind

    def on_client_gone(self) -> None:
        """Cancels the application, unless it has answered already."""
        if not self.response_complete and not self.disconnected:
            self.disconnected = True
            if self.task is not None:
                self.task.cancel()

    # ---- the body ----------------------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._num_body_bytes > self._max_body_bytes:
            self.fail(too_large(self._max_body_bytes))
            return
        self.body += body
        if len(self.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.message_event.set()

    def fail(self, error: RequestError) -> None:
        """Makes ``receive`` raise this error, unless it has raised one already."""
        self._failure = self._failure or error
        self.body.clear()
        self.message_event.set()

    async def receive(self) -> "ASGIReceiveEvent":
        """The next part of the body, or the end of the connection. Raises RequestError: too large, slow or broken."""
        if not self._is_body_given and not self.response_complete:
            if self._failure is None:
                await self._more_body()
            if self._failure is not None:
                raise self._failure
            self.message_event.clear()
            body, self.body = bytes(self.body), bytearray()
            self._connection.resume_reading()
            self._is_body_given = not self.more_body
            if not self.disconnected:
                return {"type": "http.request", "body": body, "more_body": self.more_body}
        while not self.disconnected and not self.response_complete:
            self.message_event.clear()
            await self.message_event.wait()
        return {"type": "http.disconnect"}

    async def _more_body(self) -> None:
        if self.waiting_for_100_continue:
            self.waiting_for_100_continue = False
            self.transport.write(CONTINUE)
        if self.body or not self.more_body:
            return
        self._connection.resume_reading()
        timeout_s = self._connection.options.body_timeout_s
        try:
            async with asyncio.timeout_at(self._began_at + timeout_s):
                while self.more_body and not self.body and self._failure is None and not self.disconnected:
                    self.message_event.clear()
                    await self.message_event.wait()
        except TimeoutError:
            self.fail(HttpError(408, f"the body did not arrive within {timeout_s:g} s"))

    # ---- the answer --------------------------------------------------------------------------------------------------

    async def send(self, message: "ASGISendEvent") -> None:
        """Writes a part of the answer; waits while the client does not read, up to the limit of time."""
        if self.flow.write_paused and not self.disconnected:
            await self._until_writable()
        if self.disconnected:
            return
        if self.chunked_encoding and not self._head and message.get("more_body"):  # most messages are events of streams
            body: Any = message.get("body", b"")
            if body:
                self.write_chunk(body)
        elif message["type"] == "http.response.start":
            self._send_head(message["status"], message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")

    @property
    def can_write_chunk(self) -> bool:
        """Whether ``write_chunk`` may be called now; ``send`` is always right."""
        return self.chunked_encoding is True and not (self._head or self.flow.write_paused or self.disconnected)

    def write_chunk(self, data: bytes) -> None:
        """Writes a part of a chunked answer that has begun, as ``send`` does, but at once."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def _until_writable(self) -> None:
        """Waits until the client reads. Aborts the connection, which cancels the task, if it does not."""
        limit = self.scope["state"].get(RESPONSE_TIMEOUT)
        delay = STALL_S if limit is None else self._began_at + limit - self._loop.time()
        timer = self._loop.call_later(max(0.0, delay), self.transport.abort)
        try:
            await self.flow.drain()
        finally:
            timer.cancel()

    def _send_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        assert not self.response_started, "an application begins its answer once"
        self.response_started, self.status = True, status
        if self.waiting_for_100_continue:  # whether its body follows is unknown
            self.keep_alive = False
        is_empty = self.scope["method"] == "HEAD" or status in (204, 304)
        length: int | None = None
        content = [STATUS_LINE[status]]
        for name, value in (*self.default_headers, *headers):
            name = name.lower()
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                self.keep_alive = self.keep_alive and b"close" not in value.lower()
                continue
            content.append(b"%b: %b\r\n" % (name, value))
        lines = b"".join(content)
        if lines.count(b"\n") != len(content) or lines.count(b"\r") != len(content) or b"\0" in lines:
            raise RuntimeError("a header contains a line break")
        self.chunked_encoding = length is None and not is_empty
        self._num_left = 0 if is_empty else length or 0
        if self.chunked_encoding and self.scope["http_version"] == "1.0":  # ends with the connection instead
            self.chunked_encoding, self._num_left = False, -1
        if self.chunked_encoding:
            lines += b"transfer-encoding: chunked\r\n"
        if not self.keep_alive:
            lines += b"connection: close\r\n"
        self._head = lines + b"\r\n"
        self._loop.call_soon(self._flush)  # unless the body follows at once: then both leave in one segment

    def _flush(self) -> None:
        if self._head:
            self._write(b"")

    def _write(self, data: bytes) -> None:
        head, self._head = self._head, b""
        if head or data:
            self.transport.write(head + data)

    def _send_body(self, body: bytes, *, is_last: bool) -> None:
        assert self.response_started and not self.response_complete, "an answer has a beginning and one end"
        if self.chunked_encoding:
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
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self._connection.close()
            self.on_response()


def cycle_of(send: Send) -> RequestCycle | None:
    """The cycle that this ``send`` belongs to; None if a middleware has put its own in front."""
    cycle = getattr(send, "__self__", None)
    return cycle if isinstance(cycle, RequestCycle) else None


def _do_nothing() -> None:
    pass


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
