"""An HTTP server with an application that records what it sees, and clients over raw sockets."""

import asyncio
import contextlib
import ssl

from common.errors import RequestError
from gateway.http.access.hosts import AllowedHosts
from gateway.http.http_server import HttpServer
from gateway.http.request_cycle import ConnectionOptions

ANY_HOST = AllowedHosts(("*",))


class App:
    """An ASGI application that records what it sees; ``answer`` handles a request.

    Attributes:
        seen: method and path of each request.
        errors: what ``receive`` has raised.
        cancelled: paths of cancelled requests.
        ended: path and status of each request, as reported by the connection.
    """

    def __init__(self, answer):
        self.answer = answer
        self.seen, self.errors, self.cancelled, self.ended = [], [], [], []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        self.seen.append((scope["method"], scope["path"]))
        try:
            await self.answer(self, scope, receive, send)
        except asyncio.CancelledError:
            self.cancelled.append(scope["path"])
            raise

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.002)


async def lifespan(receive, send):
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def reply(send, body=b"ok", status=200, headers=()):
    headers = [(b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def say_path(app, scope, receive, send):
    await reply(send, scope["raw_path"] + b"?" + scope["query_string"])


async def echo_body(app, scope, receive, send):
    """Send the body back, or the error that reading it raises."""
    body, more = b"", True
    try:
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
    except RequestError as error:
        app.errors.append(error)
        await reply(send, error.message.encode(), error.status)
    else:
        await reply(send, body)


async def wait_for_ever(app, scope, receive, send):
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def serving(answer, host="127.0.0.1", tls=None, **options):
    app = App(answer)
    values = {"header_timeout_s": 60.0, "body_timeout_s": 60.0, "max_body_bytes": 1 << 20, "hosts": ANY_HOST, **options}
    options = ConnectionOptions(on_answer=lambda scope, status: app.ended.append((scope["path"], status)), **values)
    server = HttpServer(app, options, tls)
    await server.start(host, 0)
    try:
        yield app, server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def connected(server, **options):
    reader, writer = await asyncio.open_connection(*server.address, **options)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):  # the latter from what it has not read
            await writer.wait_closed()


async def exchange(server, data):
    """The bytes that the server sends until it closes the connection."""
    async with connected(server) as (reader, writer):
        writer.write(data)
        return await until_closed(reader)


async def until_closed(reader):
    received = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            while piece := await reader.read(1 << 16):
                received += piece
    return received


async def answer_of(reader):
    """Status, headers and body of one answer with a length."""
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:-2])
        return status, headers, await reader.readexactly(int(headers.get("content-length", 0)))
