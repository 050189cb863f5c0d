"""Faults of the network between namespaces: loss, delay, a host cut off, two nodes that cannot reach each other."""

import asyncio
import re
import time
from pathlib import Path

from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.faults.base import Fault, Site, noticed_s, unnoticed_s
from scripts.chaos_harness.hosts import Hosts
from scripts.chaos_harness.service import Node

#: How long a write may take to come, with which NIXL notices a lost connection, and another transport after that; on a
#: machine that is busy with other work as well.
SWITCH_S = 45.0
NO_PREFILL = "there is no prefill node to cut off from it"


class NetworkFault(Fault):
    @classmethod
    def why_not(cls, site: Site) -> str:
        return "" if site.service.hosts is not None else "needs --namespaces, which needs root"

    @staticmethod
    def hosts(site: Site) -> Hosts:
        assert site.service.hosts is not None, "see `why_not`"
        return site.service.hosts


class BridgeFault(NetworkFault):
    """A fault of a host's connection to the bridge."""

    @classmethod
    def why_not(cls, site: Site) -> str:
        if (why := super().why_not(site)) or cls.hosts(site).has_bridge:
            return why
        return "needs a bridge, or netem in this kernel beside --packet-loss and --packet-delay"


class Loss(BridgeFault):
    """One packet in ten is lost; where the kernel has no ``netem``, a narrow link loses what is sent too fast."""

    name = "loss"

    @classmethod
    def lasts_s(cls, config: ChaosConfig) -> tuple[float, float]:
        return (1.0, 3.0)

    async def inject(self, site: Site, node: Node) -> str:
        narrow = ("tbf", "rate", "8mbit", "burst", "8kb", "limit", "6kb")
        how = self.hosts(site).shape(node.name, ("netem", "loss", "10%"), narrow)
        return f"packets of {node.name} are lost ({how})"

    async def undo(self, site: Site, node: Node) -> None:
        self.hosts(site).unshape(node.name)


class Delay(Loss):
    """Packets take 60 ms, give or take 30; without ``netem``, they wait before a slow link."""

    name = "delay"

    async def inject(self, site: Site, node: Node) -> str:
        slow = ("tbf", "rate", "4mbit", "burst", "4kb", "limit", "1mb")
        how = self.hosts(site).shape(node.name, ("netem", "delay", "60ms", "30ms"), slow)
        return f"packets of {node.name} are late ({how})"


class Flap(BridgeFault):
    """A host is cut off for less than --node-timeout."""

    name = "flap"

    @classmethod
    def lasts_s(cls, config: ChaosConfig) -> tuple[float, float]:
        return unnoticed_s(config)

    async def inject(self, site: Site, node: Node) -> str:
        self.hosts(site).cut(node.name)
        return f"nothing reaches {node.name}"

    async def undo(self, site: Site, node: Node) -> None:
        self.hosts(site).heal(node.name)


class Cut(Flap):
    """A host is cut off for longer than --node-timeout."""

    name = "cut"
    is_loss = is_silent = True

    @classmethod
    def lasts_s(cls, config: ChaosConfig) -> tuple[float, float]:
        return noticed_s(config)


class PairCut(NetworkFault):
    """A decode node and a prefill node cannot reach each other, while the gateway reaches both."""

    name = "pair-cut"
    roles = ("decode",)
    is_silent = True

    def __init__(self) -> None:
        self._peer = ""

    @classmethod
    def lasts_s(cls, config: ChaosConfig) -> tuple[float, float]:
        return (2.0, config.node_timeout + 2.0)

    async def inject(self, site: Site, node: Node) -> str:
        self._peer = next((other.name for other in site.service.workers if other.role == "prefill"), "")
        if not self._peer:
            return f"{self.name} at {node.name}: {NO_PREFILL}"
        self.hosts(site).block(node.name, self._peer)
        return f"{node.name} cannot reach {self._peer}"

    async def undo(self, site: Site, node: Node) -> None:
        if self._peer:
            self.hosts(site).unblock(node.name, self._peer)


class Reset(NetworkFault):
    """The data connections of a pair are reset, and with them the transfers under way; the pair goes on by the next
    transport that works.
    """

    name = "reset"
    roles = ("decode",)
    what = "were reset"

    @classmethod
    def lasts_s(cls, config: ChaosConfig) -> tuple[float, float]:
        return (0.0, 0.0)

    async def inject(self, site: Site, node: Node) -> str:
        prefills = (other for other in site.service.workers if other.data_port and other.role == "prefill")
        if (peer := next(prefills, None)) is None:
            return f"{self.name} at {node.name}: {NO_PREFILL}"
        starts = node.num_starts, peer.num_starts
        logs = [(log, log.stat().st_size) for log in (peer.log, node.log)]
        began_at = time.monotonic()
        noticed_at = 0.0
        await asyncio.to_thread(self._break, self.hosts(site), node, peer)
        broke = [
            re.compile(rf"decode node {re.escape(node.name)}\b.* (broke: |offers its pool again, in place )".encode()),
            re.compile(rf"cannot receive pages from node {re.escape(peer.name)} now".encode()),
        ]
        attached = re.compile(rf"sending pages to decode node {re.escape(node.name)} by (\w+)".encode())
        what = f"data connections from {peer.name} to {node.name} {self.what}"
        while True:  # it looks at least once, however late it is
            lines = [_written(log, num_bytes) for log, num_bytes in logs]
            if not noticed_at and any(map(re.Pattern.search, broke, lines)):
                noticed_at = time.monotonic()
            if noticed_at and (found := attached.search(lines[0])):
                took_s, since_fault_s = time.monotonic() - noticed_at, time.monotonic() - began_at
                site.switches_s.append(took_s)
                site.since_faults_s.append(since_fault_s)
                after = f"{since_fault_s:.2f} s after that, {took_s:.2f} s after a node has noticed"
                return f"{what}; pages go by {found[1].decode()} {after}"
            if time.monotonic() - (noticed_at or began_at) >= SWITCH_S:
                break
            await asyncio.sleep(0.01)
        if not noticed_at:
            return f"{what}; no page was to be sent"
        if starts == (node.num_starts, peer.num_starts) and peer.is_running and not peer.fault:
            site.problems.append(f"{self.name}: {what}, and pages went by no transport {SWITCH_S:g} s later")
        return f"{what}; pages go by no transport"

    def _break(self, hosts: Hosts, node: Node, peer: Node) -> None:
        hosts.reset(node.name, peer.name, spared_port=peer.data_port)


class Silence(Reset):
    """The packets of a pair's data connections are lost without an error from here on; connections made later work."""

    name = "silence"
    what = "fell silent"

    @classmethod
    def why_not(cls, site: Site) -> str:
        if (why := super().why_not(site)) or cls.hosts(site).has_relay:
            return why
        return "needs packets to go through the relay: name it with --faults"

    def _break(self, hosts: Hosts, node: Node, peer: Node) -> None:
        hosts.silence(node.name, peer.name, spared_port=peer.data_port)


def _written(log: Path, num_bytes: int) -> bytes:
    """What a log has beyond its first bytes."""
    with log.open("rb") as file:
        file.seek(num_bytes)
        return file.read()
