"""The prefill node's side of NIXL: load a peer's metadata, probe the way with a few bytes, then write pages by index.

A thread of its own looks after writes under way, and the loop never waits for it. But waking that thread and being
woken by it takes a quarter of a millisecond, so the loop itself begins a write unless that would hold it for long. Over
a network it hardly ever does; between processes of one host UCX copies the pages there and then. The time that this
takes is learnt from every large write.
"""

import base64
import contextlib
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from common.config.shared import UCX
from common.wire.messages import Connect
from kv_transfer.page_slices import SlicePair
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import Attached, AttachError, WriterTransport, stage
from kv_transfer.transports.nixl.agent import CLOSE_TIMEOUT_S, Agent, ProbeMemory, is_of_agent
from kv_transfer.transports.nixl.handshake import Handshake
from kv_transfer.transports.nixl.peer_state import PeerState, Write, opened
from kv_transfer.transports.shm.protocol import DETACHED
from kv_transfer.transports.silence import LATE_S, LOOK_PAUSE_S, ConnectionInfo, shut_silent
from kv_transfer.transports.threads import start_thread

log = logging.getLogger(__name__)

#: Pages of the largest pool to which this writes. NIXL keeps a descriptor of 32 bytes for each, and making them takes
#: several times as much: a node that says it has more would make this process run out of memory.
MAX_PAGES = 1 << 24
ATTACH_TIMEOUT_S = 10.0
OVERDUE_S = 5.0  # past its timeout, an attachment has failed even if the thread does not say so
STALLED_S = 10.0  # a turn of the thread that has taken so long waits for a call to NIXL that does not return
PAUSE_S = 50e-6
COPYING_S = 10e-6
LONG_S, LONG_PAUSE_S = 5.0, 0.02  # a write that has taken so long is checked more rarely
SEARCH_PAUSES = 20  # pauses between searches for silent connections are so many times as long as a search
STUCK_PAUSE_S = 1.0  # a failed write is checked so often, for the death of its reader
#: Seconds for which beginning writes may hold the loop between two calls of ``done``. A single write of that length
#: ends as early as it can, and the engine already has its next step when pages are moved.
HOLD_S = 0.008
MIN_MEASURED_BYTES = 1 << 20  # shorter writes say little about how long a large one takes


class NixlWriter(WriterTransport):
    """``WriterTransport`` of a prefill node, for use in ``NegotiatingWriter``, which waits where ``detach`` must.

    Args:
        key: the cluster's; offers that were not sealed with it are refused.
        is_direct: pages leave from the GPU's own memory.
        backend: of NIXL; that of the reader must be the same.

    Raises:
        ConfigError: NIXL is not installed or does not work here, or not for this pool.
        OSError: this process may have no further thread.
    """

    name = "nixl"

    def __init__(
        self,
        store: PageStore,
        incarnation: str = "",
        *,
        key: bytes = b"",
        is_direct: bool = False,
        backend: str = UCX,
    ) -> None:
        self._backend = backend
        self.store = store
        self._key = key
        self._page_bytes, self._is_staged = store.layout.page_bytes, not (store.is_mapped or is_direct)
        probe = ProbeMemory(store, is_direct=is_direct)
        self._agent = Agent(store, f"prefill-{incarnation}-{secrets.token_hex(4)}", probe, backend)
        self._sources = self._agent.page_list("NIXL_INIT_AGENT", self._agent.pool, store.num_pages, self._page_bytes)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._peers: dict[str, PeerState] = {}
        self._leaving: dict[str, PeerState] = {}  # detached peers with writes under way
        # Not a SimpleQueue: before Python 3.13, its ``get`` may block for good if its timeout has passed too early.
        self._jobs: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
        self._news: deque[Attached] = deque()
        self._done: deque[int] = deque()
        self._late: deque[str] = deque()  # peers whose writes take long, for ``late``
        self._spent: deque[Any] = deque()  # handles of writes that are over, to be released
        self._lock = threading.Lock()  # guards is_detached and num_open of peers
        self._num_tickets = 0
        self._hold_budget_s = HOLD_S  # for which writes may still hold the loop before the next call of done
        self._num_bytes = self._num_bytes_here = 0  # written by the thread and by the loop itself
        self._num_stuck = 0
        self._is_copying = False
        self._metadata = base64.b64decode(self._agent.metadata)
        self._search_at = 0.0  # when silent connections are searched again
        self._turn_began_at = math.inf  # of the thread; infinite while it waits for a job
        self._handshake = Handshake(self._agent, lambda: [peer_state.key for peer_state in list(self._peers.values())])
        self._thread = threading.Thread(target=self._run, name="nixl-send", daemon=True)
        start_thread(self._thread)

    # ---- called by the loop -------------------------------------------------------------------------------------

    def attach(self, peer: str, connect: Connect) -> None:
        assert peer not in self._peers and peer not in self._leaving, "detach first"
        try:
            endpoint = opened(connect.endpoint, self._key)
            metadata = base64.b64decode(endpoint.agent, validate=True)
            if endpoint.backend != self._backend:
                raise ValueError(f"it has --nixl-backend {endpoint.backend}, and this prefill node {self._backend}")
        except ValueError as error:
            raise AttachError(f"the endpoint offered by {connect.name} is not one of nixl: {error}") from error
        if connect.num_pages > MAX_PAGES:
            raise AttachError(
                f"num_pages of {connect.name} is {connect.num_pages}, and nixl takes at most {MAX_PAGES}: "
                "give it a larger --page-size, or use --transport tcp"
            )
        peer_state = PeerState(peer, connect, endpoint, ATTACH_TIMEOUT_S)
        self._peers[peer] = peer_state
        self._jobs.put(("attach", peer_state, metadata))

    def poll(self) -> list[Attached]:
        self._clear_wake()
        self._sweep(is_patient=False)
        self._give_up_stalled(time.monotonic())
        news = [self._news.popleft() for _ in range(len(self._news))]
        news += self._overdue(time.monotonic())
        return [a for a in news if a.peer in self._peers and self._peers[a.peer].connect.epoch == a.epoch]

    def _overdue(self, now: float) -> list[Attached]:
        """Attachments without an answer from the thread, which a call to NIXL holds. They have failed, so that another
        transport is tried.
        """
        overdue = [state for state in self._peers.values() if not state.has_answer and state.until + OVERDUE_S <= now]
        for state in overdue:
            state.has_answer = True
        problem = "nixl cannot reach decode node {}: a call to it does not return"
        return [Attached(state.peer, state.connect.epoch, problem.format(state.connect.name)) for state in overdue]

    def _give_up_stalled(self, now: float) -> None:
        """Report the pairs whose writes wait for a call to NIXL that does not return.

        Requests then go to other nodes. The pair gets no other transport, since these writes may still be under way.
        """
        if self._turn_began_at + STALLED_S <= now:
            for peer_state in list(self._peers.values()):
                if peer_state.num_open:
                    self._fail(peer_state, "a call to it does not return")

    def write(self, peer: str, pages: Sequence[tuple[int, int]], slices: SlicePair | None = None) -> int:
        peer_state = self._peers[peer]
        if self._is_staged:
            stage(self.store, [source for source, _ in pages])
        self._num_tickets += 1
        num_bytes = len(pages) * (self._page_bytes if slices is None else slices.num_bytes)
        write = Write(peer_state, self._num_tickets, None, num_bytes)
        if not self._write_here(write, pages, slices):
            with self._lock:
                peer_state.num_open += 1
            self._jobs.put(("write", write, pages, slices))
        return write.ticket

    def _write_here(self, write: Write, pages: Sequence[tuple[int, int]], slices: SlicePair | None) -> bool:
        """Begin to write without waking the thread, which looks after the write unless it is over at once.

        A copy evicts everything that Python needs from the CPU's caches, so little work follows it. False: the thread
        should begin the write.
        """
        peer_state = write.peer_state
        expected_s = write.num_bytes * peer_state.s_per_byte
        if not pages or expected_s > self._hold_budget_s or not self._agent.lock.acquire(blocking=False):
            return False
        try:
            write.handle = self._agent.prepare(self._sources, peer_state, pages, slices)
        except Exception:  # nothing was begun; the thread will meet the same error
            return False
        else:
            state = self._transfer(write)
        finally:
            self._agent.lock.release()
        self._hold_budget_s -= expected_s
        if state == "DONE":  # the caller asks what is done next, without being woken
            self._num_bytes_here += write.num_bytes
            self._done.append(write.ticket)
            self._spent.append(write.handle)
            return True
        with self._lock:
            peer_state.num_open += 1
        if state == "ERR":
            self._mark_failed(write)
        self._jobs.put(("watch", write))
        return True

    def done(self) -> list[int]:
        self._hold_budget_s = HOLD_S
        if not self._done:  # otherwise a wake-up, if there is one, is read the next time
            self._clear_wake()
        return [self._done.popleft() for _ in range(len(self._done))]

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def detach(self, peer: str) -> bool:
        peer_state = self._peers.pop(peer, None)
        if peer_state is not None:
            with self._lock:
                peer_state.is_detached = True
            self._leaving[peer] = peer_state
            self._jobs.put(("detach", peer_state))
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

    def late(self) -> list[str]:
        return list(dict.fromkeys(self._late.popleft() for _ in range(len(self._late))))

    def voided(self, peer: str, endpoint: str) -> None:
        leaving = self._leaving.get(peer)
        if leaving is None:
            return
        with contextlib.suppress(ValueError):
            if leaving.connect.epoch <= opened(endpoint, self._key).voided:
                leaving.is_voided = True
                self._jobs.put(("look",))

    def counters(self) -> dict[str, float]:
        num_bytes = self._num_bytes + self._num_bytes_here
        return {"bytes_by_nixl": float(num_bytes), "stuck_writes": float(self._num_stuck)}

    def files(self) -> Sequence[int]:
        return () if self._wake < 0 else (self._wake,)

    def close(self) -> None:
        if self._wake < 0:
            return
        for peer in list(self._peers):
            self.detach(peer)
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("a call to nixl does not return: its connections stay open until the process ends")
        wake, self._wake = self._wake, -1
        os.close(wake)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Make every call to NIXL but those of ``_write_here`` and of ``_sweep`` in ``poll``."""
        self._agent.probe.enter_context()
        attaching: list[PeerState] = []
        writes: list[Write] = []
        while True:
            self._turn_began_at = math.inf
            try:
                job = self._jobs.get(timeout=self._pause(attaching, writes))
            except queue.Empty:
                job = ()
            self._turn_began_at = time.monotonic()
            if job is None:
                break
            if self._handshake.closing_until > time.monotonic():
                self._agent.progress()
            if job and job[0] == "attach":
                self._handshake.begin(job[1], job[2], writes)
                attaching.append(job[1])
            elif job and job[0] == "write":
                writes += filter(None, [self._post(*job[1:])])
            elif job and job[0] == "watch":
                writes.append(job[1])
            elif job and job[0] == "detach":
                self._release(job[1])
            attaching = [peer_state for peer_state in attaching if not self._has_attached(peer_state)]
            looked_at = time.monotonic()
            over = [write for write in writes if self._is_over(write)]
            # Between processes of one host UCX copies during this check; elsewhere the check costs next to nothing.
            self._is_copying = bool(writes) and time.monotonic() - looked_at > COPYING_S
            for write in over:
                writes.remove(write)
            self._shut_silent(writes)
            self._sweep()
        self._shut(writes)

    def _shut_silent(self, writes: list[Write]) -> None:
        """Have UCX report an error for writes whose packets vanish (``silence``)."""
        now = time.monotonic()
        if not writes or self._search_at > now:
            return
        late = [write for write in writes if not write.is_failed and write.begun_at + LATE_S <= now]
        oldest = {write.peer_state: write for write in sorted(late, key=lambda write: -write.begun_at)}
        for peer_state, write in oldest.items():
            self._late.append(peer_state.peer)
            if num_shut := shut_silent(self._is_of(peer_state), now - write.begun_at):
                name = peer_state.connect.name
                log.warning("%d nixl connections to decode node %s are silent, and are shut down", num_shut, name)
        if oldest:
            self._wake_loop()
        ended_at = time.monotonic()
        self._search_at = ended_at + max(LOOK_PAUSE_S, SEARCH_PAUSES * (ended_at - now))

    def _is_of(self, peer_state: PeerState) -> Callable[[ConnectionInfo], bool]:
        """Whether a connection is one of UCX to this peer."""
        return lambda connection: is_of_agent(connection, peer_state.key[0], self._metadata)

    def _pause(self, attaching: list[PeerState], writes: list[Write]) -> float | None:
        """Seconds to wait for a job: few while something is about to happen; None: until one comes."""
        now = time.monotonic()
        new = [write for write in writes if write.begun_at + LONG_S > now]
        if attaching or any(not write.is_failed for write in new):
            return 0.0 if self._is_copying else PAUSE_S
        if new or self._handshake.closing_until > now or any(not write.is_failed for write in writes):
            return LONG_PAUSE_S
        return STUCK_PAUSE_S if writes else None

    def _wake_loop(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _has_attached(self, peer_state: PeerState) -> bool:
        """Go on attaching; return whether that is over, one way or the other."""
        if peer_state.is_detached:
            self._handshake.end(peer_state)
            return True
        problem = self._handshake.step(peer_state)
        if problem is None:
            return False
        self._handshake.end(peer_state)
        peer_state.has_answer = True
        self._news.append(Attached(peer_state.peer, peer_state.connect.epoch, problem))
        self._wake_loop()
        return True

    def _post(self, write: Write, pages: Sequence[tuple[int, int]], slices: SlicePair | None) -> Write | None:
        """Begin to write; return the write unless it is over already."""
        peer_state = write.peer_state
        if peer_state.is_detached:  # never begun
            self._count_over(write)
            self._release_if_idle(peer_state)
            return None
        if not pages:
            self._finish(write)
            return None
        try:
            with self._agent.lock:
                write.handle = self._agent.prepare(self._sources, peer_state, pages, slices)
        except Exception as error:  # NIXL's own errors have no common root; nothing was begun
            self._fail(peer_state, str(error))
            self._count_over(write)
            self._release_if_idle(peer_state)
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
        """Begin a write and measure how long that takes. Some of it may have begun even if this returns ERR."""
        begun_at = time.perf_counter()
        try:
            state = str(self._agent.nixl.transfer(write.handle))
        except Exception:  # NIXL's own errors have no common root
            return "ERR"
        if write.num_bytes >= MIN_MEASURED_BYTES:
            write.peer_state.s_per_byte = (time.perf_counter() - begun_at) / write.num_bytes
        return state

    def _is_over(self, write: Write) -> bool:
        """Look after one write. A failed write is over when no reader is left whose memory it could reach; a failed
        probe, which reaches no page, when its peer is detached.
        """
        is_unused_probe = not write.ticket and write.peer_state.is_detached
        is_harmless = write.peer_state.is_voided or write.peer_state.is_reader_dead
        if write.is_failed or is_harmless:
            if not (is_harmless or is_unused_probe):
                return False
            try:
                with self._agent.lock:
                    write.handle.release()
            except Exception:  # still being called back
                return False
            self._fail(write.peer_state, "its process has died")  # has no effect on a peer that was detached
            self._count_over(write)
            self._release_if_idle(write.peer_state)
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
        """NIXL says that the write is done. It is reported first, and its handle is released later."""
        self._finish(write)
        self._spent.append(write.handle)

    def _sweep(self, *, is_patient: bool = True) -> None:
        """Release the handles of writes that are over; if NIXL is busy, only when ``is_patient``."""
        if self._spent and self._agent.lock.acquire(blocking=is_patient):
            while self._spent:
                with contextlib.suppress(Exception):
                    self._spent.popleft().release()
            self._agent.lock.release()

    def _mark_failed(self, write: Write) -> None:
        write.is_failed = True
        self._num_stuck += 1
        self._fail(write.peer_state, "a transfer ended in an error")

    def _fail(self, peer_state: PeerState, why: str) -> None:
        if not peer_state.is_gone and not peer_state.is_detached:
            peer_state.is_gone = True
            problem = f"the nixl connection to decode node {peer_state.connect.name} broke: {why}"
            self._news.append(Attached(peer_state.peer, peer_state.connect.epoch, problem))
            self._wake_loop()

    def _count_over(self, write: Write, *, is_written: bool = False) -> None:
        """Nothing of a write is under way any more.

        A write that failed has failed with its pair, except for a pair that was detached before: its tickets are waited
        for, whatever became of them.
        """
        if not write.ticket:
            write.peer_state.num_probes -= 1
            self._handshake.give_back_area(write.peer_state)
            return
        with self._lock:
            is_told = is_written or write.peer_state.is_detached
            (self._done if is_told else write.peer_state.failed).append(write.ticket)
            write.peer_state.num_open -= 1
        self._wake_loop()

    def _finish(self, write: Write) -> None:
        self._num_bytes += write.num_bytes
        self._count_over(write, is_written=True)
        self._release_if_idle(write.peer_state)

    def _release_if_idle(self, peer_state: PeerState) -> None:
        if peer_state.is_detached:
            self._release(peer_state)
            self._wake_loop()

    def _release(self, peer_state: PeerState) -> None:
        """Drop the peer if nothing is under way, and tell it so."""
        with self._lock:
            if peer_state.num_open or peer_state.num_probes:
                return
        if peer_state.is_gone or peer_state.is_voided or peer_state.is_reader_dead:
            with self._agent.lock:
                self._handshake.forget(peer_state.key)
        peer_state.pages = peer_state.agent = None
        if peer_state.watch_socket is not None:
            with contextlib.suppress(OSError):
                peer_state.watch_socket.send(DETACHED)
        peer_state.close_watch()

    def _shut(self, writes: list[Write]) -> None:
        for write in writes:
            with contextlib.suppress(Exception):
                write.handle.release()
            write.peer_state.close_watch()
        self._sweep()
        self._handshake.close()
        with contextlib.suppress(Exception):
            self._sources.release()
        with contextlib.suppress(Exception):
            self._agent.close()
