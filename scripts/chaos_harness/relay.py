"""A network in user space: passes packets between TUN devices, each of them late, and some of them not at all.

    relay.py DELAY_S LOSS ADDRESS=DESCRIPTOR ...

It is for kernels without ``netem``. Each packet goes to the device with its destination; other packets are dropped.
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
TO = slice(16, 20)  # destination in an IPv4 header


def open_tun(name: str) -> BinaryIO:
    """A TUN device of this name, which exists as long as the file is open somewhere. Raises OSError."""
    file = open("/dev/net/tun", "r+b", buffering=0)  # noqa: SIM115
    try:
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        file.close()
        raise
    return file


def relay(devices: Mapping[bytes, int], delay_s: float, loss: float) -> None:
    """Pass packets on for ever.

    Args:
        devices: descriptors by IPv4 address.
    """
    drawn = random.Random(0)
    late: deque[tuple[float, int, bytes]] = deque()
    poller = select.poll()
    for number in devices.values():
        os.set_blocking(number, False)
        poller.register(number, select.POLLIN)
    while True:
        wait_ms = max(late[0][0] - time.monotonic(), 0.0) * 1_000 if late else None
        for number, _ in poller.poll(wait_ms):
            for _ in range(BATCH):
                try:
                    packet = os.read(number, MAX_PACKET)
                except BlockingIOError:
                    break
                to = devices.get(packet[TO])
                if to is not None and drawn.random() >= loss and len(late) < MAX_LATE:
                    late.append((time.monotonic() + delay_s, to, packet))
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, to, packet = late.popleft()
            with contextlib.suppress(OSError):  # its queue is full, or the device is down
                os.write(to, packet)


def main(argv: list[str]) -> None:
    delay_s, loss, *devices = argv
    pairs = (text.split("=") for text in devices)
    relay({socket.inet_aton(address): int(number) for address, number in pairs}, float(delay_s), float(loss))


if __name__ == "__main__":
    main(sys.argv[1:])
