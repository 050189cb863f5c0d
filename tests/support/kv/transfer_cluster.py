"""Prefill and decode nodes that are real processes, and the control messages between them."""

import json
from collections import deque
from typing import Any

from support.kv.transport_ends import End
from support.kv.transport_process import NUM_PAGES
from support.service.fork_server import ForkServer
from support.waiting import until

SOME = NUM_PAGES // 2  # of a request's pages; two of them fill the pool to the last page


class Cluster:
    """Processes by name, of which the first letter says the role, and the control messages between them.

    Args:
        ranks: of the nodes of each role, by its first letter; None: nodes without ranks.
    """

    def __init__(self, fork_server: ForkServer, transport: str, ranks: dict[str, int] | None = None) -> None:
        self.transport = transport
        self.ranks = ranks or {}
        self.ends: dict[str, End] = {}
        self.undelivered: dict[tuple[str, str], deque[str]] = {}  # (from, to) -> messages
        self.connected: dict[tuple[str, str], None] = {}  # (prefill, decode)
        self._fork_server = fork_server

    def start(self, name: str, **environment: str) -> str:
        if self.ranks:
            environment = {**environment, "TEST_RANKS": str(self.ranks[name[0]])}
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
                    self.undelivered.setdefault((name, to), deque()).append(message)
        for (sender, to), messages in self.undelivered.items():
            if sender not in names or to not in names:
                continue
            while messages and json.loads(messages[0])["type"] != hold:
                self.ask(to, "hear", peer=incarnation(sender), message=messages.popleft())

    def is_held(self, sender: str, to: str) -> bool:
        return bool(self.undelivered.get((sender, to)))

    def begin(self, rid: str, prefill: str, decode: str, num_pages: int) -> None:
        self.ask(prefill, "open", rid=rid, peer=incarnation(decode), num_pages=num_pages)
        if (prefill, decode) not in self.connected:
            self.connected[prefill, decode] = None
            self.ask(decode, "connect", peer=incarnation(prefill), num_ranks=self.ranks.get(prefill[0], 1))
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
            ends = self.page_counts(decode)["ends"]
            assert ends.get(rid, "Completed") == "Completed", ends
            return rid in ends and self.page_counts(prefill)["ends"].get(rid, False)

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
            self.undelivered.pop(ends, None)
            self.connected.pop(ends, None)
        self.ask(survivor, "peer_lost", peer=incarnation(other))

    def page_counts(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(name, "page_counts")
        return found

    def balanced(self, name: str, num_kept: int = 0) -> None:
        until(lambda: self.page_counts(name)["free"] == NUM_PAGES - num_kept and not self.page_counts(name)["aside"])


def incarnation(name: str) -> str:
    return name.ljust(32, name[0])
