"""A small HTTP server for the health and metrics of a node: GET of a few paths, one request for each connection.

It runs on a thread and an event loop of its own, so that a request never waits for the node and the node never waits
for a request. The number of connections, the size of a request, and the time from the connection to the end of the
answer are bounded. h11 parses requests and writes answers.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

import h11

from common.system.loop_errors import LoopErrors
from common.wire.address import cannot_bind, in_url

log = logging.getLogger(__name__)

#: Connections at once; further ones are closed.
MAX_CONNECTIONS = 32
#: Bytes of a request line and its headers together.
MAX_REQUEST_BYTES = 8_192
#: From the connection to the last byte of the answer.
EXCHANGE_S = 5.0
CLOSE_S = 2.0
#: At a stop, waiting connections are accepted for this long, so that they are closed too.
ACCEPT_S = 0.01
TEXT = "text/plain; charset=utf-8"


class Answer(NamedTuple):
    status: int
    content_type: str
    body: bytes


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    Raises:
        ConfigError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise cannot_bind("--http-host", host, "--http-port", port, error) from error


def address_of(listener: socket.socket, reachable_host: str) -> str:
    """``host:port`` for clients. A listener on all addresses is known by the node's ``reachable_host``."""
    host, port = listener.getsockname()[:2]
    return f"{in_url(reachable_host if host in ('0.0.0.0', '::') else host)}:{port}"


class HttpServer:
    """Answers from the start until ``close``.

    Args:
        listener: a listening socket, which this server closes.
        answers: by path; called on the server's own thread.
    """

    def __init__(self, listener: socket.socket, answers: Mapping[str, Callable[[], Answer]]) -> None:
        self._listener = listener
        self._answers = answers
        self._num_connections = 0
        self._loop = asyncio.new_event_loop()
        self._is_stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the listener and every connection."""
        self._loop.call_soon_threadsafe(self._is_stopping.set)
        self._thread.join(timeout=CLOSE_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop.set_exception_handler(LoopErrors())
        server = await asyncio.start_server(self._exchange, sock=self._listener, limit=MAX_REQUEST_BYTES)
        await self._is_stopping.wait()
        await asyncio.sleep(ACCEPT_S)  # not every kernel closes connections that wait to be accepted
        server.close()  # leaving it as a context would wait, since Python 3.12, for connections that are ended below
        exchanges = asyncio.all_tasks() - {asyncio.current_task()}
        for task in exchanges:
            task.cancel()
        await asyncio.gather(*exchanges, return_exceptions=True)
        await asyncio.sleep(0)  # the loop closes the sockets of aborted connections in its next turn

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_connections >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._num_connections += 1
        try:
            with suppress(TimeoutError, OSError, asyncio.CancelledError):  # cancelled at the stop
                async with asyncio.timeout(EXCHANGE_S):
                    writer.write(await self._answer(reader))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            writer.transport.abort()
            self._num_connections -= 1
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        """The bytes that answer one request; none if the client leaves before it has sent one."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)
        try:
            while (event := connection.next_event()) is h11.NEED_DATA:
                connection.receive_data(await reader.read(MAX_REQUEST_BYTES))
        except h11.RemoteProtocolError as error:
            return _encoded(connection, _refusal(error.error_status_hint), has_body=True)
        if not isinstance(event, h11.Request):
            return b""
        return _encoded(connection, self._answer_to(event), has_body=event.method != b"HEAD")

    def _answer_to(self, request: h11.Request) -> Answer:
        answer = self._answers.get(request.target.partition(b"?")[0].decode("ascii", "replace"))
        if answer is None:
            return _refusal(HTTPStatus.NOT_FOUND)
        if request.method != b"GET":
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED)
        try:
            return answer()
        except Exception:
            log.exception("a request of %r could not be answered", request.target[:100])
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR)


def _refusal(status: int) -> Answer:
    return Answer(status, TEXT, f"{HTTPStatus(status).phrase}\n".encode())


def _encoded(connection: h11.Connection, answer: Answer, *, has_body: bool) -> bytes:
    headers = [
        ("date", formatdate(usegmt=True)),
        ("content-type", answer.content_type),
        ("content-length", str(len(answer.body))),
        ("connection", "close"),
        *([("allow", "GET")] if answer.status == HTTPStatus.METHOD_NOT_ALLOWED else []),
    ]
    events: list[h11.Event] = [
        h11.Response(status_code=answer.status, reason=HTTPStatus(answer.status).phrase, headers=headers)
    ]
    events += [h11.Data(data=answer.body)] if has_body else []
    return b"".join(connection.send(event) or b"" for event in (*events, h11.EndOfMessage()))
