"""Pages between two machines over TCP, with nothing but the standard library.

The reader (decode node) listens; a writer dials it several times per pair. Each connection begins with a handshake in
which both ends prove, over the other's nonce, that they know the token of the offer and the cluster key. It then
carries page frames one way and acknowledgements the other. Bytes go from the writer's pool memory into the reader's
without a copy in Python: one thread per connection and side does nothing but ``sendmsg`` and ``recv_into``, which
release the interpreter's lock.

The fence: the reader places every byte, under a lock of the connection, and only into a page that this peer is allowed
to write at that moment. ``forbid`` takes that lock, so nothing reaches the pages after it. ``withdraw`` closes the
connections, and no connection has an older epoch than the newest offer. The bytes of a late, repeated or invented page
are read and discarded.

With a cluster key, both ends of every connection are authenticated, and so is every frame: its mac binds the bytes of a
page to its number, length, sequence number, direction, connection, epoch and pool. A page whose bytes are not the
writer's is never acknowledged, and ends the connection. Nothing is encrypted. An attacker who can alter traffic can cut
connections, but cannot join, choose where bytes go, or have other bytes used. HMAC-SHA256 costs each end about as much
time as the copy into or out of its socket. Without a key only the token protects a pool; it travels on the control
plane, and in clear text here.
"""

from kv_transfer.transports.tcp.reader import TcpReader
from kv_transfer.transports.tcp.writer import TcpWriter

__all__ = ["TcpReader", "TcpWriter"]
