"""Temporary folders that are removed even if the process that made them is killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

LOCK = "lock"


class TemporaryFolder:
    """A folder that ``close`` removes, or else the next process that makes a folder with the same prefix.

    Its process holds a lock on a file in it, which the kernel releases when that process ends.

    Args:
        parent: the system's folder for temporary files by default.
        undo: called with each folder that a killed process has left, before that is removed.
    """

    def __init__(
        self, prefix: str, parent: Path | None = None, *, undo: Callable[[Path], None] = lambda folder: None
    ) -> None:
        for lock in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*/{LOCK}"):
            if _is_released(lock):
                undo(lock.parent)
                shutil.rmtree(lock.parent, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        unlocked = self.path / "new-lock"
        self._lock = unlocked.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / LOCK)

    def keep(self) -> None:
        """Leave the folder to the user, even after the end of this process."""
        (self.path / LOCK).unlink()
        self._lock.close()

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _is_released(lock: Path) -> bool:
    with contextlib.suppress(OSError):  # locked, removed meanwhile, or another user's
        descriptor = os.open(lock, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(descriptor)
    return False
