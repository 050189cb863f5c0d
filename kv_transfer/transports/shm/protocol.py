"""Frames and credentials of the Unix socket over which a pool is handed to another process.

Every frame is one packet of fixed size. The writer sends the token of its offer; the reader answers with ``HELLO`` and,
in the same packet, hands over its pool: as a file descriptor, or as bytes behind ``HELLO``; the writer ends with
``DETACHED``.
"""

import re
import socket
import struct

TOKEN_BYTES = 32
HELLO = struct.Struct("<8sQQ32s")  # magic, epoch, bytes of the pool, incarnation of the reader
MAGIC = b"batonshm"
MAX_POOL_INFO_BYTES = 1_024  # behind HELLO
DETACHED = b"detached"
ENDPOINT = re.compile(r"(baton-[0-9a-f]{32}):([0-9a-f]{64})")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
