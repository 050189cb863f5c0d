"""Temporary folders: closed, kept, and left by a process that was killed."""

import subprocess
import sys
from pathlib import Path

from support.service.processes import environment

from scripts.temporary_folder import TemporaryFolder

MAKE = """
import signal, sys
from pathlib import Path
from scripts.temporary_folder import TemporaryFolder

made = TemporaryFolder("made-", Path(sys.argv[1]))
(made.path / "file").touch()
print(made.path, flush=True)
signal.pause()
"""


def test_the_next_folder_removes_what_a_killed_process_has_left(tmp_path: Path) -> None:
    undone: list[bool] = []

    def undo(folder: Path) -> None:
        undone.append((folder / "file").exists())

    words = [sys.executable, "-c", MAKE, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as maker:
        assert maker.stdout is not None
        left = Path(maker.stdout.readline().strip())
        TemporaryFolder("made-", tmp_path, undo=undo).close()
        assert left.exists()
        maker.kill()
    next_one = TemporaryFolder("made-", tmp_path, undo=undo)
    assert list(tmp_path.iterdir()) == [next_one.path]
    assert undone == [True]
    next_one.close()
    assert not next_one.path.exists()


def test_a_kept_folder_stays(tmp_path: Path) -> None:
    kept = TemporaryFolder("made-", tmp_path)
    (kept.path / "file").touch()
    kept.keep()
    TemporaryFolder("made-", tmp_path).close()
    assert [path.name for path in kept.path.iterdir()] == ["file"]
