"""Folders of keys: which connections they permit, how they are made, and what is refused."""

import errno
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model_folder import find_model
from common.wire import key_folder
from common.wire.curve import CurveKeys
from common.wire.key_folder import load_keys, read_folder, write_folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_each_host_has_its_own_secret_and_permits_the_nodes_of_all_hosts(folder: Path) -> None:
    first, second = write_folders(folder, ["a", "b"])
    gateway, node_a, node_b = read_folder(first, "gateway"), read_folder(first, "node"), read_folder(second, "node")
    assert len({gateway.secret, node_a.secret, node_b.secret}) == 3
    assert gateway.public == gateway.gateway == node_a.gateway == node_b.gateway
    for keys in (gateway, node_a, node_b):
        assert keys.permitted == {node_a.public: "a", node_b.public: "b"}
    with pytest.raises(ConfigError, match="b is the folder of a host without the gateway"):
        read_folder(second, "gateway")


def test_a_host_that_is_added_is_permitted_by_all_and_changes_no_key(folder: Path) -> None:
    (first,) = write_folders(folder, ["a"])
    before = read_folder(first, "gateway")
    (second,) = write_folders(folder, ["b"])
    added, after = read_folder(second, "node"), read_folder(first, "gateway")
    assert (after.secret, after.gateway) == (before.secret, before.gateway)
    assert after.permitted == added.permitted == {**before.permitted, added.public: "b"}
    assert added.gateway == before.public


@pytest.mark.parametrize("num_written", range(3))
def test_after_a_failure_the_same_folders_can_be_made(
    folder: Path, num_written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(where: Path, name: str) -> Path:
        if len(list(where.parent.rglob("*.key_secret"))) == num_written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_pair(where, name)

    write_pair = key_folder._write_pair
    with monkeypatch.context() as patches:
        patches.setattr(key_folder, "_write_pair", fill_the_disk)
        with pytest.raises(OSError, match="No space left"):
            write_folders(folder, ["a", "b"])
    assert os.listdir(folder) == []
    first, second = write_folders(folder, ["a", "b"])
    assert read_folder(second, "node").public in read_folder(first, "gateway").permitted


def test_a_host_whose_folder_was_removed_is_permitted_by_its_new_key(folder: Path) -> None:
    first, second = write_folders(folder, ["a", "b"])
    shutil.rmtree(second)
    (second,) = write_folders(folder, ["b"])
    assert read_folder(second, "node").public in read_folder(first, "gateway").permitted


def test_others_can_read_no_secret(folder: Path) -> None:
    for made in write_folders(folder, ["a", "b"]):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        for secret in made.glob("*_secret"):
            assert stat.S_IMODE(secret.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("hosts", "sentence"),
    [
        (["a", "a"], r"keys/a exists already; remove it, or choose another name"),
        (["../x"], r"the host '\.\./x' cannot be a file name"),
        ([""], r"the host '' cannot be a file name"),
    ],
)
def test_a_wrong_host_is_refused_before_a_key_is_made(folder: Path, hosts: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        write_folders(folder, hosts)
    assert not folder.exists()


def test_keys_that_others_can_read_are_refused(folder: Path) -> None:
    (made,) = write_folders(folder, ["a"])
    (made / "node.key_secret").chmod(0o644)
    with pytest.raises(ConfigError, match=r"node\.key_secret can be read or replaced by others: .* chmod 600 it"):
        load_keys(str(made), is_insecure=False, role="node")
    assert load_keys(str(made), is_insecure=False, role="gateway")


@pytest.mark.parametrize("text", ["", "nonsense", 'public-key = "short"', 'public-key = "' + "#" * 40 + '"'])
def test_damaged_files_are_refused_by_name(folder: Path, text: str) -> None:
    (made,) = write_folders(folder, ["a"])
    for name in ("nodes/a.key", "gateway.key", "node.key_secret"):
        path = made / name
        whole = path.read_text()
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"{name} holds no key; make keys with baton keygen"):
            read_folder(made, "node")
        path.write_text(whole)
    (made / "gateway.key").unlink()
    with pytest.raises(ConfigError, match=r"cannot read the key .*gateway\.key: it does not exist"):
        read_folder(made, "node")


def test_a_list_of_nodes_that_cannot_be_read_is_refused(folder: Path) -> None:
    (made,) = write_folders(folder, ["a"])
    (made / "nodes").rename(folder / "moved")
    for make in (lambda path: None, Path.touch):
        make(made / "nodes")
        with pytest.raises(ConfigError, match=r"--keys .*/a cannot be read: (No such file|Not a directory)"):
            load_keys(str(made), is_insecure=False, role="gateway")


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, ""), OSError(errno.ENAMETOOLONG, "")])
def test_a_path_that_the_system_refuses_to_look_at_is_refused(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, **_: object) -> None:
        raise error

    monkeypatch.setattr("os.stat", refuse)
    with pytest.raises(ConfigError, match="--keys /locked/a is not a folder"):
        load_keys("/locked/a", is_insecure=False, role="node")
    with pytest.raises(ConfigError, match="--model /locked/a: no such folder"):
        find_model("/locked/a", patterns=[])


def test_a_folder_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="--keys /nowhere is not a folder; make one for each host with baton keygen"):
        load_keys("/nowhere", is_insecure=False, role="node")


def test_without_keys_the_processes_of_a_user_find_the_same_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen threads start at once, and one makes the folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def start(number: int) -> CurveKeys | None:
        return load_keys(None, is_insecure=False, role="node")

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(start, range(16)))
    assert found[0] is not None
    assert found == found[:1] * 16
    assert os.listdir(tmp_path / "state" / "baton") == ["keys"]
    gateway = load_keys(None, is_insecure=False, role="gateway")
    assert gateway is not None
    assert gateway.public == found[0].gateway


def test_a_state_folder_that_cannot_be_written_is_refused_with_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"^cannot make the keys of this user: .*XDG_STATE_HOME.*--keys.*--insecure$"):
        load_keys(None, is_insecure=False, role="node")


def test_insecure_uses_no_keys() -> None:
    assert load_keys(None, is_insecure=True, role="gateway") is None
