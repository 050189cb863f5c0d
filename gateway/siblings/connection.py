"""Connections between sibling gateways: HTTP over Unix sockets with abstract addresses, for processes of one user.

The kernel tells each end which user the other one is. Any other user is turned away at once.
"""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import httptools

from common.errors import BatonError, ConfigError

BACKLOG = 1024
#: Bytes that may wait to be read at each end. A client that does not read stops its sibling soon.
BUFFER_BYTES = 32 << 10
CONTINUE = 100  # the status with which a sibling says that it reads the body
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class SiblingLost(BatonError):
    """A sibling gateway cannot be reached, or has ended before its answer did."""


def listen_at(address: str) -> socket.socket:
    """Raises ConfigError: another process listens there."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--group: the address of this gateway for the others cannot be bound: {error.strerror}; no other process"
            " may have the same place in the group"
        ) from error
    return listener


def inherited_listener(fd: int) -> socket.socket:
    """The listening TCP socket that the process was given. Raises ConfigError: the descriptor is none."""
    try:
        listener = socket.socket(fileno=fd)
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"--listen-fd {fd} is not a socket: {error.strerror}") from error
    if not is_listening or listener.family not in (socket.AF_INET, socket.AF_INET6):
        listener.close()
        raise ConfigError(f"--listen-fd {fd} is not a listening TCP socket")
    listener.setblocking(False)
    listener.set_inheritable(False)
    return listener


def is_same_user(connected: socket.socket) -> bool:
    """Whether the other end belongs to the user of this process."""
    _, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())


def _connect(address: str) -> socket.socket:
    """Raises SiblingLost: nothing listens there, or a process of another user, or this one has no descriptor left."""
    try:
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.setblocking(False)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            connected.connect(address)  # at once, or not at all
            if not is_same_user(connected):
                raise SiblingLost("another user listens at the address of a sibling gateway")
        except BaseException:
            connected.close()
            raise
    except OSError as error:
        raise SiblingLost(f"a sibling gateway cannot be reached: {error.strerror}") from error
    return connected


class SiblingAnswer:
    """The answer of a sibling, read as it comes.

    Attributes:
        status, headers: complete once ``ask`` has returned.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser: Any = httptools.HttpResponseParser(self)
        self._has_head = self._is_whole = self._is_received = False
        self._body: list[bytes] = []
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    async def read_receipt(self) -> None:
        """Wait until the sibling has begun to read the body of the request, or to answer."""
        while not (self._is_received or self._has_head):
            await self._read()

    async def read_head(self) -> None:
        while not self._has_head:
            await self._read()

    async def parts(self) -> AsyncIterator[bytes]:
        """The parts of the body. Raises SiblingLost: the sibling has ended before."""
        while True:
            body, self._body = self._body, []
            if body:
                yield b"".join(body)
            elif self._is_whole:
                return
            else:
                await self._read()

    async def body(self) -> bytes:
        return b"".join([part async for part in self.parts()])

    def close(self) -> None:
        """Close the connection; the sibling ends a request that is not answered yet."""
        self._writer.transport.abort()

    async def _read(self) -> None:
        try:
            data = await self._reader.read(BUFFER_BYTES)
            if data:
                self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            raise SiblingLost(f"the connection to a sibling gateway broke: {error!r}") from error
        if not data:
            raise SiblingLost("a sibling gateway has closed the connection before the end of its answer")

    # ---- called by the parser ----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._is_received = True
        self._has_head = self.status != CONTINUE

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = self._has_head


async def ask(address: str, request: bytes, *, receipt_s: float | None = None) -> SiblingAnswer:
    """Send a request to a sibling and wait for the head of its answer, which the caller closes.

    Args:
        receipt_s: how long the sibling may take to read a body that is announced by ``expect: 100-continue``.
    Raises:
        SiblingLost: it cannot be reached, takes longer, or ends before it answers.
    """
    reader, writer = await asyncio.open_unix_connection(sock=_connect(address), limit=BUFFER_BYTES)
    answer = SiblingAnswer(reader, writer)
    try:
        writer.write(request)
        if receipt_s is not None:
            await asyncio.wait_for(answer.read_receipt(), receipt_s)
        await answer.read_head()
    except TimeoutError as error:
        answer.close()
        raise SiblingLost(f"a sibling gateway has not read a request within {receipt_s:g} s") from error
    except BaseException:
        answer.close()
        raise
    return answer
