"""Damages HTTP requests for tests of servers."""

import random
from collections.abc import Sequence

#: What mutations insert: bytes that mean something to a parser.
WORDS = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"%", b"%zz", b"%ff", b"\xff", b"\xc3\x28", b"{", b"}", b'"', b"\\ud800",
    b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: a\r\n",
    b"Upgrade: websocket\r\n", b"Expect: 100-continue\r\n", b"HTTP/9.9", b"0\r\n\r\n", b"fffffffffffffffff\r\n",
    b"Connection: close\r\n", b"1e999", b"NaN",
)  # fmt: skip


def mutated(seed: int, requests: Sequence[bytes]) -> bytes:
    """One of the requests after a few mutations; the same for the same seed."""
    draw = random.Random(seed)
    data = bytearray(draw.choice(requests))
    for _ in range(draw.randint(1, 4)):
        at, kind = draw.randrange(len(data) + 1), draw.randrange(4)
        if kind == 0:
            data[at:at] = draw.choice(WORDS)
        elif kind == 1:
            del data[at : at + draw.randint(1, 12)]
        elif kind == 2 and at < len(data):
            data[at] = draw.randrange(256)
        else:
            data[at:at] = data[at : at + draw.randint(1, 40)]
    return bytes(data)
