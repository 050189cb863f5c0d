"""Resources of processes: recorded while they run, looked up after they have ended."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessResources:
    """Named resources of processes, recorded while they run and looked up after they have ended.

    Attributes:
        tcp: ports on which they listen.
        unix: names of their Unix sockets; abstract names begin with ``@``.
        files: paths of named shared memory, locks and temporary files.
    """

    pids: frozenset[int]
    tcp: frozenset[int]
    unix: frozenset[str]
    files: frozenset[str]

    @classmethod
    def of(cls, pids: Sequence[int]) -> "ProcessResources":
        inodes: set[str] = set()
        files: set[str] = set()
        for pid in pids:
            targets = [_readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
            targets += re.findall(r" (/\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
            for target in targets:
                if found := re.fullmatch(r"socket:\[(\d+)\]", target):
                    inodes.add(found[1])
                elif target.startswith(sys.prefix):
                    pass  # libraries of the Python environment
                elif target.startswith(("/dev/shm/", "/tmp/", "/run/")) and not target.endswith(".log"):
                    files.add(target)
        return cls(frozenset(pids), frozenset(_tcp(inodes)), frozenset(_unix(inodes)), frozenset(files))

    def left(self) -> str:
        """Describes the resources that still exist; empty if none."""
        alive = [pid for pid in self.pids if _is_alive(pid)]
        tcp = sorted(self.tcp & _tcp(None))
        unix = sorted(self.unix & _unix(None))
        files = [path for path in sorted(self.files) if os.path.exists(path)]
        found = {"processes": alive, "ports": tcp, "sockets": unix, "files": files}
        return ", ".join(f"{what} {values}" for what, values in found.items() if values)


def _readlink(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _tcp(inodes: set[str] | None) -> set[int]:
    """Returns the ports that are listened on, by these sockets or by any."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {
        int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and (inodes is None or row[9] in inodes)
    }


def _unix(inodes: set[str] | None) -> set[str]:
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7 and (inodes is None or row[6] in inodes)}


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
