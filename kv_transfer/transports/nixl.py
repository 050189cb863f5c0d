"""Pages through NIXL: RDMA, GPU-direct or whatever UCX finds between two machines, and shared memory or TCP on one.

Each process has one agent, with its pool registered once. The reader's offer carries its agent's metadata; a writer
loads it, writes a few bytes beside the pool and reads them back, and only then counts as attached. Pages are chosen by
index from descriptor lists that were prepared for the whole pool.

Nobody is asked when the backend writes, so neither closing a connection nor deregistering memory is a fence here: UCX
moves pages between processes of one host without the reader's doing, and a transfer handle that is released may go on
(both said by NIXL's own makers). The fence is the writer's completion: ``done`` tells of a ticket only when NIXL says
DONE, ``detach`` says True only when nothing is under way, and a write that ends in an error counts as under way for as
long as the reader lives. On one host the reader also watches the writer's process, as ``shm`` does, and its death is a
fence. A writer on another host that dies can prove nothing: the pages it was granted stay in quarantine, and counted.

NIXL authenticates nobody: who knows the metadata, which only ``Connect`` carries, may write. Keep it to an interface
that is trusted (``UCX_NET_DEVICES``). ``UCX_TLS`` and the like are UCX's own and are left alone.
"""

import mmap
import os
import threading
from typing import Any

from common.errors import ConfigError
from kv_transfer.transports.base import PageStore, address_of

PROBE_BYTES = 4_096


class Agent:
    """A process's NIXL agent with the pool and a page to probe with, both registered. ``lock`` goes around each call.

    Raises:
        ConfigError: NIXL is not installed, or finds no way to transfer on this machine.
    """

    def __init__(self, store: PageStore, name: str) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it logs to stdout
        try:
            import nixl
        except ImportError as error:
            raise ConfigError(f"--transport nixl needs the extra nixl (pip install 'baton[nixl]'): {error}") from error
        self.lock = threading.RLock()
        self.store = store
        self.probe = mmap.mmap(-1, 2 * PROBE_BYTES)
        self.pool_at, self.probe_at = address_of(store.memory), address_of(self.probe)
        num_bytes = store.geometry.pool_bytes(store.num_pages)
        # Its own progress thread spins for ever; ours runs while there is something to do.
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self.nixl = nixl.nixl_agent(name, config)
            regions = [(self.pool_at, num_bytes, 0, ""), (self.probe_at, 2 * PROBE_BYTES, 0, "")]
            self._registered = self.nixl.register_memory(regions, "DRAM")
        except Exception as error:  # NIXL's own errors have no common root
            raise ConfigError(f"--transport nixl cannot register the pool: {error}") from error

    def page_list(self, agent: str | bytes, pool_at: int, num_pages: int, size: int) -> Any:
        """A prepared descriptor for every page of a pool, here (agent "NIXL_INIT_AGENT") or there; ``size``: bytes."""
        return self.nixl.prep_xfer_dlist(agent, [(pool_at + i * size, size, 0) for i in range(num_pages)], "DRAM")

    def close(self) -> None:
        with self.lock:
            self.nixl.deregister_memory(self._registered)
            del self.nixl
