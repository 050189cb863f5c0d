"""A TCP proxy between two mailboxes that records, and may change, what they send."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

GREETING_BYTES = (10, 1, 53)  # each end sends the next part when it has the last one of the other
LAST_S = 0.03


def split_frames(data: bytearray, number: int) -> list[bytes]:
    """Remove whole ZMTP frames from the beginning of ``data``: parts of the greeting, then frames with their length.

    Args:
        number: how many were removed before.
    """
    found: list[bytes] = []
    while data:
        if number < len(GREETING_BYTES):
            num_bytes = GREETING_BYTES[number]
        else:
            is_long = bool(data[0] & 2)
            num_head = 9 if is_long else 2
            if len(data) < num_head:
                break
            num_bytes = num_head + int.from_bytes(data[1:num_head])
        if len(data) < num_bytes:
            break
        found.append(bytes(data[:num_bytes]))
        del data[:num_bytes]
        number += 1
    return found


@dataclass
class Attack:
    """What happens to the frames of one direction.

    Attributes:
        to_server: the direction.
        first, count: the frames that are held back and passed on together, changed. The greeting has numbers 0 to 2.
    """

    to_server: bool
    first: int
    count: int
    change: Callable[[list[bytes]], list[bytes]]
    held: list[bytes] = field(default_factory=list)


class HostileProxy:
    """Passes frames on between clients of its port and ``server``; ``attack`` is carried out once, on one connection,
    which is closed soon after: the rest of a frame with a changed length may never come.

    Attributes:
        recorded: all that clients have sent, by connection.
    """

    def __init__(self, server: int) -> None:
        self.recorded: list[bytearray] = []
        self.attack: Attack | None = None
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._is_closed = False
        self._threads[0].start()

    def close(self) -> None:
        self._is_closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(60)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        record = bytearray()
        self.recorded.append(record)
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._server)) as server:
            rest = {client: bytearray(), server: bytearray()}
            num_frames = {client: 0, server: 0}
            closes_at = float("inf")
            while not self._is_closed and time.monotonic() < closes_at:
                for source in select.select([client, server], [], [], 0.05)[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is client:
                        record += data
                    rest[source] += data
                    target = server if source is client else client
                    for frame in split_frames(rest[source], num_frames[source]):
                        if self._pass_on(frame, num_frames[source], target, to_server=source is client):
                            closes_at = time.monotonic() + LAST_S
                        num_frames[source] += 1

    def _pass_on(self, frame: bytes, number: int, target: socket.socket, *, to_server: bool) -> bool:
        """Return whether the attack has just been carried out."""
        attack = self.attack
        if attack is None or attack.to_server != to_server or number < attack.first:
            target.sendall(frame)
            return False
        attack.held.append(frame)
        if len(attack.held) < attack.count:
            return False
        self.attack = None
        target.sendall(b"".join(attack.change(attack.held)))
        return True
