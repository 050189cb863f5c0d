"""Computes a fingerprint of a checkpoint's weights, which tells two fine-tunes of one configuration apart.

A large file is hashed once per machine. Its hash is kept in ``$XDG_CACHE_HOME/baton/weights`` (``~/.cache`` if the
variable is not set), named by the file's device, inode, size and modification time, so that a later start does not
read the file. Without a writable cache folder every start hashes again.
"""

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.errors import ConfigError
from common.system.cache_folder import cache_folder

log = logging.getLogger(__name__)

#: Smaller files are hashed at every start, which takes less than 0.1 s; their entries would only fill the cache.
MIN_CACHED_BYTES = 64 << 20
#: Number of files hashed at the same time. hashlib releases the GIL; one thread hashes about 1 GB/s.
MAX_THREADS = 4
_DIGEST_BYTES = 16
_HEX = re.compile(rf"[0-9a-f]{{{2 * _DIGEST_BYTES}}}")


def fingerprint(files: Sequence[Path]) -> str:
    """Return 32 hexadecimal digits that depend on the bytes of ``files`` and on their order, not on their names.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        with ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="weight-hash") as threads:
            digests = list(threads.map(_digest, files))
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from error
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _digest(file: Path) -> str:
    """Return the hash of a file, from the cache if it is there."""
    with file.open("rb") as stream:
        stat = os.fstat(stream.fileno())
        is_cached = stat.st_size >= MIN_CACHED_BYTES
        if is_cached and (known := _read_cached(stat)) is not None:
            return known
        if is_cached:
            log.info("hashing %s, %.1f GB, once here; --weight-version NAME skips it", file.name, stat.st_size / 1e9)
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).hexdigest()
        is_unchanged = _key(os.fstat(stream.fileno())) == _key(stat)
    if is_cached and is_unchanged:  # else the file is being written
        _write_cached(stat, digest)
    return digest


def _key(stat: os.stat_result) -> str:
    return f"{stat.st_dev}-{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"


def _read_cached(stat: os.stat_result) -> str | None:
    """Return the cached hash of a file; None if there is none or the entry is damaged."""
    try:
        digest = (cache_folder() / "weights" / _key(stat)).read_text("ascii")
    except (OSError, RuntimeError, UnicodeError):
        return None
    return digest if _HEX.fullmatch(digest) else None


def _write_cached(stat: os.stat_result, digest: str) -> None:
    """Store a hash atomically. If the folder cannot be written, the next start hashes again."""
    try:
        folder = cache_folder() / "weights"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            entry = Path(place) / "entry"
            entry.write_text(digest, "ascii")
            entry.replace(folder / _key(stat))
    except (OSError, RuntimeError) as error:
        log.info("cannot store the hash of a weight file, the next start computes it again: %s", error)
