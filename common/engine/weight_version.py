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

log = logging.getLogger(__name__)

#: Smaller files are hashed at every start, which takes less than 0.1 s; their entries would only fill the cache.
MIN_CACHED_BYTES = 64 << 20
#: From this total on, progress is logged.
MIN_LOGGED_BYTES = 1 << 30
#: Number of files hashed at the same time. hashlib releases the GIL; one thread hashes about 1 GB/s.
MAX_THREADS = 4
_DIGEST_BYTES = 16
_HEX = re.compile(rf"[0-9a-f]{{{2 * _DIGEST_BYTES}}}")


def fingerprint(files: Sequence[Path]) -> str:
    """Return 32 hexadecimal digits that depend on the bytes of ``files`` and on their order, not on their names.

    Raises:
        ConfigError: a file cannot be read.
    """
    cached = [_read_cached(file) for file in files]
    missing = [file for file, digest in zip(files, cached, strict=True) if digest is None]
    computed = iter(_hash_files(missing))
    digests = [digest or next(computed) for digest in cached]
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _hash_files(files: list[Path]) -> list[str]:
    if not files:
        return []
    num_bytes = sum(_stat(file).st_size for file in files)
    is_logged = num_bytes >= MIN_LOGGED_BYTES
    if is_logged:
        log.info(
            "hashing %d weight files, %.1f GB, once on this machine; --weight-version NAME skips it",
            len(files),
            num_bytes / 1e9,
        )
    digests: list[str] = []
    with ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="weight-hash") as threads:
        for digest in threads.map(_hash_file, files):
            digests.append(digest)
            if is_logged:
                log.info("hashed %d of %d weight files", len(digests), len(files))
    return digests


def _hash_file(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            before = os.fstat(stream.fileno())
            digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).hexdigest()
            after = os.fstat(stream.fileno())
    except OSError as error:
        raise _unreadable(file, error) from error
    if _key(before) == _key(after) and after.st_size >= MIN_CACHED_BYTES:  # else the file is being written
        _write_cached(_key(after), digest)
    return digest


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{file}: cannot be read ({error.strerror})")


def _key(stat: os.stat_result) -> str:
    return f"{stat.st_dev}-{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"


def _cache_folder() -> Path:
    """Raises RuntimeError: there is no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "weights"


def _read_cached(file: Path) -> str | None:
    """Return the cached hash of a file; None if there is none or the entry is damaged."""
    stat = _stat(file)
    if stat.st_size < MIN_CACHED_BYTES:
        return None
    try:
        digest = (_cache_folder() / _key(stat)).read_text("ascii")
    except (OSError, RuntimeError, UnicodeError):
        return None
    return digest if _HEX.fullmatch(digest) else None


def _write_cached(key: str, digest: str) -> None:
    """Store a hash atomically. If the folder cannot be written, the next start hashes again."""
    try:
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            entry = Path(place) / "entry"
            entry.write_text(digest, "ascii")
            entry.replace(folder / key)
    except (OSError, RuntimeError) as error:
        log.info("cannot store the hash of a weight file, the next start computes it again: %s", error)
