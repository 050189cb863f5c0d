"""What every fault is: something to inject, and to undo some seconds later."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.config.shared import ROLES
from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.schedule import FaultKind
from scripts.chaos_harness.service import ChaosService, Node
from scripts.chaos_harness.workload import LoadRequest


@dataclass(frozen=True, slots=True)
class Site:
    """Where faults are injected.

    Attributes:
        disk: a small disk, on which ``disk_user`` keeps its log and recording; None without one.
        problems: what a fault has found wrong; each of them fails the run.
        switches_s: how long pairs took to go on by another transport, from when a node noticed.
        since_faults_s: the same from the fault, with the time until a page was to be sent.
    """

    config: ChaosConfig
    service: ChaosService
    requests: Sequence[LoadRequest]
    disk: Path | None = None
    disk_user: str = ""
    problems: list[str] = field(default_factory=list)
    switches_s: list[float] = field(default_factory=list)
    since_faults_s: list[float] = field(default_factory=list)


def unnoticed_s(config: ChaosConfig) -> tuple[float, float]:
    """Shortest and longest silence with which a node counts as alive all the time."""
    return (0.1, config.node_timeout * 0.4)


def noticed_s(config: ChaosConfig) -> tuple[float, float]:
    """Shortest and longest silence by which a node is lost."""
    return (config.node_timeout + 1.0, config.node_timeout + 4.0)


class Fault(ABC):
    """A kind of fault. An object is made for each injection.

    Attributes:
        name: by which ``--faults`` chooses it.
        is_loss: the service loses a node or a gateway by it.
        roles: nodes that it may hit; empty if it hits none of the processes.
        is_silent: nothing but silence tells the service of it, until ``--node-timeout``.
        may_end: the process that it hits may end.
    """

    name: str
    is_loss = False
    roles: tuple[str, ...] = ROLES
    is_silent = False
    may_end = False

    @classmethod
    def lasts_s(cls, config: ChaosConfig) -> tuple[float, float]:
        """Shortest and longest time until ``undo``."""
        return (0.5, 2.0)

    @classmethod
    def kind(cls, config: ChaosConfig) -> FaultKind:
        return FaultKind(cls.name, cls.is_loss, cls.roles, cls.lasts_s(config))

    @classmethod
    def why_not(cls, site: Site) -> str:
        """Why this fault cannot be injected here; empty if it can."""
        return ""

    @abstractmethod
    async def inject(self, site: Site, node: Node) -> str:
        """Inject the fault; return what was done, in a few words."""

    async def undo(self, site: Site, node: Node) -> None:  # noqa: B027 (most faults end by themselves)
        """End the fault. Called once after ``inject``, also if that has failed."""
