"""Pages between two processes of one host: the writer maps the reader's pool and writes straight into it.

The reader (decode node) listens on an abstract Unix socket, which has no name in any file system. A writer shows the
token of its offer, which only ``Connect`` carries; the reader checks the peer's user, opens a pidfd of its process
and only then hands over the descriptor of its pool. So a peer is on this host if attaching worked, and after ``kill
-9`` of either nothing is left to clean up. The connection stays open for one more word: ``DETACHED``, said after the
mapping is gone.

Fence: that word, or the writer's death as its pidfd tells it. A connection that closes without it proves nothing, for
the mapping may live on; nor does silence, for a stopped process may go on any time.
"""

from kv_transfer.transports.shm.reader import ShmReader
from kv_transfer.transports.shm.writer import ShmWriter

__all__ = ["ShmReader", "ShmWriter"]
