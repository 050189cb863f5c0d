"""One node runs out of disk, descriptors or memory."""

import asyncio
import contextlib
import os
import resource
import time
from pathlib import Path

from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.faults.base import Fault, Site
from scripts.chaos_harness.process_resources import num_descriptors
from scripts.chaos_harness.service import Node

CGROUPS = (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"))
BLOCK = b"\0" * 65536
FILLER = "filler"


class FullDisk(Fault):
    """The disk is full on which a node writes its log and its recording; other faults may hit the node meanwhile."""

    name = "disk"
    roles = ()

    @classmethod
    def why_not(cls, site: Site) -> str:
        return "" if site.disk is not None else "needs a small disk, which only root can mount"

    async def inject(self, site: Site, node: Node) -> str:
        assert site.disk is not None, "see `why_not`"
        with contextlib.suppress(OSError), (site.disk / FILLER).open("wb", buffering=0) as filler:
            while True:
                filler.write(BLOCK)
        return f"the disk of {site.disk_user} is full"

    async def undo(self, site: Site, node: Node) -> None:
        assert site.disk is not None
        (site.disk / FILLER).unlink(missing_ok=True)


class Descriptors(Fault):
    """A node cannot open another file or socket."""

    name = "descriptors"
    may_end = True

    def __init__(self) -> None:
        self._before: tuple[int, int] | None = None

    async def inject(self, site: Site, node: Node) -> str:
        site.service.remember_resources(node)
        self._before = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        count = num_descriptors(node.pid)
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (count, self._before[1]))
        return f"{node.name} can open no more than its {count} descriptors"

    async def undo(self, site: Site, node: Node) -> None:
        if self._before is not None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(node.pid, resource.RLIMIT_NOFILE, self._before)


class Memory(Fault):
    """A node has no memory left, and the kernel ends it; in a control group of its own, or by a limit of its own."""

    name = "memory"
    is_loss = True
    may_end = True

    def __init__(self) -> None:
        self._group: Path | None = None

    @classmethod
    def lasts_s(cls, config: ChaosConfig) -> tuple[float, float]:
        return (2.0, 2.0)

    async def inject(self, site: Site, node: Node) -> str:
        site.service.remember_resources(node)
        for root, limit in CGROUPS:
            for left in Path(root).glob("baton-chaos-*"):  # by a run that was killed, if no process is in it
                with contextlib.suppress(OSError):
                    left.rmdir()
            group = Path(root) / f"baton-chaos-{os.getpid()}-{node.pid}"
            try:
                group.mkdir()
                self._group = group
                (group / limit).write_text("65536")
                (group / "cgroup.procs").write_text(str(node.pid))
                return f"{node.name} gets no more memory, in a control group"
            except OSError:
                self._remove_group()
        size = int(Path(f"/proc/{node.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(node.pid, resource.RLIMIT_AS, (size, size))
        return f"{node.name} gets no more memory, by a limit of {size >> 20} MiB"

    async def undo(self, site: Site, node: Node) -> None:
        if node.is_running and node.num_starts and not node.ended_at and self._is_old(node):
            site.service.kill(node)  # it needed no memory meanwhile, or cannot go on
        ends_at = time.monotonic() + 5.0
        while self._group is not None and time.monotonic() < ends_at:
            self._remove_group()
            await asyncio.sleep(0.1)

    def _is_old(self, node: Node) -> bool:
        """Whether the process of the node is still the one that has the limit."""
        if self._group is None:
            return resource.prlimit(node.pid, resource.RLIMIT_AS)[1] != resource.RLIM_INFINITY
        return str(node.pid) in (self._group / "cgroup.procs").read_text().split()

    def _remove_group(self) -> None:
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._group.rmdir()
                self._group = None
