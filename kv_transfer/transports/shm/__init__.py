"""Pages between two processes of one host: the writer maps the reader's pool and writes straight into it.

The reader (decode node) listens on an abstract Unix socket, which has no name in any file system. A writer shows the
token of its offer, which only ``Connect`` carries. The reader checks the peer's user, opens a pidfd of its process, and
only then sends the descriptor of its pool. So a peer is on this host if attaching worked, and after ``kill -9`` of
either process nothing is left to clean up. The connection stays open for one more frame, ``DETACHED``, which the writer
sends after it has unmapped the pool.

The fence is that frame, or the death of the writer, which its pidfd reports. A connection that closes without
``DETACHED`` proves nothing, since the mapping may still exist; silence proves nothing either, since a stopped process
may continue at any time.
"""

from kv_transfer.transports.shm.reader import ShmReader
from kv_transfer.transports.shm.writer import ShmWriter

__all__ = ["ShmReader", "ShmWriter"]
