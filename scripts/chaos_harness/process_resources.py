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
        pids: process ids, each with the time at which its process began: ids and ports are used again.
        tcp: ports on which they listen, each with the inode of the socket.
        unix: names of their Unix sockets; abstract names begin with ``@``.
        files: paths of named shared memory, locks and temporary files.
    """

    pids: frozenset[tuple[int, str]]
    tcp: frozenset[tuple[int, str]]
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
                elif target.startswith(sys.prefix) or target.endswith(".safetensors"):
                    pass  # libraries of the Python environment, and the model
                elif target.startswith(("/dev/shm/", "/tmp/", "/run/")) and not target.endswith(".log"):
                    files.add(target)
        begun = frozenset((pid, _begun_at(pid)) for pid in pids)
        return cls(begun, frozenset(_tcp(inodes)), frozenset(_unix(inodes)), frozenset(files))

    def left(self) -> str:
        """Describe the resources that still exist; empty if none."""
        alive = sorted(pid for pid, begun_at in self.pids if begun_at and _begun_at(pid) == begun_at)
        tcp = sorted(port for port, _ in self.tcp & _tcp(None))
        unix = sorted(self.unix & _unix(None))
        files = [path for path in sorted(self.files) if os.path.exists(path)]
        found = {"processes": alive, "ports": tcp, "sockets": unix, "files": files}
        return ", ".join(f"{what} {values}" for what, values in found.items() if values)


def _readlink(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _begun_at(pid: int) -> str:
    """When a process began, in ticks since boot; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _tcp(inodes: set[str] | None) -> set[tuple[int, str]]:
    """Return the ports that are listened on, by these sockets or by any, each with the socket's inode."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {
        (int(row[1].rpartition(":")[2], 16), row[9])
        for row in rows
        if row[3] == "0A" and (inodes is None or row[9] in inodes)
    }


def _unix(inodes: set[str] | None) -> set[str]:
    names = Path("/proc/net/unix").read_text(errors="replace")  # those of other programs may be any bytes
    rows = [line.split() for line in names.splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7 and (inodes is None or row[6] in inodes)}


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
