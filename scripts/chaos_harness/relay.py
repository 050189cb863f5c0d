"""A network in user space: passes packets between TUN devices, each of them late, and some of them not at all.

    relay.py DELAY_S LOSS ADDRESS=DESCRIPTOR ...

It is for kernels without ``netem``. Each packet goes to the device with its destination; other packets are dropped.

A line ``ADDRESS ADDRESS PORT`` on its input silences all TCP connections between these two hosts that exist then,
except those to or from the port: their packets are dropped without an error to either end. Connections made later work.
"""

import contextlib
import fcntl
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import BinaryIO

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MAX_PACKET = 65_536
MAX_LATE = 100_000  # packets on the way; further ones are lost, as in a full queue
BATCH = 64  # packets of one device before the next has its turn
FROM, TO = slice(12, 16), slice(16, 20)  # in an IPv4 header
PROTOCOL, TCP = 9, 6  # where an IPv4 header has the protocol; that of TCP
FLAGS, SYN = 13, 0x02  # where a TCP header has its flags; that of the first packets of a connection


class Silence:
    """TCP connections whose packets are dropped."""

    def __init__(self) -> None:
        self._spared: dict[frozenset[bytes], bytes] = {}  # by two hosts: the port whose connections are spared
        self._later: set[frozenset[bytes]] = set()  # connections that were made since

    def begin(self, command: str) -> None:
        address, other, port = command.split()
        hosts = frozenset((socket.inet_aton(address), socket.inet_aton(other)))
        self._spared[hosts] = int(port).to_bytes(2, "big")
        self._later = {ends for ends in self._later if frozenset(end[:4] for end in ends) != hosts}

    def has(self, packet: bytes) -> bool:
        """Whether this packet is to be dropped."""
        if not self._spared or packet[PROTOCOL] != TCP:
            return False
        spared = self._spared.get(frozenset((packet[FROM], packet[TO])))
        start = (packet[0] & 15) * 4
        ports = packet[start : start + 2], packet[start + 2 : start + 4]
        if spared is None or spared in ports:
            return False
        connection = frozenset((packet[FROM] + ports[0], packet[TO] + ports[1]))
        if packet[start + FLAGS] & SYN:
            self._later.add(connection)
        return connection not in self._later


def open_tun(name: str) -> BinaryIO:
    """A TUN device of this name, which exists as long as the file is open somewhere. Raises OSError."""
    file = open("/dev/net/tun", "r+b", buffering=0)  # noqa: SIM115
    try:
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        file.close()
        raise
    return file


def relay(devices: Mapping[bytes, int], delay_s: float, loss: float, commands: int | None = None) -> None:
    """Pass packets on for ever.

    Args:
        devices: descriptors by IPv4 address.
        commands: descriptor on which lines come that silence connections.
    """
    drawn = random.Random(0)
    late: deque[tuple[float, int, bytes]] = deque()
    silence = Silence()
    poller = select.poll()
    for number in devices.values():
        os.set_blocking(number, False)
        poller.register(number, select.POLLIN)
    if commands is not None:
        poller.register(commands, select.POLLIN)
    while True:
        wait_ms = max(late[0][0] - time.monotonic(), 0.0) * 1_000 if late else None
        for number, _ in poller.poll(wait_ms):
            if number == commands:
                lines = os.read(number, MAX_PACKET).decode().splitlines()
                for line in lines:
                    silence.begin(line)
                if not lines:
                    poller.unregister(number)
                continue
            for _ in range(BATCH):
                try:
                    packet = os.read(number, MAX_PACKET)
                except BlockingIOError:
                    break
                to = devices.get(packet[TO])
                is_lost = drawn.random() < loss or silence.has(packet) or len(late) >= MAX_LATE
                if to is not None and not is_lost:
                    late.append((time.monotonic() + delay_s, to, packet))
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, to, packet = late.popleft()
            with contextlib.suppress(OSError):  # its queue is full, or the device is down
                os.write(to, packet)


def main(argv: list[str]) -> None:
    delay_s, loss, *devices = argv
    pairs = (text.split("=") for text in devices)
    relay({socket.inet_aton(address): int(number) for address, number in pairs}, float(delay_s), float(loss), 0)


if __name__ == "__main__":
    main(sys.argv[1:])
