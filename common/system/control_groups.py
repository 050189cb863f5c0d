"""The control groups of Linux that limit this process, of version 1 and 2."""

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str) -> Iterator[Path]:
    """The folders of the groups that may limit what a controller shares out, such as ``cpu``: own group, then parents.

    A container or a unit of systemd may see groups of its own at the root of the tree, or in a folder below it.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = Path(f"/sys/fs/cgroup/{controller}" if controllers else "/sys/fs/cgroup")
        own = root / path.lstrip("/")
        yield own
        yield from (parent for parent in own.parents if parent.is_relative_to(root))
