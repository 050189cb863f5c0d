"""Pages through NIXL: RDMA, GPU-direct or whatever UCX finds between two machines, and shared memory or TCP on one.

Each process has one agent, with its pool registered once. The reader's offer carries its agent's metadata; a writer
loads it, writes a few bytes beside the pool and reads them back, and only then counts as attached. Pages are chosen by
index from descriptor lists that were prepared for the whole pool.

Nobody is asked when the backend writes, so neither closing a connection nor deregistering memory is a fence here: UCX
moves pages between processes of one host without the reader's doing, and a transfer handle that is released may go on
(both said by NIXL's own makers). The fence is the writer's completion: ``done`` tells of a ticket only when NIXL says
DONE, ``detach`` says True only when nothing is under way, and a write that ends in an error counts as under way for as
long as the reader lives. On one host the reader also watches the writer's process, as ``shm`` does, and its death is a
fence.

A writer on another host that dies or is out of reach proves nothing. What it was granted is taken back by local
invalidation: the reader makes itself a new agent and lets go of the old one, with everything that UCX had for it. Other
hosts reach our memory only through what is gone then: over TCP our own process places the bytes, from sockets that are
closed; over RDMA they need the memory's registration and the queue pairs. Processes of this host may have ways in that
need no agent (UCX copies from process to process), so one that cannot be watched is not let in at all, and while one is
watched nothing is invalidated. Every pair that used the old agent breaks and is mended under a new epoch; the new offer
tells their writers that what failed or hangs on their side cannot reach us any more, which is all that they wait for.

Of a reader on another host that dies in mid-write nobody will ever say so. Its writes count as under way for good,
which costs the writer a handle each and no page: see ``Sender``.

NIXL authenticates nobody: who knows the metadata, which only ``Connect`` carries, may write. Keep it to an interface
that is trusted (``UCX_NET_DEVICES``). ``UCX_TLS`` and the like are UCX's own and are left alone.
"""

import base64
import mmap
import os
import threading
import weakref
from typing import Any

from common.errors import ConfigError
from kv_transfer.transports.base import PageStore, address_of

PROBE_BYTES = 4_096


class Agent:
    """A process's NIXL agent with the pool and a page to probe with, both registered. ``lock`` goes around each call.

    Attributes:
        metadata: what others must know to reach the pool, in base64.
        is_gone: NIXL has let go of everything, and so nothing comes in by this agent any more.

    Raises:
        ConfigError: NIXL is not installed, or finds no way to transfer on this machine.
    """

    def __init__(self, store: PageStore, name: str, probe: mmap.mmap | None = None) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it logs to stdout
        try:
            import nixl
        except ImportError as error:
            raise ConfigError(f"--transport nixl needs the extra nixl (pip install 'baton[nixl]'): {error}") from error
        self.lock = threading.RLock()
        self.is_gone = False
        self.store = store
        self.probe = mmap.mmap(-1, 2 * PROBE_BYTES) if probe is None else probe
        self.pool_at, self.probe_at = address_of(store.memory), address_of(self.probe)
        num_bytes = store.geometry.pool_bytes(store.num_pages)
        # Its own progress thread spins for ever; ours runs while there is something to do.
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self.nixl = nixl.nixl_agent(name, config)
            regions = [(self.pool_at, num_bytes, 0, ""), (self.probe_at, 2 * PROBE_BYTES, 0, "")]
            self._registered = self.nixl.register_memory(regions, "DRAM")
            self.metadata = base64.b64encode(self.nixl.get_agent_metadata()).decode()
        except Exception as error:  # NIXL's own errors have no common root
            raise ConfigError(f"--transport nixl cannot register the pool: {error}") from error

    def page_list(self, agent: str | bytes, pool_at: int, num_pages: int, size: int) -> Any:
        """A prepared descriptor for every page of a pool, here (agent "NIXL_INIT_AGENT") or there; ``size``: bytes."""
        return self.nixl.prep_xfer_dlist(agent, [(pool_at + i * size, size, 0) for i in range(num_pages)], "DRAM")

    def close(self) -> None:
        """Let go of all that UCX has: connections, registered memory, its thread."""
        with self.lock:
            self.nixl.deregister_memory(self._registered)
            left = weakref.ref(self.nixl)
            del self.nixl
            self.is_gone = left() is None
