"""The fingerprint of the weight files and its cache."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from common.config.node import NodeConfig
from common.engine.models.checkpoints import weight_version
from common.engine.models.checkpoints.checkpoint import weight_files
from common.engine.models.checkpoints.weight_version import fingerprint
from common.errors import ConfigError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for hashes of files of every size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_version, "MIN_CACHED_BYTES", 0)
    return tmp_path / "cache" / "baton" / "weights"


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return the number of files hashed since its last call."""
    reads: list[int] = []
    real = hashlib.file_digest

    def counting(stream, digest):  # type: ignore[no-untyped-def]
        reads.append(1)
        return real(stream, digest)

    monkeypatch.setattr(hashlib, "file_digest", counting)

    def take() -> int:
        count = len(reads)
        reads.clear()
        return count

    return take


def shards(folder: Path, *contents: bytes) -> list[Path]:
    folder.mkdir()
    for number, content in enumerate(contents):
        (folder / f"model-{number}.safetensors").write_bytes(content)
    return weight_files(folder)


def test_one_changed_byte_in_one_shard_changes_the_fingerprint(tmp_path: Path, cache: Path) -> None:
    first = fingerprint(shards(tmp_path / "a", b"\0" * 1000, b"\0" * 1000))
    assert len(first) == 32
    assert fingerprint(shards(tmp_path / "copy", b"\0" * 1000, b"\0" * 1000)) == first
    assert fingerprint(shards(tmp_path / "b", b"\0" * 1000, b"\0" * 999 + b"\1")) != first
    assert fingerprint(shards(tmp_path / "c", b"\0" * 2000)) != first


def test_the_same_files_are_hashed_once(tmp_path: Path, cache: Path, num_read: Callable[[], int]) -> None:
    files = shards(tmp_path / "a", b"one", b"two", b"three")
    first = fingerprint(files)
    assert num_read() == 3
    assert fingerprint(files) == first
    assert num_read() == 0
    link = tmp_path / "link"
    link.symlink_to(files[0])  # as in the hub's cache
    assert fingerprint([link, *files[1:]]) == first
    assert num_read() == 0


def test_a_replaced_or_rewritten_file_is_hashed_again(tmp_path: Path, cache: Path, num_read: Callable[[], int]) -> None:
    files = shards(tmp_path / "a", b"one", b"two")
    first = fingerprint(files)
    num_read()
    other = tmp_path / "other"
    other.write_bytes(b"TWO")
    other.replace(files[1])
    second = fingerprint(files)
    assert num_read() == 1
    files[0].write_bytes(b"ONE")
    os.utime(files[0], ns=(0, 1))
    assert len({first, second, fingerprint(files)}) == 3
    assert num_read() == 1


@pytest.mark.parametrize("content", [b"", b"abc", b"g" * 32, b"a" * 33, b"\xff" * 32])
def test_a_damaged_cache_entry_is_ignored_and_replaced(
    tmp_path: Path, cache: Path, num_read: Callable[[], int], content: bytes
) -> None:
    files = shards(tmp_path / "a", b"one")
    first = fingerprint(files)
    (entry,) = cache.iterdir()
    entry.write_bytes(content)
    num_read()
    assert fingerprint(files) == first
    assert num_read() == 1
    assert fingerprint(files) == first
    assert num_read() == 0


def test_without_a_cache_folder_the_fingerprint_stays_the_same(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, num_read: Callable[[], int]
) -> None:
    files = shards(tmp_path / "a", b"one")
    first = fingerprint(files)
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    num_read()
    assert [fingerprint(files), fingerprint(files)] == [first, first]
    assert num_read() == 2


def test_small_files_are_not_cached(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, num_read: Callable[[], int]
) -> None:
    monkeypatch.setattr(weight_version, "MIN_CACHED_BYTES", 4)
    files = shards(tmp_path / "a", b"one", b"four")
    assert fingerprint(files) == fingerprint(files)
    assert num_read() == 3
    assert len(list(cache.iterdir())) == 1


def test_hashing_a_large_file_is_logged(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fingerprint(shards(tmp_path / "a", b"one", b"two"))
    assert caplog.text.count("hashing model-") == 2


def test_a_missing_file_is_named(tmp_path: Path, cache: Path) -> None:
    files = shards(tmp_path / "a", b"one")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"model-0\.safetensors: cannot be read \(No such file"):
        fingerprint(files)


@pytest.mark.parametrize("name", ["", "x" * 129])
def test_a_weight_version_has_a_bounded_length(name: str) -> None:
    with pytest.raises(ConfigError, match="--weight-version must have 1 to 128 characters"):
        NodeConfig(weight_version=name)
