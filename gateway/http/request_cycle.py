"""One request on a connection and its answer: the ``receive`` and ``send`` of an ASGI application, and its task."""

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from starlette.types import Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from common.errors import RequestError
from common.system.open_files import OpenFileWarning
from gateway.http.access.hosts import AllowedHosts
from gateway.http.errors import HttpError, too_large

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGIReceiveEvent, ASGISendEvent, HTTPScope

log = logging.getLogger(__name__)

#: A client that reads nothing for this long is disconnected; that of a stream, this long after its request's deadline.
STALL_S = 60.0
#: Key of ``scope["state"]``: seconds from a request's start after which a client that does not read is disconnected.
RESPONSE_TIMEOUT = "response_timeout_s"
CLIENT_GONE = 499

#: The beginning of Linux's ``struct tcp_info``, with ``tcpi_bytes_acked``.
_TCP_INFO = struct.Struct("=120xQ")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON_ANSWER = (
    b"HTTP/1.1 200 OK\r\ndate: %b\r\nx-request-id: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"%b\r\n%b"
)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The limits of a connection, and what is told of its answers.

    Attributes:
        header_timeout_s: for the headers of a request, from the connection or the previous answer on.
        body_timeout_s: for the body of a request, from the start of its application on.
        max_body_bytes: larger bodies get 413.
        on_answer: called with the scope of each ended request and its status; 499 if the client left before the end.
        hosts: requests for other hosts get 421.
        open_files: hears of each connection.
    """

    header_timeout_s: float
    body_timeout_s: float
    max_body_bytes: int
    on_answer: Callable[[dict[str, Any], int], None]
    hosts: AllowedHosts
    open_files: OpenFileWarning = field(default_factory=OpenFileWarning)


class Connection(Protocol):
    """The connection of a request, after the headers have been parsed.

    Attributes:
        content_length: as the headers say; None without one.
        request_id: the client's ``x-request-id``, or a new one.
        tasks: those of all connections that run.
    """

    scope: "HTTPScope"
    transport: asyncio.Transport
    flow: FlowControl
    loop: asyncio.AbstractEventLoop
    options: ConnectionOptions
    expect_100_continue: bool
    tasks: set[asyncio.Task[None]]
    content_length: int | None

    @property
    def request_id(self) -> bytes: ...
    def resume_reading(self) -> None:
        """Go on reading, unless enough is queued already."""
        ...

    def on_response_complete(self) -> None:
        """The answer has been written to its end."""
        ...


class RequestCycle:
    """One request and its answer: the ``receive`` and ``send`` of its ASGI application, and the task that runs it.

    Attributes:
        status: of the answer; 0 until it begins.
        more_body: the body has not arrived to its end.
        disconnected: the client has left, or the answer broke off.
        keep_alive: the connection takes further requests.
    """

    def __init__(self, connection: Connection, *, is_kept_alive: bool) -> None:
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
        # A client of HTTP/1.0 does not know the interim answer and would take it for the answer.
        self._waits_for_continue = connection.expect_100_continue and self.scope["http_version"] != "1.0"
        self._is_chunked = False
        self._num_left = 0  # bytes that the announced length still lacks
        self._failure: RequestError | None = None
        self._head = b""  # of the answer, until it is written
        if (connection.content_length or 0) > self._max_body_bytes:
            self._failure = too_large(self._max_body_bytes)

    # ---- the application ---------------------------------------------------------------------------------------------

    def start(self, app: "ASGI3Application") -> "asyncio.Task[None]":
        """Run the application in a task, which is cancelled if the client leaves before the end of the answer."""
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
        """Cancel the application, unless it has answered already."""
        if not self.response_complete and not self.disconnected:
            self.disconnected = True
            if self._task is not None:
                self._task.cancel()
                if not self._has_begun:  # and never will
                    self._end(self.scope)

    def disconnect(self) -> None:
        """Tell the application that the connection has ended, if it waits for the client."""
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
        """Make ``receive`` raise this error, or an earlier one if there is one."""
        self._failure = self._failure or error
        self._body.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _change(self) -> None:
        """Wait until something has come from the client, or the answer is complete."""
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
        """Write a part of the answer; wait while the client does not read, up to the limit of time."""
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
        """Write a whole answer to a request that is no HEAD, as ``send`` does, but at once: most answers are such."""
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
        """Write a part of a chunked answer that has begun, as ``send`` does, but at once."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def _until_writable(self) -> None:
        """Wait until the client has read enough. Abort the connection, which cancels the task, if it reads none."""
        limit = self.scope["state"].get(RESPONSE_TIMEOUT)
        while self._flow.write_paused:
            before = num_read(self._transport)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._loop.time() + STALL_S if limit is None else self._began_at + limit):
                    await self._flow.drain()
            if self._flow.write_paused and (limit is not None or num_read(self._transport) <= before):
                self._transport.abort()
                await self._flow.drain()

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
        self._connection.on_response_complete()


def num_read(transport: asyncio.Transport) -> int:
    """Return a number that grows whenever the client's system takes bytes of answers: those that it has acknowledged,
    since the buffer of a TLS transport does not tell when they have left."""
    own = transport.get_extra_info("socket")
    if own is None:  # the connection has just been lost, as below
        return 0
    if own.family == socket.AF_UNIX:
        return -transport.get_write_buffer_size()
    with suppress(OSError, struct.error):  # some sandboxes have a shorter structure
        return int(_TCP_INFO.unpack(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))[0])
    return 0


def cycle_of(send: Send) -> RequestCycle | None:
    """The cycle that this ``send`` belongs to; None if a middleware has put its own in front."""
    cycle = getattr(send, "__self__", None)
    return cycle if isinstance(cycle, RequestCycle) else None


def http_date() -> bytes:
    """The value of ``date``."""
    return _formatted_date(int(time.time()))


@lru_cache(maxsize=1)
def _formatted_date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode("ascii")
