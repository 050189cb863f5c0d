"""The prefill node's side of NIXL: load a peer's metadata, prove the way with a few bytes, then write pages by index.

One thread makes every call to NIXL, and looks after what is under way; the loop's own thread never waits for it. See
``nixl`` for the whole story.
"""

import base64
import binascii
import contextlib
import logging
import os
import queue
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.messages import Connect
from kv_transfer.transports.base import Attached, AttachError, PageStore
from kv_transfer.transports.nixl import PROBE_BYTES, Agent
from kv_transfer.transports.shm_hello import DETACHED, ENDPOINT
from kv_transfer.transports.shm_reader import peer_pidfd

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 10.0
PAUSE_S = 50e-6
COPYING_S = 10e-6
MAX_KNOWN = 256
CLOSING_S = 1.0  # UCX needs to be called for so long to close what has been let go
LONG_S, LONG_PAUSE_S = 5.0, 0.02  # what has taken that long is looked at more rarely


class _Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    agent: str
    pool_at: int
    probe_at: int
    door: str


@dataclass(slots=True, eq=False)
class _Write:
    """Under way. ``ticket`` 0: a probe. ``is_failed``: NIXL gave up, but nothing proves that the bytes did."""

    route: "_Route"
    ticket: int
    handle: Any
    num_pages: int = 0
    is_failed: bool = False
    begun_at: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class _Route:
    """A peer under one epoch. ``num_open``: writes that were asked for and are not over."""

    peer: str
    connect: Connect
    endpoint: _Endpoint
    until: float
    key: tuple[bytes, int, int] = (b"", 0, 0)
    agent: Any = None
    pages: Any = None
    door: socket.socket | None = None
    pidfd: int = -1
    num_open: int = 0
    num_probes: int = 0  # the same, of the thread's own; they reach no page
    is_detached: bool = False
    is_gone: bool = False
    steps: deque[Callable[[], bool]] = field(default_factory=deque)  # of attaching, each called until it says True

    @property
    def is_reader_dead(self) -> bool:
        return self.pidfd >= 0 and bool(select.select([self.pidfd], [], [], 0)[0])


class NixlWriter:
    """``WriterTransport`` of a prefill node, to be used within ``ChoosingWriter``, which waits where ``detach`` must.

    Raises:
        ConfigError: NIXL is not installed or does not work here.
    """

    name = "nixl"
    names: Sequence[str] = ("nixl",)

    def __init__(self, store: PageStore, incarnation: str = "") -> None:
        self.store = store
        self._agent = Agent(store, f"prefill-{incarnation}-{secrets.token_hex(4)}")
        self._sources = self._agent.page_list("NIXL_INIT_AGENT", self._agent.pool_at, store.num_pages)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._routes: dict[str, _Route] = {}
        self._leaving: dict[str, _Route] = {}  # detached from, with writes under way
        self._jobs: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._news: deque[Attached] = deque()
        self._done: deque[int] = deque()
        self._lock = threading.Lock()  # of routes' is_detached and num_open
        self._num_tickets = 0
        self._num_bytes = 0
        self._num_stuck = 0
        self._closing_until = 0.0
        self._is_copying = False
        self._known: dict[tuple[bytes, int, int], tuple[Any, Any]] = {}  # agents of readers, and their pages
        self._thread = threading.Thread(target=self._run, name="nixl-send", daemon=True)
        self._thread.start()

    # ---- called by the loop -------------------------------------------------------------------------------------

    def attach(self, peer: str, connect: Connect) -> None:
        assert peer not in self._routes and peer not in self._leaving, "detach first"
        try:
            endpoint = msgspec.json.decode(connect.endpoint, type=_Endpoint)
            metadata = base64.b64decode(endpoint.agent, validate=True)
        except (msgspec.DecodeError, UnicodeError, binascii.Error) as error:
            raise AttachError(f"{connect.name} offers an endpoint that nixl does not understand") from error
        route = _Route(peer, connect, endpoint, time.monotonic() + ATTACH_TIMEOUT_S)
        self._routes[peer] = route
        self._jobs.put(("attach", route, metadata))

    def poll(self) -> list[Attached]:
        self._calm()
        news = [self._news.popleft() for _ in range(len(self._news))]
        return [a for a in news if a.peer in self._routes and self._routes[a.peer].connect.epoch == a.epoch]

    def write(self, peer: str, pages: Sequence[tuple[int, int]]) -> int:
        route = self._routes[peer]
        if not self.store.is_mapped:
            for source, _ in pages:
                self._stage(source)
        self._num_tickets += 1
        with self._lock:
            route.num_open += 1
        self._jobs.put(("write", route, self._num_tickets, [s for s, _ in pages], [t for _, t in pages]))
        return self._num_tickets

    def _stage(self, page: int) -> None:
        size = self.store.geometry.page_bytes
        with memoryview(self.store.memory) as memory, memory[page * size : (page + 1) * size] as into:
            self.store.export_page(page, into)

    def done(self) -> list[int]:
        self._calm()
        return [self._done.popleft() for _ in range(len(self._done))]

    def _calm(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def detach(self, peer: str) -> bool:
        route = self._routes.pop(peer, None)
        if route is not None:
            with self._lock:
                route.is_detached = True
            self._leaving[peer] = route
            self._jobs.put(("detach", route))
        leaving = self._leaving.get(peer)
        if leaving is None:
            return True
        with self._lock:
            if leaving.num_open:
                return False
        del self._leaving[peer]
        return True

    def counters(self) -> dict[str, float]:
        return {"bytes_by_nixl": float(self._num_bytes), "stuck_writes": float(self._num_stuck)}

    def files(self) -> Sequence[int]:
        return () if self._wake < 0 else (self._wake,)

    def close(self) -> None:
        if self._wake < 0:
            return
        for peer in list(self._routes):
            self.detach(peer)
        self._jobs.put(None)
        self._thread.join()
        wake, self._wake = self._wake, -1
        os.close(wake)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Every call to NIXL is made here."""
        attaching: list[_Route] = []
        writes: list[_Write] = []
        while True:
            try:
                job = self._jobs.get(timeout=self._pause(attaching, writes))
            except queue.Empty:
                job = ()
            if job is None:
                break
            if self._closing_until > time.monotonic():
                with self._agent.lock:
                    self._agent.nixl.get_new_notifs()
            if job and job[0] == "attach":
                self._begin(job[1], job[2], writes)
                attaching.append(job[1])
            elif job and job[0] == "write":
                self._post(job[1], job[2], job[3], job[4], writes)
            elif job and job[0] == "detach":
                self._leave(job[1])
            attaching = [route for route in attaching if not self._step(route)]
            looked_at = time.monotonic()
            over = [write for write in writes if self._is_over(write)]
            # Between processes of one host UCX copies while it is asked; elsewhere asking costs next to nothing.
            self._is_copying = bool(writes) and time.monotonic() - looked_at > COPYING_S
            for write in over:
                writes.remove(write)
        self._shut(writes)

    def _pause(self, attaching: list[_Route], writes: list[_Write]) -> float | None:
        """How long to wait for a job: not long while something is about to happen."""
        if attaching or any(not write.is_failed and write.begun_at + LONG_S > time.monotonic() for write in writes):
            return 0.0 if self._is_copying else PAUSE_S
        return LONG_PAUSE_S if writes or self._closing_until > time.monotonic() else None

    def _say(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # ---- attaching ----------------------------------------------------------------------------------------------

    def _begin(self, route: _Route, metadata: bytes, writes: list[_Write]) -> None:
        probe = secrets.token_bytes(PROBE_BYTES)
        at = self._agent.probe_at

        def transfer(operation: str, local: int) -> Callable[[], bool]:
            def step() -> bool:
                local_list = self._agent.nixl.get_xfer_descs([(local, PROBE_BYTES, 0)], "DRAM")
                remote_list = self._agent.nixl.get_xfer_descs([(route.endpoint.probe_at, PROBE_BYTES, 0)], "DRAM")
                handle = self._agent.nixl.initialize_xfer(operation, local_list, remote_list, route.agent)
                route.num_probes += 1
                write = _Write(route, 0, handle)
                if self._agent.nixl.transfer(handle) == "ERR":
                    write.is_failed = True
                writes.append(write)
                return True

            return step

        def load() -> bool:
            self._load(route, metadata)
            self._agent.probe[:PROBE_BYTES] = probe
            self._agent.probe[PROBE_BYTES:] = bytes(PROBE_BYTES)
            return True

        def is_still() -> bool:
            return route.num_probes == 0

        def compare() -> bool:
            if self._agent.probe[PROBE_BYTES:] != probe:
                raise ConnectionError("other bytes came back than were sent")
            return True

        self._knock(route)
        route.steps.extend((lambda: self._is_let_in(route), load, transfer("WRITE", at), is_still))
        route.steps.extend((transfer("READ", at + PROBE_BYTES), is_still, compare))

    def _load(self, route: _Route, metadata: bytes) -> None:
        """Know the reader's agent. One that was known before is kept as it was: UCX leaves a socket open for each that
        is removed, and fails now and then for one that is added again at once."""
        route.key = (metadata, route.endpoint.pool_at, route.connect.num_pages)
        known = self._known.pop(route.key, None)
        if known is None:
            agent = self._agent.nixl.add_remote_agent(metadata)
            known = (agent, self._agent.page_list(agent, route.endpoint.pool_at, route.connect.num_pages))
        self._known[route.key] = known
        route.agent, route.pages = known
        in_use = [other.key for other in list(self._routes.values())]
        for key in [key for key in list(self._known)[:-MAX_KNOWN] if key not in in_use]:
            self._forget(key)

    def _forget(self, key: tuple[bytes, int, int]) -> None:
        agent, pages = self._known.pop(key, (None, None))
        if agent is not None:
            with contextlib.suppress(Exception):  # it may be gone, and then it is forgotten already
                pages.release()
                self._agent.nixl.remove_remote_agent(agent)
            self._closing_until = time.monotonic() + CLOSING_S

    def _knock(self, route: _Route) -> None:
        """Ask the reader, if it is on this host, to watch our process; and watch it."""
        endpoint = ENDPOINT.fullmatch(route.endpoint.door)
        if endpoint is None:
            return
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            door.connect(f"\0{endpoint[1]}")
            door.send(bytes.fromhex(endpoint[2]))
            route.pidfd = peer_pidfd(door)
        except OSError as error:
            door.close()
            log.info("%s is not on this host (%s): its pages are not fenced by our death", route.connect.name, error)
            return
        route.door = door

    def _is_let_in(self, route: _Route) -> bool:
        if route.door is None:
            return True
        try:
            if not route.door.recv(256):
                raise ConnectionError("it would not let us in: another token or user")
        except BlockingIOError:
            return False
        return True

    def _step(self, route: _Route) -> bool:
        """Go on attaching. True: it is over, one way or the other."""
        if route.is_detached:
            return True
        problem = ""
        try:
            with self._agent.lock:
                while route.steps and route.steps[0]():
                    route.steps.popleft()
            if route.steps and route.until <= time.monotonic():
                problem = f"no answer within {ATTACH_TIMEOUT_S:.0f} s"
        except Exception as error:  # NIXL's own errors have no common root
            problem = str(error) or type(error).__name__
        if route.steps and not problem:
            return False
        if problem:
            route.steps.clear()
            problem = f"nixl cannot reach decode node {route.connect.name}: {problem}"
        self._news.append(Attached(route.peer, route.connect.epoch, problem))
        self._say()
        return True

    # ---- writing ------------------------------------------------------------------------------------------------

    def _post(self, route: _Route, ticket: int, sources: list[int], targets: list[int], writes: list[_Write]) -> None:
        with self._lock:
            if route.is_detached:  # never begun
                route.num_open -= 1
                return
        if not sources:
            self._finish(_Write(route, ticket, None))
            return
        nixl = self._agent.nixl
        try:
            with self._agent.lock:
                handle = nixl.make_prepped_xfer("WRITE", self._sources, sources, route.pages, targets)
        except Exception as error:  # NIXL's own errors have no common root; nothing was begun
            with self._lock:
                route.num_open -= 1
            self._fail(route, str(error))
            return
        write = _Write(route, ticket, handle, len(sources))
        writes.append(write)
        try:
            with self._agent.lock:
                is_failed = nixl.transfer(handle) == "ERR"
        except Exception:
            is_failed = True
        if is_failed:
            self._mark_failed(write)

    def _is_over(self, write: _Write) -> bool:
        """Look after one write. A failed one is over when nobody is left whose memory it could reach."""
        if write.is_failed or write.route.is_reader_dead:
            if not write.route.is_reader_dead:
                return False
            try:
                with self._agent.lock:
                    write.handle.release()
            except Exception:  # still being called back
                return False
            self._fail(write.route, "its process has died")
            self._count_over(write)
            self._leave_if_still(write.route)
            return True
        try:
            with self._agent.lock:
                state = self._agent.nixl.check_xfer_state(write.handle)
        except Exception:
            state = "ERR"
        if state == "PROC":
            return False
        if state == "ERR":
            self._mark_failed(write)
            return False
        with contextlib.suppress(Exception), self._agent.lock:
            write.handle.release()
        self._finish(write)
        return True

    def _mark_failed(self, write: _Write) -> None:
        write.is_failed = True
        self._num_stuck += 1
        self._fail(write.route, "a transfer ended in an error")

    def _fail(self, route: _Route, why: str) -> None:
        if not route.is_gone and not route.is_detached:
            route.is_gone = True
            problem = f"the nixl connection to decode node {route.connect.name} broke: {why}"
            self._news.append(Attached(route.peer, route.connect.epoch, problem))
            self._say()

    def _count_over(self, write: _Write) -> None:
        if not write.ticket:
            write.route.num_probes -= 1
            return
        with self._lock:
            write.route.num_open -= 1

    def _finish(self, write: _Write) -> None:
        self._count_over(write)
        if write.ticket:
            self._num_bytes += write.num_pages * self.store.geometry.page_bytes
            self._done.append(write.ticket)
            self._say()
        self._leave_if_still(write.route)

    # ---- the end ------------------------------------------------------------------------------------------------

    def _leave_if_still(self, route: _Route) -> None:
        if route.is_detached:
            self._leave(route)
            self._say()

    def _leave(self, route: _Route) -> None:
        """Forget the peer, if nothing is under way; and tell it so."""
        with self._lock:
            if route.num_open or route.num_probes:
                return
        if route.is_gone or route.is_reader_dead:
            with self._agent.lock:
                self._forget(route.key)
        route.pages = route.agent = None
        if route.door is not None:
            with contextlib.suppress(OSError):
                route.door.send(DETACHED)
            route.door.close()
            route.door = None
        if route.pidfd >= 0:
            os.close(route.pidfd)
            route.pidfd = -1

    def _shut(self, writes: list[_Write]) -> None:
        for write in writes:
            with contextlib.suppress(Exception):
                write.handle.release()
        for key in list(self._known):
            self._forget(key)
        with contextlib.suppress(Exception):
            self._sources.release()
        with contextlib.suppress(Exception):
            self._agent.close()
