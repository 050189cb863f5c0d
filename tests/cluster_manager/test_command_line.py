"""The command lines and environments of processes on their hosts."""

import sys
from typing import Any

import pytest

from common.config.cli import parse
from common.config.gateway import GatewayConfig
from common.config.node import NodeConfig
from scripts.cluster_manager.command_line import Ports, ProcessSpec, argv, environment, fixed_ports, url, wanted_ports


def spec(role: Any = "decode", num_threads: int = 0, **values: Any) -> ProcessSpec:
    return ProcessSpec(name=f"{role}-3", role=role, values={"keys": "/keys", **values}, num_threads=num_threads)


def words(found: ProcessSpec) -> list[str]:
    return argv(found, address="10.0.0.3", ports=Ports(9000, 8001), gateway_file="/proc/self/fd/7")


def test_a_node_listens_at_the_address_of_its_host_and_reads_where_gateways_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_KEYS", "/keys")
    monkeypatch.setenv("BATON_CLUSTER_KEY", "c")
    executable, _, module, role, *rest = words(spec(page_size=4, num_threads=2))
    assert (executable, module, role) == (sys.executable, "scripts.serving.worker", "decode")
    config = parse(NodeConfig, rest, command="decode")
    assert (config.node_name, config.advertise_host, config.http_port) == ("decode-3", "10.0.0.3", 9000)
    assert (config.gateway_file, config.threads, config.page_size) == ("/proc/self/fd/7", 2, 4)


def test_with_etcd_a_node_gets_no_file() -> None:
    assert not [word for word in words(spec(etcd="http://10.0.0.9:2379")) if "gateway-file" in word]


def test_a_gateway_listens_for_nodes_at_the_address_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_KEYS", "/keys")
    monkeypatch.setenv("BATON_API_KEY", "k")
    config = parse(GatewayConfig, words(spec("gateway", host="0.0.0.0"))[3:], command="gateway")
    assert (config.host, config.port, config.control_host, config.control_port) == ("0.0.0.0", 9000, "10.0.0.3", 8001)


def test_secrets_are_those_of_the_host_and_options_are_not() -> None:
    host = {"BATON_API_KEY": "k", "BATON_PAGE_SIZE": "8", "BATON_CONFIG": "baton.toml", "HOME": "/root"}
    found = environment(spec(num_threads=2), host)
    assert {name: found.get(name) for name in host} == {
        "BATON_API_KEY": "k",
        "BATON_PAGE_SIZE": None,
        "BATON_CONFIG": None,
        "HOME": "/root",
    }
    assert (found["BATON_KEYS"], found["OMP_NUM_THREADS"]) == ("/keys", "2")


def test_a_drawn_key_replaces_only_a_missing_one() -> None:
    assert environment(spec("gateway"), {}, "drawn")["BATON_API_KEY"] == "drawn"
    assert environment(spec("gateway"), {"BATON_API_KEY": "k"}, "drawn")["BATON_API_KEY"] == "k"


def test_ports_are_any_unless_the_options_name_them() -> None:
    assert wanted_ports(spec("gateway")) == (8000, 0)
    assert wanted_ports(spec("gateway", port=0, control_port=8001)) == (0, 8001)
    assert wanted_ports(spec(http_port=9100)) == (9100, 0)


@pytest.mark.parametrize(
    ("found", "ports"),
    [
        (spec("gateway"), {8000}),
        (spec("gateway", port=0), set()),
        (spec("gateway", port=0, control_port=8001), {8001}),
        (spec(), set()),
        (spec(http_port=9100, data_port=9200), {9100, 9200}),
    ],
)
def test_every_port_that_the_options_name_is_fixed(found: ProcessSpec, ports: set[int]) -> None:
    assert fixed_ports(found) == ports


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "http://127.0.0.1:9000"),
        ({"host": "0.0.0.0"}, "http://10.0.0.3:9000"),
        ({"host": "::", "tls_cert": "/cert"}, "https://10.0.0.3:9000"),
    ],
)
def test_the_url_is_one_that_reaches_the_process(values: dict[str, str], expected: str) -> None:
    assert url(spec("gateway", **values), "10.0.0.3", Ports(9000)) == expected
