"""Real processes die, or are stopped for longer than every timeout, at every step of a transfer, by every transport.

Afterwards the books of the survivors balance, no page that went to another use was touched, and the next requests
succeed, the last of them with every page of the pool. The test carries the control messages, so it can stop a transfer
between any two of them; it tells both ends when a control connection is gone, as the control plane does.
"""

import itertools
import json
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.kv.transport_process import NUM_PAGES
from support.service.fork_server import ForkServer

from tests.kv_transfer.test_transports import End, until

TRANSPORTS = ("shm", "tcp", "nixl", "gloo")
SOME = NUM_PAGES // 2  # of a request's pages; two of them fill the pool to the last page
STEPS = ("offered", "attaching", "granted", "writing", "written", "acknowledging")
#: Longer than a healthy peer takes on a busy machine; the other node is stopped for longer.
PATIENCE_S = 1.5


class Cluster:
    """Processes by name, of which the first letter says the role, and the control messages between them."""

    def __init__(self, fork_server: ForkServer, transport: str) -> None:
        self.transport = transport
        self.ends: dict[str, End] = {}
        self.start_request: dict[tuple[str, str], deque[str]] = {}  # (from, to) -> messages
        self.connected: dict[tuple[str, str], None] = {}  # (prefill, decode)
        self._fork_server = fork_server

    def start(self, name: str, **environment: str) -> str:
        role = "sender" if name.startswith("p") else "receiver"
        self.ends[name] = End(
            self._fork_server, role, self.transport, TEST_INCARNATION=incarnation(name), **environment
        )
        return name

    def ask(self, name: str, do: str, **words: Any) -> Any:
        return self.ends[name].ask(do, **words)

    def ferry(self, *names: str, hold: str = "") -> None:
        """Carry what these have to say to each other, in order; a message of the type ``hold`` stops its direction."""
        for name in names:
            for peer, message in self.ask(name, "messages"):
                to = next((other for other in names if incarnation(other) == peer), "")
                if to:
                    self.start_request.setdefault((name, to), deque()).append(message)
        for (sender, to), messages in self.start_request.items():
            if sender not in names or to not in names:
                continue
            while messages and json.loads(messages[0])["type"] != hold:
                self.ask(to, "hear", peer=incarnation(sender), message=messages.popleft())

    def is_held(self, sender: str, to: str) -> bool:
        return bool(self.start_request.get((sender, to)))

    def begin(self, rid: str, prefill: str, decode: str, num_pages: int) -> None:
        self.ask(prefill, "open", rid=rid, peer=incarnation(decode), num_pages=num_pages)
        if (prefill, decode) not in self.connected:
            self.connected[prefill, decode] = None
            self.ask(decode, "connect", peer=incarnation(prefill))
        self.ask(decode, "begin", rid=rid, peer=incarnation(prefill), num_pages=num_pages)

    def serve(self, rid: str, prefill: str, decode: str, num_pages: int) -> None:
        """A request from its beginning to its end, where decode looks at every byte."""
        self.begin(rid, prefill, decode, num_pages)
        self.go_on(rid, prefill, decode)

    def go_on(self, rid: str, prefill: str, decode: str) -> None:
        """To the end of a request that has begun."""

        def is_over() -> bool:
            self.ferry(prefill, decode)
            self.ask(prefill, "pump", max_pages=4)
            ends = self.allocator(decode)["ends"]
            assert ends.get(rid, "Completed") == "Completed", ends
            return rid in ends and self.allocator(prefill)["ends"].get(rid, False)

        until(is_over)

    def reach(self, step: str, rid: str, prefill: str, decode: str, num_pages: int) -> None:
        """Bring a request so far and no further."""
        self.begin(rid, prefill, decode, num_pages)
        if step == "offered":
            return self.ferry(prefill, decode, hold="connect")
        if step == "attaching":
            return self.ferry(prefill, decode, hold="connected")

        def is_granted() -> bool:
            self.ferry(prefill, decode)
            return bool(self.ask(prefill, "is_granted", rid=rid))

        until(is_granted)
        if step == "granted":
            return None
        if step == "writing":
            return self.ends[prefill].tell("pump", max_pages=num_pages)
        hold = {"written": "pages_written", "acknowledging": "transfer_ack"}[step]
        side = (prefill, decode) if step == "written" else (decode, prefill)

        def has_come_so_far() -> bool:
            self.ask(prefill, "pump", max_pages=4)
            self.ferry(prefill, decode, hold=hold)
            return self.is_held(*side)

        return until(has_come_so_far)

    def part(self, survivor: str, other: str) -> None:
        """The control connection is gone, and ``survivor`` notices."""
        for ends in ((survivor, other), (other, survivor)):
            self.start_request.pop(ends, None)
            self.connected.pop(ends, None)
        self.ask(survivor, "peer_lost", peer=incarnation(other))

    def allocator(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(name, "allocator")
        return found

    def balanced(self, name: str, num_kept: int = 0) -> None:
        until(lambda: self.allocator(name)["free"] == NUM_PAGES - num_kept and not self.allocator(name)["aside"])


def incarnation(name: str) -> str:
    return name.ljust(32, name[0])


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


@pytest.fixture
def make(fork_server: ForkServer) -> Iterator[Callable[[str], Cluster]]:
    clusters: list[Cluster] = []

    def begin(transport: str) -> Cluster:
        clusters.append(Cluster(fork_server, transport))
        return clusters[-1]

    yield begin
    for cluster in clusters:
        for end in cluster.ends.values():
            end.close()


@pytest.mark.slow(sample=0.2)
@pytest.mark.parametrize(("transport", "victim", "step"), list(itertools.product(TRANSPORTS, ("p0", "d0"), STEPS)))
def test_either_node_is_killed_at_every_step(
    make: Callable[[str], Cluster], transport: str, victim: str, step: str
) -> None:
    cluster = make(transport)
    prefill, decode = cluster.start("p0"), cluster.start("d0")
    survivor = prefill if victim == decode else decode
    cluster.reach(step, "a", prefill, decode, SOME)
    cluster.ends[victim].kill()
    if victim == decode and step == "writing":
        cluster.ends[prefill].answer()
    cluster.part(survivor, victim)
    has_kept = victim == prefill and step == "acknowledging"
    cluster.balanced(survivor, SOME if has_kept else 0)
    assert cluster.allocator(survivor)["ends"]["a"] == ("Completed" if has_kept else _failed(victim)), step
    replacement = cluster.start(victim[0] + "1")
    pair = (replacement, decode) if victim == prefill else (prefill, replacement)
    cluster.serve("b", *pair, SOME)
    for rid in ("a", "b") if has_kept else ("b",):
        cluster.ask(pair[1], "give_back", rid=rid)
    cluster.serve("c", *pair, NUM_PAGES)
    cluster.balanced(pair[0])


def _failed(victim: str) -> Any:
    """What the survivor says of the request."""
    return "TransferFailed" if victim.startswith("p") else False


@pytest.mark.slow(sample=0.08)
@pytest.mark.parametrize(
    ("transport", "step", "ending"), list(itertools.product(TRANSPORTS, STEPS, (signal.SIGCONT, signal.SIGKILL)))
)
def test_a_prefill_node_is_stopped_for_longer_than_every_timeout(
    make: Callable[[str], Cluster], transport: str, step: str, ending: signal.Signals
) -> None:
    """Pages to which it may still write stay in quarantine meanwhile; another node serves from the rest of the pool, to
    the last page, and what the first one writes when it wakes reaches no page in use."""
    cluster = make(transport)
    decode = cluster.start("d0", TEST_PATIENCE_S=str(PATIENCE_S))
    prefill, other = cluster.start("p0", TEST_PATIENCE_S=str(PATIENCE_S)), cluster.start("p1")
    cluster.reach(step, "a", prefill, decode, SOME)
    cluster.ends[prefill].signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    cluster.part(decode, prefill)
    has_kept = step == "acknowledging"
    assert until(lambda: cluster.allocator(decode)["ends"].get("a")) == ("Completed" if has_kept else "TransferFailed")
    cluster.serve("b", other, decode, SOME)
    time.sleep(max(0.0, stopped_at + PATIENCE_S + 0.3 - time.monotonic()))
    # Stopped, not dead: where it writes by itself, only its own word or its end would free these pages.
    may_write = transport in ("shm", "nixl") and step in ("granted", "writing", "written")
    assert cluster.allocator(decode)["aside"] == (SOME if may_write else 0)
    cluster.ends[prefill].signal(ending)
    if ending == signal.SIGCONT:
        if step == "writing":
            cluster.ends[prefill].answer()
        cluster.part(prefill, decode)
        cluster.balanced(prefill)
    cluster.balanced(decode, SOME + SOME * has_kept)
    cluster.ask(decode, "give_back", rid="b")  # looked at once more
    if has_kept:
        cluster.ask(decode, "give_back", rid="a")
    cluster.serve("c", prefill if ending == signal.SIGCONT else other, decode, NUM_PAGES)


@pytest.mark.slow(sample=0.08)
@pytest.mark.parametrize(
    ("transport", "step", "ending"), list(itertools.product(TRANSPORTS, STEPS, (signal.SIGCONT, signal.SIGKILL)))
)
def test_a_decode_node_is_stopped_for_longer_than_every_timeout(
    make: Callable[[str], Cluster], transport: str, step: str, ending: signal.Signals
) -> None:
    cluster = make(transport)
    prefill = cluster.start("p0", TEST_PATIENCE_S=str(PATIENCE_S))
    decode, other = cluster.start("d0", TEST_PATIENCE_S=str(PATIENCE_S)), cluster.start("d1")
    cluster.reach(step, "a", prefill, decode, SOME)
    cluster.ends[decode].signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    if step == "writing":
        cluster.ends[prefill].answer()
    cluster.part(prefill, decode)
    cluster.serve("b", prefill, other, SOME)
    time.sleep(max(0.0, stopped_at + PATIENCE_S + 0.3 - time.monotonic()))
    cluster.ends[decode].signal(ending)
    has_kept = step == "acknowledging"
    if ending == signal.SIGCONT:
        cluster.part(decode, prefill)
        cluster.balanced(decode, SOME * has_kept)
        assert cluster.allocator(decode)["ends"]["a"] == ("Completed" if has_kept else "TransferFailed")
    cluster.balanced(prefill)
    if ending == signal.SIGCONT:
        if has_kept:
            cluster.ask(decode, "give_back", rid="a")
        cluster.serve("c", prefill, decode, NUM_PAGES)
    cluster.ask(other, "give_back", rid="b")
    cluster.serve("d", prefill, other, NUM_PAGES)
