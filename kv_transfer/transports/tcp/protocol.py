"""Frames of a data connection, byte by byte: a handshake of four frames, then pages and their acknowledgements.

    writer -> reader   HELLO     which offer, which of its connections, nonce
    reader -> writer   WELCOME   nonce, proof
    writer -> reader   proof
    reader -> writer   proof     accepted; pages may come
    writer -> reader   PAGE header + mac, and the page's bytes     any number of times; with a cluster key, then a
                                                                   mac of both
    reader -> writer   DONE header + mac                           one for every page, in order

A proof is HMAC-SHA256 under the cluster key over both nonces and everything on which the two ends must agree. Frame
keys are derived from the same, one per direction, so a frame of another connection, epoch or direction does not fit. A
header has a mac of its own, since it says where the bytes go that follow; the mac after these covers header and bytes.
This module opens no socket.
"""

import hashlib
import hmac
import re
import socket
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MAGIC = b"batontcp"
TOKEN_BYTES = NONCE_BYTES = PROOF_BYTES = 32
MAC_BYTES = 16
HELLO = struct.Struct("<8sHH32s32s")  # magic, index of this connection, how many there are, token, nonce
WELCOME = struct.Struct("<32s32s")  # nonce, proof
#: Magic, bytes that follow, page of the reader's pool, sequence number from 0, and the part of the page: its first
#: token and number of tokens, its first KV head and number of heads.
PAGE = struct.Struct("<4sIQQ4I")
DONE = struct.Struct("<4sIQQ")  # magic, 1 if the page was placed and 0 if it was refused, page, sequence number
PAGE_MAGIC, DONE_MAGIC = b"page", b"done"
PAGE_FRAME_BYTES = PAGE.size + MAC_BYTES
DONE_FRAME_BYTES = DONE.size + MAC_BYTES
MAX_CONNECTIONS = 64

ENDPOINT = re.compile(r"(.{1,255}):(\d{1,5}):([0-9a-f]{64}):(\d{1,2})")
_NO_MAC = bytes(MAC_BYTES)
_AGREED = struct.Struct("<HHQQQ")

SOCKET_BUFFER_BYTES = 4 << 20
#: A peer that has vanished silently is detected after about this many seconds.
SILENCE_S = 30


@dataclass(frozen=True, slots=True)
class Terms:
    """What both ends of a connection must agree on, and prove that they do. ``magic`` names the transport."""

    magic: bytes
    token: bytes
    index: int
    count: int
    epoch: int
    page_bytes: int
    num_pages: int
    writer_nonce: bytes
    reader_nonce: bytes

    def proof(self, key: bytes, label: bytes) -> bytes:
        """32 bytes that only a process with the key can make. ``label`` separates the uses."""
        agreed = _AGREED.pack(self.index, self.count, self.epoch, self.page_bytes, self.num_pages)
        message = b"\0".join((self.magic, label, agreed, self.token, self.writer_nonce, self.reader_nonce))
        return hmac.digest(key, message, hashlib.sha256)

    def is_proof(self, key: bytes, label: bytes, given: bytes) -> bool:
        return hmac.compare_digest(self.proof(key, label), given)

    def seal(self, key: bytes, direction: bytes) -> "FrameAuthenticator":
        return FrameAuthenticator(self.proof(key, b"frames " + direction) if key else b"")


@dataclass(frozen=True, slots=True)
class AuthenticatedConnection:
    """A connection whose ends have proven to each other that they know these terms and the cluster key."""

    connection: socket.socket
    terms: Terms
    key: bytes

    def seal(self, direction: bytes) -> "FrameAuthenticator":
        return self.terms.seal(self.key, direction)

    def proof(self, label: bytes) -> bytes:
        return self.terms.proof(self.key, label)


class FrameAuthenticator:
    """Authenticates the frames of one direction of one connection. Without a key, all frames are accepted."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def mac(self, header: bytes) -> bytes:
        return hmac.digest(self._key, header, "sha256")[:MAC_BYTES] if self._key else _NO_MAC

    def is_mine(self, header: bytes, mac: bytes) -> bool:
        return hmac.compare_digest(self.mac(header), mac)

    def body(self, header: bytes) -> "PayloadMac | None":
        """The mac of the bytes that follow a header; None without a key, and then no mac follows them."""
        return PayloadMac(self._key, header) if self._key else None


class PayloadMac:
    """The mac of a header and the bytes after it, computed as they go by. Releases the interpreter's lock."""

    __slots__ = ("_hmac",)

    def __init__(self, key: bytes, header: bytes) -> None:
        self._hmac = hmac.new(key, b"body" + header, "sha256")

    def add(self, data: memoryview) -> None:
        self._hmac.update(data)

    def mac(self) -> bytes:
        return self._hmac.digest()[:MAC_BYTES]


@cache
def grants_large_buffers() -> bool:
    """Whether this machine lets a socket have buffers of ``SOCKET_BUFFER_BYTES``."""
    try:
        return all(
            int(Path(f"/proc/sys/net/core/{name}").read_text()) >= SOCKET_BUFFER_BYTES
            for name in ("rmem_max", "wmem_max")
        )
    except (OSError, ValueError):  # a container may not see them
        return False


def tune(connection: socket.socket) -> None:
    """Disable Nagle's algorithm, enlarge the buffers, and detect a peer that has vanished.

    Where the machine does not grant such buffers, they are left to the kernel: a size that is set, and cut to 208 KiB
    by the usual limits, stays, while the kernel's own grow with the delay between hosts.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if grants_large_buffers():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
