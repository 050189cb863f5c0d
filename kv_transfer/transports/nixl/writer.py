"""The prefill node's side of NIXL: load a peer's metadata, prove the way with a few bytes, then write pages by index.

A thread of its own looks after what is under way, and the loop never waits for it. But waking that thread and being
woken by it take a quarter of a millisecond, so the loop itself begins a write unless that would hold it for long. Over
a network it hardly ever does; between processes of one host UCX copies the pages there and then. How long it takes is
learnt from every write. See ``nixl`` for the whole story.
"""

import base64
import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from common.wire.messages import Connect
from kv_transfer.page_slices import Piece
from kv_transfer.transports.base import Attached, AttachError, PageStore, stage
from kv_transfer.transports.nixl.agent import Agent, Probe
from kv_transfer.transports.nixl.handshake import Attaching
from kv_transfer.transports.nixl.peer_state import Route, Write, opened
from kv_transfer.transports.shm.protocol import DETACHED

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 10.0
PAUSE_S = 50e-6
COPYING_S = 10e-6
LONG_S, LONG_PAUSE_S = 5.0, 0.02  # what has taken that long is looked at more rarely
STUCK_PAUSE_S = 1.0  # and what has failed as well, for the death of its reader
#: Beginning writes may hold the loop for so long, and then it asks what is done. A lone write of that length is as soon
#: over as it can be, and the engine has its next step already when pages are moved.
HOLD_S = 0.008
TELLING_BYTES = 1 << 20  # a write of fewer says little of how long a long one takes


class NixlWriter:
    """``WriterTransport`` of a prefill node, to be used within ``ChoosingWriter``, which waits where ``detach`` must.

    Args:
        key: the cluster's; what was not sealed with it is refused.
        is_direct: pages leave from the GPU's own memory.

    Raises:
        ConfigError: NIXL is not installed or does not work here, or not for this pool.
    """

    name = "nixl"
    names: Sequence[str] = ("nixl",)

    def __init__(self, store: PageStore, incarnation: str = "", *, key: bytes = b"", is_direct: bool = False) -> None:
        self.store = store
        self._key = key
        self._page_bytes, self._is_staged = store.geometry.page_bytes, not (store.is_mapped or is_direct)
        probe = Probe(store, is_direct=is_direct)
        self._agent = Agent(store, f"prefill-{incarnation}-{secrets.token_hex(4)}", probe)
        self._sources = self._agent.page_list("NIXL_INIT_AGENT", self._agent.pool, store.num_pages, self._page_bytes)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._routes: dict[str, Route] = {}
        self._leaving: dict[str, Route] = {}  # detached from, with writes under way
        self._jobs: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._news: deque[Attached] = deque()
        self._done: deque[int] = deque()
        self._spent: deque[Any] = deque()  # handles of writes that are over
        self._lock = threading.Lock()  # of routes' is_detached and num_open
        self._num_tickets = 0
        self._may_hold_s = HOLD_S  # the loop, until it asks what is done
        self._num_bytes = self._num_bytes_here = 0  # written; by the thread and by the loop itself
        self._num_stuck = 0
        self._is_copying = False
        self._attaching = Attaching(self._agent, lambda: [route.key for route in list(self._routes.values())])
        self._thread = threading.Thread(target=self._run, name="nixl-send", daemon=True)
        self._thread.start()

    # ---- called by the loop -------------------------------------------------------------------------------------

    def attach(self, peer: str, connect: Connect) -> None:
        assert peer not in self._routes and peer not in self._leaving, "detach first"
        try:
            endpoint = opened(connect.endpoint, self._key)
            metadata = base64.b64decode(endpoint.agent, validate=True)
        except ValueError as error:
            raise AttachError(f"{connect.name} offers an endpoint that nixl does not understand: {error}") from error
        route = Route(peer, connect, endpoint, ATTACH_TIMEOUT_S)
        self._routes[peer] = route
        self._jobs.put(("attach", route, metadata))

    def poll(self) -> list[Attached]:
        self._calm()
        self._sweep(is_patient=False)
        news = [self._news.popleft() for _ in range(len(self._news))]
        return [a for a in news if a.peer in self._routes and self._routes[a.peer].connect.epoch == a.epoch]

    def write(self, peer: str, pages: Sequence[tuple[int, int]], piece: Piece | None = None) -> int:
        route = self._routes[peer]
        if self._is_staged:
            stage(self.store, [source for source, _ in pages])
        self._num_tickets += 1
        num_bytes = len(pages) * (self._page_bytes if piece is None else piece.num_bytes)
        write = Write(route, self._num_tickets, None, num_bytes)
        if not self._write_here(write, pages, piece):
            with self._lock:
                route.num_open += 1
            self._jobs.put(("write", write, pages, piece))
        return write.ticket

    def _write_here(self, write: Write, pages: Sequence[tuple[int, int]], piece: Piece | None) -> bool:
        """Begin to write without waking the thread; what is not over at once is its business. False: it shall try. A
        copy pushes all that Python needs out of the caches, so what follows upon it is kept short."""
        route = write.route
        expected_s = write.num_bytes * route.s_per_byte
        if not pages or expected_s > self._may_hold_s or not self._agent.lock.acquire(blocking=False):
            return False
        try:
            write.handle = self._agent.prepare(self._sources, route, pages, piece)
        except Exception:  # nothing was begun; the thread will meet it, too
            return False
        else:
            state = self._transfer(write)
        finally:
            self._agent.lock.release()
        self._may_hold_s -= expected_s
        if state == "DONE":  # who has called this will ask what is done, without being told to
            self._num_bytes_here += write.num_bytes
            self._done.append(write.ticket)
            self._spent.append(write.handle)
            return True
        with self._lock:
            route.num_open += 1
        if state == "ERR":
            self._mark_failed(write)
        self._jobs.put(("watch", write))
        return True

    def done(self) -> list[int]:
        self._may_hold_s = HOLD_S
        if not self._done:  # else what woke us, if anything, is read the next time
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
                self._done.extend(leaving.failed)
                leaving.failed.clear()
                return False
        del self._leaving[peer]
        return True

    def voided(self, peer: str, endpoint: str) -> None:
        leaving = self._leaving.get(peer)
        if leaving is None:
            return
        with contextlib.suppress(ValueError):
            if leaving.connect.epoch <= opened(endpoint, self._key).voided:
                leaving.is_void = True
                self._jobs.put(("look",))

    def counters(self) -> dict[str, float]:
        num_bytes = self._num_bytes + self._num_bytes_here
        return {"bytes_by_nixl": float(num_bytes), "stuck_writes": float(self._num_stuck)}

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
        attaching: list[Route] = []
        writes: list[Write] = []
        while True:
            try:
                job = self._jobs.get(timeout=self._pause(attaching, writes))
            except queue.Empty:
                job = ()
            if job is None:
                break
            if self._attaching.closing_until > time.monotonic():
                with self._agent.lock:
                    self._agent.nixl.get_new_notifs()
            if job and job[0] == "attach":
                self._attaching.begin(job[1], job[2], writes)
                attaching.append(job[1])
            elif job and job[0] == "write":
                writes += filter(None, [self._post(*job[1:])])
            elif job and job[0] == "watch":
                writes.append(job[1])
            elif job and job[0] == "detach":
                self._leave(job[1])
            attaching = [route for route in attaching if not self._has_attached(route)]
            looked_at = time.monotonic()
            over = [write for write in writes if self._is_over(write)]
            # Between processes of one host UCX copies while it is asked; elsewhere asking costs next to nothing.
            self._is_copying = bool(writes) and time.monotonic() - looked_at > COPYING_S
            for write in over:
                writes.remove(write)
            self._sweep()
        self._shut(writes)

    def _pause(self, attaching: list[Route], writes: list[Write]) -> float | None:
        """How long to wait for a job: not long while something is about to happen."""
        now = time.monotonic()
        new = [write for write in writes if write.begun_at + LONG_S > now]
        if attaching or any(not write.is_failed for write in new):
            return 0.0 if self._is_copying else PAUSE_S
        if new or self._attaching.closing_until > now or any(not write.is_failed for write in writes):
            return LONG_PAUSE_S
        return STUCK_PAUSE_S if writes else None

    def _say(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _has_attached(self, route: Route) -> bool:
        """Go on attaching. True: it is over, one way or the other."""
        if route.is_detached:
            return True
        problem = self._attaching.step(route)
        if problem is None:
            return False
        self._news.append(Attached(route.peer, route.connect.epoch, problem))
        self._say()
        return True

    # ---- writing ------------------------------------------------------------------------------------------------

    def _post(self, write: Write, pages: Sequence[tuple[int, int]], piece: Piece | None) -> Write | None:
        """Begin to write. None: it is over already; else what has begun is to be looked after."""
        route = write.route
        if route.is_detached:  # never begun
            self._count_over(write)
            self._leave_if_still(route)
            return None
        if not pages:
            self._finish(write)
            return None
        try:
            with self._agent.lock:
                write.handle = self._agent.prepare(self._sources, route, pages, piece)
        except Exception as error:  # NIXL's own errors have no common root; nothing was begun
            self._fail(route, str(error))
            self._count_over(write)
            self._leave_if_still(route)
            return None
        with self._agent.lock:
            state = self._transfer(write)
        if state == "DONE":
            self._end(write)
            return None
        if state == "ERR":
            self._mark_failed(write)
        return write

    def _transfer(self, write: Write) -> str:
        """Begin, and learn how long that takes. Some of it may have begun even if this says ERR."""
        begun_at = time.perf_counter()
        try:
            state = str(self._agent.nixl.transfer(write.handle))
        except Exception:  # NIXL's own errors have no common root
            return "ERR"
        if write.num_bytes >= TELLING_BYTES:
            write.route.s_per_byte = (time.perf_counter() - begun_at) / write.num_bytes
        return state

    def _is_over(self, write: Write) -> bool:
        """Look after one write. A failed one is over when nobody is left whose memory it could reach."""
        is_harmless = write.route.is_void or write.route.is_reader_dead
        if write.is_failed or is_harmless:
            if not is_harmless:
                return False
            try:
                with self._agent.lock:
                    write.handle.release()
            except Exception:  # still being called back
                return False
            self._fail(write.route, "its process has died")  # says nothing of one that was detached from
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
        self._end(write)
        return True

    def _end(self, write: Write) -> None:
        """NIXL says that it is done. Who waits for that hears of it first."""
        self._finish(write)
        self._spent.append(write.handle)

    def _sweep(self, *, is_patient: bool = True) -> None:
        """Give back what handles of writes that are over hold, though not if NIXL is busy and this is not patient."""
        if self._spent and self._agent.lock.acquire(blocking=is_patient):
            while self._spent:
                with contextlib.suppress(Exception):
                    self._spent.popleft().release()
            self._agent.lock.release()

    def _mark_failed(self, write: Write) -> None:
        write.is_failed = True
        self._num_stuck += 1
        self._fail(write.route, "a transfer ended in an error")

    def _fail(self, route: Route, why: str) -> None:
        if not route.is_gone and not route.is_detached:
            route.is_gone = True
            problem = f"the nixl connection to decode node {route.connect.name} broke: {why}"
            self._news.append(Attached(route.peer, route.connect.epoch, problem))
            self._say()

    def _count_over(self, write: Write, *, is_written: bool = False) -> None:
        """Nothing of it is under way any more. One that came to nothing has failed with its pair, but for those of a
        pair that was let go of before: their tickets are waited for, whatever became of them."""
        if not write.ticket:
            write.route.num_probes -= 1
            return
        with self._lock:
            is_told = is_written or write.route.is_detached
            (self._done if is_told else write.route.failed).append(write.ticket)
            write.route.num_open -= 1
        self._say()

    def _finish(self, write: Write) -> None:
        self._num_bytes += write.num_bytes
        self._count_over(write, is_written=True)
        self._leave_if_still(write.route)

    # ---- the end ------------------------------------------------------------------------------------------------

    def _leave_if_still(self, route: Route) -> None:
        if route.is_detached:
            self._leave(route)
            self._say()

    def _leave(self, route: Route) -> None:
        """Forget the peer, if nothing is under way; and tell it so."""
        with self._lock:
            if route.num_open or route.num_probes:
                return
        if route.is_gone or route.is_void or route.is_reader_dead:
            with self._agent.lock:
                self._attaching.forget(route.key)
        route.pages = route.agent = None
        if route.door is not None:
            with contextlib.suppress(OSError):
                route.door.send(DETACHED)
        route.hang_up()

    def _shut(self, writes: list[Write]) -> None:
        for write in writes:
            with contextlib.suppress(Exception):
                write.handle.release()
            write.route.hang_up()
        self._sweep()
        self._attaching.forget_all()
        with contextlib.suppress(Exception):
            self._sources.release()
        with contextlib.suppress(Exception):
            self._agent.close()
