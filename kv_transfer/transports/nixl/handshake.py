"""How NIXL's writer attaches to a reader: ask to be watched, load the reader's agent, write a few bytes and read them
back.

All of this runs in the writer's thread.
"""

import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from kv_transfer.transports.nixl.agent import PROBE_BYTES, Agent
from kv_transfer.transports.nixl.peer_state import PeerState, Write, host_id
from kv_transfer.transports.shm.protocol import ENDPOINT
from kv_transfer.transports.shm.reader import peer_pidfd

log = logging.getLogger(__name__)

REJECTED = "it rejected us: another token or user"
MAX_KNOWN = 256
CLOSING_S = 1.0  # UCX must be called for so long to close what has been dropped


class Handshake:
    """The steps of every attachment, and the agents of readers that are known.

    Args:
        in_use: keys of peers whose agents must stay known.
    """

    def __init__(self, agent: Agent, in_use: Callable[[], list[tuple[bytes, int, int]]]) -> None:
        self.closing_until = 0.0
        self._agent = agent
        self._in_use = in_use
        #: Agents of readers, and descriptors of their pages.
        self._known: dict[tuple[bytes, int, int], tuple[Any, Any]] = {}

    def begin(self, peer_state: PeerState, metadata: bytes, writes: list[Write]) -> None:
        """Lay out the steps of an attachment; they append the probes that they write and read to ``writes``."""
        peer_state.steps = self._steps(peer_state, metadata, writes)

    def _steps(self, peer_state: PeerState, metadata: bytes, writes: list[Write]) -> Iterator[None]:
        """Attach step by step; yields where the next step cannot be made yet."""
        probe, room = secrets.token_bytes(PROBE_BYTES), self._agent.probe
        while not request_watch(peer_state):
            yield
        while not self._is_admitted(peer_state):
            yield
        while (area := room.take()) is None:
            yield
        peer_state.probe_area = area
        self._load(peer_state, metadata)
        room.put(area, probe)
        for operation, ours in (("WRITE", room.outgoing(area)), ("READ", room.incoming(area))):
            self._begin_probe(peer_state, operation, ours, writes)
            while peer_state.num_probes:
                yield
        if room.came_back(area) != probe:
            raise ConnectionError("the bytes that came back are not those that were sent")

    def _begin_probe(
        self, peer_state: PeerState, operation: str, ours: tuple[int, int, int], writes: list[Write]
    ) -> None:
        nixl, there = self._agent.nixl, peer_state.endpoint.probe
        local = nixl.get_xfer_descs([ours], self._agent.probe.region.kind)
        remote = nixl.get_xfer_descs([there.run(0, PROBE_BYTES)], there.kind)
        write = Write(peer_state, 0, nixl.initialize_xfer(operation, local, remote, peer_state.agent))
        peer_state.num_probes += 1
        writes.append(write)
        write.is_failed = peer_state.is_gone = True  # where the connection is broken, NIXL raises an error now
        write.is_failed = peer_state.is_gone = nixl.transfer(write.handle) == "ERR"

    def _load(self, peer_state: PeerState, metadata: bytes) -> None:
        """Load the reader's agent.

        An agent that is known already is kept as it is: UCX leaves a socket open for each agent that is removed, and
        sometimes fails for one that is added again at once.
        """
        peer_state.key = (metadata, peer_state.endpoint.pool_at, peer_state.connect.num_pages)
        known = self._known.pop(peer_state.key, None)
        if known is None:
            agent = self._agent.nixl.add_remote_agent(metadata)
            size = peer_state.connect.layout.layout().page_bytes
            known = (agent, self._agent.page_list(agent, peer_state.endpoint.pool, peer_state.connect.num_pages, size))
        self._known[peer_state.key] = known
        peer_state.agent, peer_state.pages = known
        in_use = self._in_use()
        for key in [key for key in list(self._known)[:-MAX_KNOWN] if key not in in_use]:
            self.forget(key)

    def forget(self, key: tuple[bytes, int, int]) -> None:
        agent, pages = self._known.pop(key, (None, None))
        if agent is not None:
            with contextlib.suppress(Exception):  # an agent that is gone has been dropped already
                pages.release()
                self._agent.nixl.remove_remote_agent(agent)
            self.closing_until = time.monotonic() + CLOSING_S

    def _is_admitted(self, peer_state: PeerState) -> bool:
        if peer_state.watch_socket is None:
            return True
        try:
            word = peer_state.watch_socket.recv(256)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionError(REJECTED) from error
        if not word:
            raise ConnectionError(REJECTED)
        return True

    def step(self, peer_state: PeerState) -> str | None:
        """Go on with an attachment; return None while it is not over, then its problem, or an empty string."""
        assert peer_state.steps is not None
        problem, is_over = "", None
        try:
            with self._agent.lock:
                is_over = next(peer_state.steps, True)
            if not is_over and peer_state.until <= time.monotonic():
                problem = f"no answer within {peer_state.patience_s:.0f} s"
        except Exception as error:  # NIXL's own errors have no common root
            problem = str(error) or type(error).__name__
        if problem:
            return f"nixl cannot reach decode node {peer_state.connect.name}: {problem}"
        return "" if is_over else None

    def end(self, peer_state: PeerState) -> None:
        """No further step of this attachment is made."""
        peer_state.steps = None
        self.give_back_area(peer_state)

    def give_back_area(self, peer_state: PeerState) -> None:
        """Let another attachment use the peer's probe area, unless this one goes on or has probes under way."""
        if peer_state.probe_area >= 0 and not peer_state.num_probes and peer_state.steps is None:
            self._agent.probe.give_back(peer_state.probe_area)
            peer_state.probe_area = -1

    def close(self) -> None:
        for key in list(self._known):
            self.forget(key)


def request_watch(peer_state: PeerState) -> bool:
    """Ask a reader on this host to watch our process, and watch it.

    Returns:
        False if the reader cannot accept the connection yet.

    Raises:
        ConnectionError: the reader is on this host and rejects us, or cannot be asked. UCX would find a way into
            its memory that nothing fences: not the reader, as it does across a network, and not our death, of which
            it would not learn.
    """
    endpoint = ENDPOINT.fullmatch(peer_state.endpoint.watch_address)
    if endpoint is None:
        _require_another_host(peer_state, "its offer has no watch address")
        return True
    try:
        watch_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    except OSError as error:  # this process has no descriptor left
        raise ConnectionError(f"this prefill node cannot open a socket ({error.strerror})") from error
    try:
        watch_socket.connect(f"\0{endpoint[1]}")
    except BlockingIOError:  # its backlog is full
        watch_socket.close()
        return False
    except OSError as error:
        watch_socket.close()
        _require_another_host(peer_state, str(error))
        log.info("%s is on another host (%s): if we die, its pages stay in quarantine", peer_state.connect.name, error)
        return True
    try:
        watch_socket.send(bytes.fromhex(endpoint[2]))
        peer_state.pidfd = peer_pidfd(watch_socket)
    except OSError as error:  # closed already
        watch_socket.close()
        raise ConnectionError(REJECTED) from error
    peer_state.watch_socket = watch_socket
    return True


def _require_another_host(peer_state: PeerState, why: str) -> None:
    if peer_state.endpoint.host == host_id():
        raise ConnectionError(f"it is on this host, but in another network namespace ({why}): share one, or use tcp")
