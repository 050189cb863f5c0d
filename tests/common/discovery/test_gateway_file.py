"""Nodes follow a file that names the gateways."""

import os
from pathlib import Path

import pytest
from support.waiting import until

from common.config.node import NodeConfig
from common.discovery import gateway_directory
from common.discovery.gateway_directory import FileGateways
from common.errors import ConfigError

FIRST, SECOND = "127.0.0.1:8001", "127.0.0.1:8002"


@pytest.fixture(autouse=True)
def _ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_directory, "POLL_S", 0.01)


def test_the_addresses_are_those_that_the_file_names_now(tmp_path: Path) -> None:
    path = tmp_path / "gateways"
    with FileGateways(path, NodeConfig().check_gateway) as directory:
        assert directory.addresses() == ()
        path.write_text(f"{FIRST}\n\n  {SECOND}\n{FIRST}\n")
        until(lambda: directory.addresses() == (FIRST, SECOND))
        path.write_text(SECOND)
        until(lambda: directory.addresses() == (SECOND,))


def test_the_last_addresses_stand_while_the_file_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, file, other = (tmp_path / name for name in ("gateways", "file", "other"))
    file.write_text(FIRST)
    path.symlink_to(file)
    other.symlink_to(tmp_path)
    with FileGateways(path, NodeConfig().check_gateway) as directory:
        until(lambda: directory.addresses() == (FIRST,))
        other.replace(path)  # at once: for a moment without a file, there would be no gateways
        until(lambda: f"{path} cannot be read: Is a directory; the gateways known so far are kept" in caplog.text)
        assert directory.addresses() == (FIRST,)


def test_a_named_pipe_is_refused_and_does_not_hold_up_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gateways"
    os.mkfifo(path)
    with FileGateways(path, NodeConfig().check_gateway) as directory:
        until(lambda: f"{path} cannot be read: it is a named pipe; name a regular file" in caplog.text)
        assert directory.addresses() == ()


def test_an_address_to_which_the_node_must_not_connect_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gateways"
    path.write_text(f"10.0.0.1:8001\nnonsense\n{SECOND}\n")
    with FileGateways(path, NodeConfig().check_gateway) as directory:
        until(lambda: directory.addresses() == (SECOND,))
    assert "10.0.0.1:8001 is on another machine" in caplog.text
    assert "must be HOST:PORT, not 'nonsense'" in caplog.text


@pytest.mark.parametrize("other", [{"gateway": SECOND}, {"etcd": "http://127.0.0.1:2379"}])
def test_only_one_place_may_say_where_gateways_are(other: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="and --gateway-file both say where gateways are"):
        NodeConfig(gateway_file="gateways", **other)  # type: ignore[arg-type]
