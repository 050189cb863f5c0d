"""Pages through NIXL: RDMA or whatever UCX finds between two machines, and shared memory or TCP on one.

Pages of a GPU go through host memory at either end, unless it is told to move them directly (``--gpu-direct``): then
the device's own memory is registered, and so is the room for probes.

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

NIXL authenticates nobody: who knows the metadata, which only ``Connect`` carries, may write. What ``Connect`` carries
is sealed with the cluster's key, so that nobody else leads a writer astray. Keep it to an interface that is trusted
(``UCX_NET_DEVICES``). ``UCX_TLS`` and the like are UCX's own and are left alone.
"""

import base64
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from common.errors import ConfigError
from kv_transfer.page_slices import Piece
from kv_transfer.transports.base import PageStore, address_of
from kv_transfer.transports.nixl.peer_state import Kind, Region, Route

PROBE_BYTES = 4_096
DEVICE_KIND: Kind = "VRAM"


class Probe:
    """Room where pages are, to try the way with: what goes out, and behind it what comes back.

    Raises:
        ConfigError: ``is_direct``, and the pool is not on a device.
    """

    def __init__(self, store: PageStore, *, is_direct: bool) -> None:
        pages = store.device_pages
        if is_direct and pages is None:
            raise ConfigError("--gpu-direct moves pages between GPUs, and this pool is in host memory")
        self.is_direct = is_direct
        self._memory: Any = pages.new_zeros(2 * PROBE_BYTES) if is_direct else mmap.mmap(-1, 2 * PROBE_BYTES)
        self.region = _on_device(self._memory) if is_direct else Region(address_of(self._memory))

    def put(self, sent: bytes) -> None:
        if self.is_direct:
            self._memory[:PROBE_BYTES] = self._memory.new_tensor(list(sent))
            self._memory[PROBE_BYTES:] = 0
            self._memory.cpu()  # when this is over, so is what the device had to do before
        else:
            self._memory[:PROBE_BYTES] = sent
            self._memory[PROBE_BYTES:] = bytes(PROBE_BYTES)

    def came_back(self) -> bytes:
        back = self._memory[PROBE_BYTES:]
        return bytes(back.cpu().tolist()) if self.is_direct else bytes(back)


def _on_device(tensor: Any) -> Region:
    return Region(tensor.data_ptr(), DEVICE_KIND, tensor.device.index or 0)


class Agent:
    """A process's NIXL agent with the pool and the room to probe with, both registered. ``lock`` goes around each call.

    Attributes:
        metadata: what others must know to reach the pool, in base64.
        pool: where it is.
        is_gone: NIXL has let go of everything, and so nothing comes in by this agent any more.

    Raises:
        ConfigError: NIXL is not installed, or finds no way to transfer on this machine.
    """

    def __init__(self, store: PageStore, name: str, probe: Probe) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it logs to stdout
        try:
            import nixl
        except ImportError as error:
            raise ConfigError(f"--transport nixl needs the extra nixl (pip install 'baton[nixl]'): {error}") from error
        self.lock = threading.RLock()
        self.is_gone = False
        self.store = store
        self.probe = probe
        self.pool = _on_device(store.device_pages) if probe.is_direct else Region(address_of(store.memory))
        num_bytes = store.geometry.pool_bytes(store.num_pages)
        # Its own progress thread spins for ever; ours runs while there is something to do.
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self.nixl = nixl.nixl_agent(name, config)
            runs = (self.pool.run(0, num_bytes), probe.region.run(0, 2 * PROBE_BYTES))
            self._registered = self.nixl.register_memory([(*run, "") for run in runs], self.pool.kind)
            self.metadata = base64.b64encode(self.nixl.get_agent_metadata()).decode()
        except Exception as error:  # NIXL's own errors have no common root
            what = "the GPU's memory (--gpu-direct)" if probe.is_direct else "the pool"
            raise ConfigError(f"--transport nixl cannot register {what}: {error}") from error

    def page_list(self, agent: str | bytes, pool: Region, num_pages: int, size: int) -> Any:
        """A prepared descriptor for every page of a pool, here (agent "NIXL_INIT_AGENT") or there; ``size``: bytes."""
        return self.nixl.prep_xfer_dlist(agent, [pool.run(i * size, size) for i in range(num_pages)], pool.kind)

    def prepare(self, sources: Any, route: Route, pages: Sequence[tuple[int, int]], piece: Piece | None) -> Any:
        """A write that has not begun: of whole pages by index from the lists that are prepared (``sources``: of ours),
        of pieces by a list of all of their runs."""
        if piece is None:
            ours, theirs = [source for source, _ in pages], [target for _, target in pages]
            return self.nixl.make_prepped_xfer("WRITE", sources, ours, route.pages, theirs)
        here, there = self.pool, route.endpoint.pool
        local, remote = [], []
        for source, target in pages:
            for at, to, length in piece.runs:
                local.append(here.run(source * piece.ours.page_bytes + at, length))
                remote.append(there.run(target * piece.theirs.page_bytes + to, length))
        lists = self.nixl.get_xfer_descs(local, here.kind), self.nixl.get_xfer_descs(remote, there.kind)
        return self.nixl.initialize_xfer("WRITE", *lists, route.agent)

    def close(self) -> None:
        """Let go of all that UCX has: connections, registered memory, its thread."""
        with self.lock:
            self.nixl.deregister_memory(self._registered)
            left = weakref.ref(self.nixl)
            del self.nixl
            self.is_gone = left() is None
