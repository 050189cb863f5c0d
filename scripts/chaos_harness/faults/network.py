"""Faults of the network between namespaces: loss, delay, a host cut off, two nodes that cannot reach each other."""

from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.faults.base import Fault, Site, noticed_s, unnoticed_s
from scripts.chaos_harness.hosts import Hosts
from scripts.chaos_harness.service import Node


class NetworkFault(Fault):
    @classmethod
    def why_not(cls, site: Site) -> str:
        return "" if site.service.hosts is not None else "needs --namespaces, which needs root"

    @staticmethod
    def hosts(site: Site) -> Hosts:
        assert site.service.hosts is not None, "see `why_not`"
        return site.service.hosts


class Loss(NetworkFault):
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


class Flap(NetworkFault):
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
        self._peer = next(other.name for other in site.service.workers if other.role == "prefill")
        self.hosts(site).block(node.name, self._peer)
        return f"{node.name} cannot reach {self._peer}"

    async def undo(self, site: Site, node: Node) -> None:
        if self._peer:
            self.hosts(site).unblock(node.name, self._peer)
