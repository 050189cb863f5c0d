"""The command line and the environment of a process, from its group's options and the host where it was placed."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from common.config.cli import CLASSES as COMMANDS
from common.config.options import options_of, to_flags
from common.system.python_environ import python_environ
from common.wire.address import in_url, is_unspecified
from scripts.cluster_manager.config import CLASSES, Role


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The process that an actor runs.

    Attributes:
        values: options by the names of their fields.
        num_threads: compute threads of a node on CPUs; 0 leaves them to it.
    """

    name: str
    role: Role
    values: dict[str, Any]
    num_threads: int = 0


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of one process on its host, which it keeps when it is started again.

    Attributes:
        http: of the gateway's API, or of a node's own ``/health``.
        control: of a gateway.
    """

    http: int
    control: int = 0


def wanted_ports(spec: ProcessSpec) -> tuple[int, int]:
    """The HTTP port and the control port that the options name; 0 where any will do."""
    if spec.role == "gateway":
        return spec.values.get("port", 8000), spec.values.get("control_port", 0)
    return spec.values.get("http_port") or 0, 0


def fixed_ports(spec: ProcessSpec) -> frozenset[int]:
    """All ports that the options name: another process that has one of them needs another host."""
    ports = {*wanted_ports(spec), 0 if spec.role == "gateway" else spec.values.get("data_port", 0)}
    return frozenset(ports - {0})


def drain_timeout_s(values: Mapping[str, Any]) -> float:
    """The time that a process with these options drains."""
    return float(values.get("drain_timeout", 30.0))


def http_host(spec: ProcessSpec) -> str:
    """The address on which the process serves HTTP."""
    name = "host" if spec.role == "gateway" else "http_host"
    return str(spec.values.get(name, "127.0.0.1"))


def argv(spec: ProcessSpec, *, address: str, ports: Ports, gateway_file: str) -> list[str]:
    """The command line of a process.

    Args:
        address: of the host, at which processes on other hosts reach this one.
        gateway_file: names the gateways to a node, unless it finds them through etcd.
    """
    values = dict(spec.values)
    if spec.role == "gateway":
        values |= {"control_host": address, "port": ports.http, "control_port": ports.control}
        return [sys.executable, "-m", "gateway", *to_flags(CLASSES["gateway"], values)]
    values |= {"name": spec.name, "advertise_host": address, "http_port": ports.http}
    if values.get("etcd") is None:
        values["gateway_file"] = gateway_file
    if spec.num_threads:
        values.setdefault("threads", spec.num_threads)
    return [sys.executable, "-m", "scripts.serving.worker", spec.role, *to_flags(CLASSES[spec.role], values)]


def environment(spec: ProcessSpec, inherited: Mapping[str, str], api_key: str = "") -> dict[str, str]:
    """The environment of ``ray start`` on the host, which has the secrets; options travel on the command line.

    Args:
        api_key: replaces ``BATON_API_KEY`` if that is not set.
    """
    options = {found.env: found for cls in COMMANDS.values() for found in options_of(cls).values()}
    kept = {name: value for name, value in inherited.items() if name not in options or options[name].is_secret}
    kept.pop("BATON_CONFIG", None)
    kept = python_environ(kept) | {"PYTHONUNBUFFERED": "1"}
    kept["OMP_NUM_THREADS"] = str(spec.values.get("threads") or spec.num_threads or 1)
    if spec.values.get("keys"):
        kept["BATON_KEYS"] = spec.values["keys"]
    if api_key and not kept.get("BATON_API_KEY"):
        kept["BATON_API_KEY"] = api_key
    return kept


def url(spec: ProcessSpec, address: str, ports: Ports) -> str:
    """Where clients, or probes, reach the process; at the host's address if it serves on every interface."""
    host = http_host(spec)
    scheme = "https" if spec.values.get("tls_cert") else "http"
    return f"{scheme}://{in_url(address if is_unspecified(host) else host)}:{ports.http}"
