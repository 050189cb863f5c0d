"""One NIXL agent of a process, with the memory that it registers: the pool, and the memory for probes."""

import base64
import logging
import mmap
import os
import signal
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from common.config.shared import UCX
from common.errors import ConfigError, needs_extra
from kv_transfer.page_slices import SlicePair
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import address_of
from kv_transfer.transports.nixl.peer_state import Kind, MemoryRegion, PeerState
from kv_transfer.transports.silence import ConnectionInfo

log = logging.getLogger(__name__)

PROBE_BYTES = 4_096
#: Attachments that can be probed at the same time, each in an area of its own.
NUM_PROBE_AREAS = 256
DEVICE_KIND: Kind = "VRAM"
#: How long ``close`` waits for the thread of an end. A call to NIXL may hang for good, and the process must end.
CLOSE_TIMEOUT_S = 5.0


class ProbeMemory:
    """Memory of the pool's kind in which attachments are tried out, divided into areas.

    An area holds ``PROBE_BYTES`` that go out and behind them as many that come back. Two attachments that share an area
    overwrite each other's bytes, so a writer takes an area for each attachment and gives it back afterwards. A reader,
    which cannot know when a writer is done, hands areas out in turn.

    Raises:
        ConfigError: ``is_direct``, and the pool is not on a device.
    """

    def __init__(self, store: PageStore, *, is_direct: bool) -> None:
        pages = store.device_pages
        if is_direct and pages is None:
            raise ConfigError("--gpu-direct moves pages between GPUs, and this pool is in host memory")
        self.is_direct = is_direct
        self.num_bytes = 2 * PROBE_BYTES * NUM_PROBE_AREAS
        self._memory: Any = pages.new_zeros(self.num_bytes) if is_direct else mmap.mmap(-1, self.num_bytes)
        self._free = deque(range(NUM_PROBE_AREAS))
        self.region = _on_device(self._memory) if is_direct else MemoryRegion(address_of(self._memory))

    def take(self) -> int | None:
        """An area that no attachment of this writer uses; None while there is none."""
        return self._free.popleft() if self._free else None

    def give_back(self, area: int) -> None:
        """The least recently used area is taken first."""
        self._free.append(area)

    def outgoing(self, area: int) -> tuple[int, int, int]:
        """Descriptor of an area's bytes that go out."""
        return self.region.run(2 * PROBE_BYTES * area, PROBE_BYTES)

    def incoming(self, area: int) -> tuple[int, int, int]:
        """Descriptor of an area's bytes that come back."""
        return self.region.run(2 * PROBE_BYTES * area + PROBE_BYTES, PROBE_BYTES)

    def enter_context(self) -> None:
        """Make the context of the memory's GPU current in this thread, by a copy of one byte.

        A thread begins without one, and UCX would then load a reader without its keys for CUDA IPC.
        """
        if self.is_direct:
            self._memory[:1].cpu()

    def put(self, area: int, sent: bytes) -> None:
        """Write what is to go out, and clear what comes back."""
        start = 2 * PROBE_BYTES * area
        middle, end = start + PROBE_BYTES, start + 2 * PROBE_BYTES
        if self.is_direct:
            self._memory[start:middle] = self._memory.new_tensor(list(sent))
            self._memory[middle:end] = 0
            self._memory[start:end].cpu()  # waits until the device has done both
        else:
            self._memory[start:middle] = sent
            self._memory[middle:end] = bytes(PROBE_BYTES)

    def came_back(self, area: int) -> bytes:
        start = 2 * PROBE_BYTES * area + PROBE_BYTES
        back = self._memory[start : start + PROBE_BYTES]
        return bytes(back.cpu().tolist()) if self.is_direct else bytes(back)


def _on_device(tensor: Any) -> MemoryRegion:
    return MemoryRegion(tensor.data_ptr(), DEVICE_KIND, tensor.device.index or 0)


class Agent:
    """A process's NIXL agent with the pool and the probe memory, both registered. Take ``lock`` around each call.

    Attributes:
        metadata: what others must know to reach the pool, in base64.
        pool: where the pool is.
        is_gone: NIXL has released everything, so nothing comes in through this agent any more.

    Raises:
        ConfigError: NIXL is not installed, or finds no way to transfer on this machine.
    """

    def __init__(self, store: PageStore, name: str, probe: ProbeMemory, backend: str = UCX) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # its default level logs to stdout
        try:
            import nixl
        except ImportError as error:
            raise ConfigError(f"--transport nixl {needs_extra('nixl')} ({error})") from error
        self.lock = threading.RLock()
        self.is_gone = False
        self._has_failed = False  # to progress, which has been logged
        self.store = store
        self.probe = probe
        self.pool = _on_device(store.device_pages) if probe.is_direct else MemoryRegion(address_of(store.memory))
        num_bytes = store.layout.pool_bytes(store.num_pages)
        # NIXL's progress thread spins for ever; ours runs only while there is something to do.
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        what = f"start --nixl-backend {backend}"
        try:
            self.nixl = nixl.nixl_agent(name, config)
            known = self.nixl.get_plugin_list()
            if backend not in known:
                raise ConfigError(f"--nixl-backend {backend} is not one that NIXL has here: {', '.join(sorted(known))}")
            self.nixl.create_backend(backend)
            if threading.current_thread() is threading.main_thread():  # UCX has taken the signal, for debugging
                signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGHUP))
            what = "register " + ("the GPU's memory (--gpu-direct)" if probe.is_direct else "the pool")
            runs = (self.pool.run(0, num_bytes), probe.region.run(0, probe.num_bytes))
            self._registered = self.nixl.register_memory([(*run, "") for run in runs], self.pool.kind)
            self.metadata = base64.b64encode(self.nixl.get_agent_metadata()).decode()
        except ConfigError:
            raise
        except Exception as error:  # NIXL's own errors have no common root
            raise ConfigError(f"--transport nixl cannot {what}: {error}") from error

    def page_list(self, agent: str | bytes, pool: MemoryRegion, num_pages: int, size: int) -> Any:
        """A prepared descriptor for every page of a pool, ours (agent "NIXL_INIT_AGENT") or a peer's; ``size`` in
        bytes.
        """
        return self.nixl.prep_xfer_dlist(agent, [pool.run(i * size, size) for i in range(num_pages)], pool.kind)

    def prepare(self, sources: Any, peer: PeerState, pages: Sequence[tuple[int, int]], slices: SlicePair | None) -> Any:
        """A write that has not begun: of whole pages, by index in the prepared lists (``sources`` are ours), or of
        slices, by a list of all their runs.
        """
        if slices is None:
            ours, theirs = [source for source, _ in pages], [target for _, target in pages]
            return self.nixl.make_prepped_xfer("WRITE", sources, ours, peer.pages, theirs)
        here, there = self.pool, peer.endpoint.pool
        local, remote = [], []
        for source, target in pages:
            for at, to, length in slices.runs:
                local.append(here.run(source * slices.ours.page_bytes + at, length))
                remote.append(there.run(target * slices.theirs.page_bytes + to, length))
        lists = self.nixl.get_xfer_descs(local, here.kind), self.nixl.get_xfer_descs(remote, there.kind)
        return self.nixl.initialize_xfer("WRITE", *lists, peer.agent)

    def progress(self) -> None:
        """Call UCX, which over TCP places bytes and answers only when it is called; takes ``lock``.

        An error has no effect on the caller, which goes on calling: a transfer that UCX gave up fails by itself.
        """
        try:
            with self.lock:
                self.nixl.get_new_notifs()
        except Exception as error:  # NIXL's own errors have no common root
            if not self._has_failed:
                log.warning("nixl reports an error, and is asked again: %s", error)
            self._has_failed = True

    def close(self) -> None:
        """Release everything that UCX has: connections, registered memory, its thread."""
        with self.lock:
            self.nixl.deregister_memory(self._registered)
            left = weakref.ref(self.nixl)
            del self.nixl
            self.is_gone = left() is None


def is_of_agent(connection: ConnectionInfo, reader: bytes, own: bytes) -> bool:
    """Whether a connection is one of UCX to this reader. Its address is in the reader's metadata, and so is the port of
    the end that was dialled in the metadata of that end.
    """
    family = socket.AF_INET6 if ":" in connection.host else socket.AF_INET
    if socket.inet_pton(family, connection.host) not in reader:
        return False
    return connection.port.to_bytes(2, "big") in reader or connection.own_port.to_bytes(2, "big") in own
