"""Folders with the keys of the control plane, one for each host.

    gateway.key           public key of the gateway
    gateway.key_secret    its secret, only on the gateway's host
    node.key_secret       secret of the nodes of this host
    nodes/HOST.key        public keys of the nodes that may connect to the gateway and to prefill nodes

The files are those of ``zmq.auth``. ``baton keygen`` makes folders for several hosts. On one machine, a folder of the
user is made at the first start of a process, so that gateway and nodes that are started by hand find each other.
"""

import os
import re
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import zmq.auth
from zmq.utils import z85

from common.errors import ConfigError, reason_of
from common.wire.curve import KEY_BYTES, CurveKeys

GATEWAY, NODE = "gateway", "node"
MAX_PERMITTED = 65_536
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def load_keys(keys: str | None, *, is_insecure: bool, role: Literal["gateway", "node"]) -> CurveKeys | None:
    """Return the keys of a process, or None with --insecure.

    Args:
        keys: value of ``--keys``: a folder, or the keys themselves as ``serve`` hands them to its children. None: the
            folder of this user, which is made if it does not exist.
    Raises:
        ConfigError: a file is missing, malformed or readable by others, or the folder cannot be made.
    """
    if is_insecure:
        return None
    if keys is None:
        return read_folder(_folder_of_user(), role)
    return CurveKeys.from_json(keys) if keys.startswith("{") else read_folder(Path(keys), role)


def read_folder(folder: Path, role: Literal["gateway", "node"]) -> CurveKeys:
    """Raises ConfigError as ``load_keys``."""
    if not os.path.isdir(folder):  # False in a folder that may not be searched, where the method raises
        raise ConfigError(f"--keys {folder} is not a folder; make one for each host with baton keygen")
    try:
        names = sorted(path for path in (folder / "nodes").iterdir() if path.suffix == ".key")
        is_gateways = role != GATEWAY or (folder / "gateway.key_secret").exists()
    except OSError as error:
        raise ConfigError(f"--keys {folder} cannot be read: {reason_of(error)}") from error
    if len(names) > MAX_PERMITTED:
        raise ConfigError(f"--keys {folder} permits more than {MAX_PERMITTED} nodes; remove files from {folder}/nodes")
    permitted = {_public(path): path.stem for path in names}
    if not is_gateways:
        raise ConfigError(
            f"--keys {folder} is the folder of a host without the gateway: it has no gateway.key_secret; start the "
            "gateway on the first host that baton keygen was given"
        )
    return CurveKeys(_secret(folder / f"{role}.key_secret"), _public(folder / "gateway.key"), permitted)


def write_folders(parent: Path, hosts: Sequence[str]) -> list[Path]:
    """Make a folder for each host in ``parent``, and permit its nodes in the folders that are there already.

    The gateway runs on the first host of a new parent.

    Raises:
        ConfigError: a host has a folder already, or its name is no file name.
    """
    known = sorted(path.parent for path in parent.glob("*/node.key_secret"))
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"the host {host!r} cannot be a file name: use letters, digits, dots, dashes, underscores"
            )
        if (parent / host).exists() or hosts.count(host) > 1:
            raise ConfigError(f"{parent / host} exists already; remove it, or choose another name")
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix="new.") as made:  # a failure leaves no folder without its keys
        folders = [Path(made) / host for host in hosts]
        for folder in folders:
            folder.mkdir(mode=0o700)
            (folder / "nodes").mkdir()
            _write_pair(folder, NODE).rename(folder / "nodes" / f"{folder.name}.key")
        everyone = [*known, *folders]
        if not known:
            _write_pair(folders[0], GATEWAY)
        for folder in everyone:
            for other in everyone:
                own = Path("nodes") / f"{other.name}.key"
                if folder is not other:  # it may permit an earlier key of this host
                    shutil.copy(other / own, folder / own)
            if not (folder / "gateway.key").exists():
                shutil.copy(everyone[0] / "gateway.key", folder / "gateway.key")
        return [folder.rename(parent / folder.name) for folder in folders]


def _folder_of_user() -> Path:
    """The folder of this user, made atomically if it does not exist: several processes may start at once."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        target = (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "baton" / "keys"
        if target.is_dir():
            return target
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="keys.") as made:
            write_folders(Path(made), ["local"])
            try:
                (Path(made) / "local").rename(target)
            except OSError:
                if not target.is_dir():  # otherwise another process has just made it
                    raise
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        raise ConfigError(
            f"cannot make the keys of this user: {error}; set XDG_STATE_HOME to a folder that can be written, or give"
            " keys made by baton keygen as --keys, or do without keys with --insecure"
        ) from None
    return target


def _write_pair(folder: Path, name: str) -> Path:
    """Write a new key pair and return the file of the public key."""
    public, secret = zmq.auth.create_certificates(folder, name)
    os.chmod(secret, 0o600)  # the folder has kept others out until now
    return Path(public)


def _public(path: Path) -> bytes:
    return _load(path, is_secret=False)


def _secret(path: Path) -> bytes:
    """Raises ConfigError: others can read the file. Root may share its files with the group of the process."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}; make keys with baton keygen") from None
    allowed = 0o640 if found.st_uid == 0 else 0o600
    if found.st_mode & 0o777 & ~allowed or found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"the key {path} can be read or replaced by others: chown it to this user, and chmod 600 it")
    return _load(path, is_secret=True)


def _load(path: Path, *, is_secret: bool) -> bytes:
    try:
        key = zmq.auth.load_certificate(path)[is_secret]
        if key is not None and len(decoded := z85.decode(key)) == KEY_BYTES:
            return decoded
    except OSError as error:
        reason = error.strerror or "it does not exist"
        raise ConfigError(f"cannot read the key {path}: {reason}; make keys with baton keygen") from None
    except (ValueError, KeyError, struct.error):
        pass
    raise ConfigError(f"{path} holds no key; make keys with baton keygen")
