"""NIXL uses the devices of the interface that is named, and the back-end that is named."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.kv.kv_fakes import DECODE, PREFILL, MemfdStore

from common.errors import ConfigError
from common.wire.messages import Connect, LayoutMessage
from kv_transfer.transports.base import AttachError
from kv_transfer.transports.factory import TransportSettings, open_reader
from kv_transfer.transports.nixl import devices
from kv_transfer.transports.nixl.devices import VARIABLE, devices_of, restrict_to
from kv_transfer.transports.nixl.reader import NixlReader
from kv_transfer.transports.nixl.writer import NixlWriter


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(VARIABLE)


def test_the_interface_of_an_address_is_found_with_the_rdma_devices_behind_it(tmp_path: Path) -> None:
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / "lo" / "device" / "infiniband" / name).mkdir(parents=True)
    (tmp_path / "lo" / "dev_port").write_text("1\n")
    assert devices_of("127.0.0.1", tmp_path) == ["lo", "mlx5_0:2", "mlx5_1:2"]
    assert devices_of("localhost") == ["lo"]
    assert devices_of("192.0.2.1") == devices_of("no.such.host.invalid") == []


def test_the_rdma_devices_below_a_bond_and_its_vlan_are_found(tmp_path: Path) -> None:
    """As the kernel shows them: a VLAN ``lo`` on a bond of two ports of one card."""
    (tmp_path / "lo" / "lower_bond0").mkdir(parents=True)
    for port, name in enumerate(("eth0", "eth1")):
        (tmp_path / "bond0" / f"lower_{name}").mkdir(parents=True)
        (tmp_path / name / "device" / "infiniband" / "mlx5_bond_0").mkdir(parents=True)
        (tmp_path / name / "dev_port").write_text(f"{port}\n")
    assert devices_of("127.0.0.1", tmp_path) == ["lo", "mlx5_bond_0:1", "mlx5_bond_0:2"]


@pytest.mark.parametrize(("host", "has_rdma"), [("10.0.0.2", True), ("10.0.0.2", False), ("127.0.0.1", True)])
def test_ucx_is_not_kept_from_rdma_devices_whose_interface_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str, has_rdma: bool
) -> None:
    monkeypatch.setattr(devices, "INFINIBAND", tmp_path)
    monkeypatch.setattr(devices, "devices_of", lambda host: ["eth7"])
    if has_rdma:
        (tmp_path / "mlx5_0").mkdir()
    restrict_to(host)
    is_restricted = not has_rdma or host == "127.0.0.1"
    assert os.environ.get(VARIABLE) == ("eth7" if is_restricted else None)
    assert ("no RDMA device was found behind eth7" in caplog.text) != is_restricted


def test_an_ipv6_address_belongs_to_an_interface_too() -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    assert devices_of("::1") == ["lo"]


def test_an_interface_is_found_by_any_of_its_addresses_but_lo_only_by_loopback_addresses() -> None:
    """Other machines reach other addresses of ``lo`` through other interfaces."""
    code = "from kv_transfer.transports.nixl.devices import *; import sys; print(*map(devices_of, sys.argv[1:]))"
    added = ["127.0.0.1/8", "127.0.0.2/8", "127.0.0.3/8 label lo:1", "192.0.2.1/32"]
    shell = " && ".join(f"ip addr add dev lo {address}" for address in added) + ' || exit 9; exec "$@"'
    python = [sys.executable, "-c", code, "127.0.0.2", "127.0.0.3", "192.0.2.1"]
    words = ["unshare", "--map-root-user", "--net", "sh", "-c", shell, "sh", *python]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        found = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if found.returncode == 9 or found.stderr.startswith("unshare:"):
        pytest.skip("this system lets no process make a network namespace, or has no command ip")
    assert found.stdout == "['lo'] ['lo'] []\n", found.stderr


def test_ucx_is_restricted_to_the_interface_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "devices_of", lambda host: ["eth7", "mlx5_0:1"])
    for host in ("0.0.0.0", "::"):
        restrict_to(host)
        assert VARIABLE not in os.environ
    restrict_to("10.0.0.2")
    assert os.environ[VARIABLE] == "eth7,mlx5_0:1"


def test_a_choice_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "mlx5_3:1")
    restrict_to("10.0.0.2")
    assert os.environ[VARIABLE] == "mlx5_3:1"


def test_an_address_that_no_interface_has_restricts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    restrict_to("192.0.2.1")
    assert VARIABLE not in os.environ
    assert "no interface other than lo has the address 192.0.2.1" in caplog.text


def test_a_back_end_that_is_not_installed_is_refused_with_those_that_are() -> None:
    store = MemfdStore(2)
    with pytest.raises(ConfigError, match=r"--nixl-backend NONE is not one that NIXL has here: .*UCX"):
        open_reader(store, TransportSettings("nixl", nixl_backend="NONE"))
    store.close()


def test_a_back_end_that_does_not_work_on_this_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl = pytest.importorskip("nixl")

    def fail(*_: object) -> None:
        raise RuntimeError("NIXL_ERR_NOT_FOUND")

    monkeypatch.setattr(nixl.nixl_agent, "create_backend", fail)
    store = MemfdStore(2)
    with pytest.raises(ConfigError, match="--transport nixl cannot start --nixl-backend LIBFABRIC: NIXL_ERR_NOT_FOUND"):
        open_reader(store, TransportSettings("nixl", nixl_backend="LIBFABRIC"))
    store.close()


@pytest.mark.slow
def test_ucx_leaves_sighup_alone() -> None:
    """A node whose terminal is closed ends, with NIXL as without."""
    code = (
        "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "from support.kv.kv_fakes import MemfdStore\n"
        "from kv_transfer.transports.factory import TransportSettings, open_reader\n"
        "reader = open_reader(MemfdStore(2), TransportSettings('nixl'))\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == -signal.SIGHUP


def test_nodes_with_different_back_ends_do_not_attach() -> None:
    stores = [MemfdStore(2), MemfdStore(2)]
    writer, reader = NixlWriter(stores[0]), NixlReader(stores[1], DECODE)
    reader._backend = "OTHER"
    endpoint = reader.offer(PREFILL, 1)
    connect = Connect("d0", "model", 1, LayoutMessage.of(stores[1].layout), 2, "nixl", endpoint)
    with pytest.raises(AttachError, match="it has --nixl-backend OTHER, and this prefill node UCX"):
        writer.attach(DECODE, connect)
    for end in (writer, reader, *stores):
        end.close()  # type: ignore[attr-defined]
