"""Exit statuses of the commands, and the files and lines that they write."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import ConfigError, reason_of

FINE, FAILED, WRONG, INVALID, REGRESSED, DIFFERENT = range(6)
STOPPED = 130
TO_STDOUT = "-"
Writer = Callable[[str], object]


def say(*lines: str) -> None:
    """Print lines; a reader that has gone away (``| head``) does not keep the files from being written."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_files(writers: Sequence[tuple[str, str | None, Writer]]) -> bool:
    """Write the file of every flag that has a path, even after a failure; return whether all were written."""
    began_at = time.monotonic()
    written, has_all = [], True
    for flag, path, write in writers:
        if not path:
            continue
        try:
            write(path)
            written.append(path)
        except (OSError, ValueError, OverflowError) as error:  # a full disk, or text that a format cannot hold
            has_all = False
            print(f"loadtest: {flag} {path} could not be written: {reason_of(error)}", file=sys.stderr)
    if written:
        say(f"written in {time.monotonic() - began_at:.1f} s: {', '.join(written)}")
    return has_all


def check_file(path: str | None, flag: str) -> None:
    """Raise ConfigError, naming the flag, if the file cannot be written."""
    if path is None:
        return
    if path == TO_STDOUT:  # of a command, or a flag, that writes files alone
        raise ConfigError(f"{flag} - does not write to standard output: name a file, or ./- for one of that name")
    file = Path(path).resolve()
    if not file.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no such folder")
    if file.is_dir():
        raise ConfigError(f"{flag} {path} is a folder: name a file in it")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written")


def check_distinct(read: Sequence[tuple[str, str | None]], written: Sequence[tuple[str, str | None]]) -> None:
    """Raise ConfigError, naming the flags, if a file would be written that is read, or written twice."""
    used = {Path(path).resolve(): flag for flag, path in read if path}
    for flag, path in written:
        if path and (other := used.setdefault(Path(path).resolve(), flag)) != flag:
            raise ConfigError(f"{other} and {flag} name the same file, {path}")


def check_folder(path: str | None, flag: str) -> None:
    """Raise ConfigError, naming the flag, if the folder is none or cannot be made."""
    if path is None:
        return
    folder = Path(path).resolve()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir():
        raise ConfigError(f"{flag} {path}: {existing} is a file: name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path} cannot be written")
