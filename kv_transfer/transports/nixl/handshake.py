"""How NIXL's writer gets to know a reader: ask to be watched, load its agent, write a few bytes and read them back.

Everything here is called in the writer's own thread. See ``nixl`` for the whole story.
"""

import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from kv_transfer.transports.base import from_message
from kv_transfer.transports.nixl.agent import PROBE_BYTES, Agent
from kv_transfer.transports.nixl.peer_state import Route, Write, host_id
from kv_transfer.transports.shm.protocol import ENDPOINT
from kv_transfer.transports.shm.reader import peer_pidfd

log = logging.getLogger(__name__)

TURNED_AWAY = "it would not let us in: another token or user"
MAX_KNOWN = 256
CLOSING_S = 1.0  # UCX needs to be called for so long to close what has been let go


class Attaching:
    """Args:
    in_use: keys of routes whose agents must stay known.
    """

    def __init__(self, agent: Agent, in_use: Callable[[], list[tuple[bytes, int, int]]]) -> None:
        self.closing_until = 0.0
        self._agent = agent
        self._in_use = in_use
        self._known: dict[tuple[bytes, int, int], tuple[Any, Any]] = {}  # agents of readers, and their pages

    def begin(self, route: Route, metadata: bytes, writes: list[Write]) -> None:
        """Lay out the steps; those that transfer add to ``writes``."""
        probe = secrets.token_bytes(PROBE_BYTES)
        here, there = self._agent.probe.region, route.endpoint.probe

        def transfer(operation: str, offset: int) -> Callable[[], bool]:
            def step() -> bool:
                local_list = self._agent.nixl.get_xfer_descs([here.run(offset, PROBE_BYTES)], here.kind)
                remote_list = self._agent.nixl.get_xfer_descs([there.run(0, PROBE_BYTES)], there.kind)
                handle = self._agent.nixl.initialize_xfer(operation, local_list, remote_list, route.agent)
                route.num_probes += 1
                write = Write(route, 0, handle)
                if self._agent.nixl.transfer(handle) == "ERR":
                    write.is_failed = True
                writes.append(write)
                return True

            return step

        def load() -> bool:
            self._load(route, metadata)
            self._agent.probe.put(probe)
            return True

        def is_still() -> bool:
            return route.num_probes == 0

        def compare() -> bool:
            if self._agent.probe.came_back() != probe:
                raise ConnectionError("other bytes came back than were sent")
            return True

        route.steps.extend((lambda: knock(route), lambda: self._is_let_in(route), load, transfer("WRITE", 0), is_still))
        route.steps.extend((transfer("READ", PROBE_BYTES), is_still, compare))

    def _load(self, route: Route, metadata: bytes) -> None:
        """Know the reader's agent. One that was known before is kept as it was: UCX leaves a socket open for each that
        is removed, and fails now and then for one that is added again at once."""
        route.key = (metadata, route.endpoint.pool_at, route.connect.num_pages)
        known = self._known.pop(route.key, None)
        if known is None:
            agent = self._agent.nixl.add_remote_agent(metadata)
            size = from_message(route.connect.geometry).page_bytes
            known = (agent, self._agent.page_list(agent, route.endpoint.pool, route.connect.num_pages, size))
        self._known[route.key] = known
        route.agent, route.pages = known
        in_use = self._in_use()
        for key in [key for key in list(self._known)[:-MAX_KNOWN] if key not in in_use]:
            self.forget(key)

    def forget(self, key: tuple[bytes, int, int]) -> None:
        """Let go of a reader's agent, if it is known."""
        agent, pages = self._known.pop(key, (None, None))
        if agent is not None:
            with contextlib.suppress(Exception):  # it may be gone, and then it is forgotten already
                pages.release()
                self._agent.nixl.remove_remote_agent(agent)
            self.closing_until = time.monotonic() + CLOSING_S

    def _is_let_in(self, route: Route) -> bool:
        if route.door is None:
            return True
        try:
            word = route.door.recv(256)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionError(TURNED_AWAY) from error
        if not word:
            raise ConnectionError(TURNED_AWAY)
        return True

    def step(self, route: Route) -> str | None:
        """Go on. None: it is not over; else it is, with this problem or none."""
        problem = ""
        try:
            with self._agent.lock:
                while route.steps and route.steps[0]():
                    route.steps.popleft()
            if route.steps and route.until <= time.monotonic():
                problem = f"no answer within {route.patience_s:.0f} s"
        except Exception as error:  # NIXL's own errors have no common root
            problem = str(error) or type(error).__name__
        if route.steps and not problem:
            return None
        if problem:
            route.steps.clear()
            problem = f"nixl cannot reach decode node {route.connect.name}: {problem}"
        return problem

    def forget_all(self) -> None:
        for key in list(self._known):
            self.forget(key)


def knock(route: Route) -> bool:
    """Ask the reader, if it is on this host, to watch our process; and watch it. False: it has no ear for us yet.

    Raises:
        ConnectionError: it is on this host and turns us away, or cannot be asked. UCX would find a way into its memory
            that nothing fences: not the reader, as across a network, and not our death, of which it would not know.
    """
    endpoint = ENDPOINT.fullmatch(route.endpoint.door)
    if endpoint is None:
        _assert_far(route, "it names no door")
        return True
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        door.connect(f"\0{endpoint[1]}")
    except BlockingIOError:  # its backlog is full
        door.close()
        return False
    except OSError as error:
        door.close()
        _assert_far(route, str(error))
        log.info("%s is not on this host (%s): its pages are not fenced by our death", route.connect.name, error)
        return True
    try:
        door.send(bytes.fromhex(endpoint[2]))
        route.pidfd = peer_pidfd(door)
    except OSError as error:  # closed already
        door.close()
        raise ConnectionError(TURNED_AWAY) from error
    route.door = door
    return True


def _assert_far(route: Route, why: str) -> None:
    if route.endpoint.host == host_id():
        raise ConnectionError(f"it is on this host, but in another network namespace ({why}): share one, or use tcp")
