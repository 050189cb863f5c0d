"""Options of prefill and decode nodes."""

import os
import platform
from dataclasses import dataclass
from typing import Any

from common.config.batching import BatchingOptions
from common.config.discovery import DiscoveryOptions, check_discovery
from common.config.lora import LoraOptions, check_lora
from common.config.options import option
from common.config.scheduling import SchedulingOptions
from common.config.shared import (
    NEEDS_KEYS,
    DrainOptions,
    EngineOptions,
    ModelOptions,
    NodeHttpOptions,
    OrphanOptions,
    Role,
    check_engine,
    check_node_http,
    parse_overrides,
)
from common.errors import ConfigError
from common.wire.address import check_reach, host_and_port, is_loopback, is_unspecified

DEFAULT_GATEWAY = "127.0.0.1:8001"
#: The value of --gateway of a node that waits for gateways to name it.
LISTED = "listed"
MAX_NAME = 256  # as messages take


@dataclass(frozen=True, kw_only=True)
class NodeConfig(
    BatchingOptions,
    EngineOptions,
    LoraOptions,
    DrainOptions,
    NodeHttpOptions,
    OrphanOptions,
    DiscoveryOptions,
    SchedulingOptions,
    ModelOptions,
):
    """Configuration of ``prefill`` and ``decode``, which is the same for both, since a node may change its role.

    ``role`` follows from the command; it has no flag.
    """

    role: Role = "prefill"
    gateway: str = option(
        DEFAULT_GATEWAY,
        "Address of the gateway's control port; several gateways are separated by commas. listed: wait for gateways "
        "that name --advertise-host and --data-port of this node with --prefill or --decode. With --etcd, gateways are "
        "found there instead.",
        metavar="HOST:PORT[,...]|listed",
    )
    gateway_file: str | None = option(
        None,
        "File with these addresses instead, one per line. It is read again every 2 s, so gateways can be added, moved "
        "and removed while the node runs.",
        metavar="FILE",
    )
    name: str | None = option(
        None, "Unique name of this node, the same after a restart. Without it: role, host and process id."
    )
    advertise_host: str = option(
        "127.0.0.1", "Address to listen on, at which decode nodes reach this node to get KV pages."
    )
    data_port: int = option(0, "Port to listen on for decode nodes; 0 takes a free port.", minimum=0, maximum=65535)
    data_interface: str | None = option(
        None,
        "Address to receive KV pages on while this is a decode node. Without it: --advertise-host.",
        metavar="ADDRESS",
    )
    max_queued_requests: int | None = option(
        None, "Requests that may wait at this node; further ones are refused. Without it: 1,024.", minimum=1
    )
    node_timeout: float = option(
        5.0,
        "Seconds of silence after which the connection to another node, or to the gateway, is closed.",
        minimum=0.1,
        maximum=86_400,
    )
    memory_fraction: float = option(
        0.4,
        "Share of free memory that the KV pool may take; on CUDA, of what weights, CUDA graphs and steps leave free.",
        minimum=0.001,
        maximum=0.95,
    )

    def __post_init__(self) -> None:
        check_engine(self)
        check_lora(self)
        check_node_http(self)
        check_discovery(self)
        if len(self.name or "") > MAX_NAME:
            raise ConfigError(f"--name has {len(self.name or '')} characters; give at most {MAX_NAME}")
        sources = {
            "--gateway": self.gateway != DEFAULT_GATEWAY,
            "--etcd": self.etcd,
            "--gateway-file": self.gateway_file,
        }
        given = [flag for flag, value in sources.items() if value]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both say where gateways are; give one of them")
        if self.is_listed and not self.data_port:
            raise ConfigError(
                "--gateway listed needs --data-port, the port that gateways name with --prefill or --decode"
            )
        for address in self.gateways:
            self.check_gateway(address)
        if len(set(self.gateways)) < len(self.gateways):
            raise ConfigError(f"--gateway {self.gateway} names a gateway twice; leave one of them out")
        check_reach("--advertise-host", self.advertise_host, self.insecure or bool(self.keys), NEEDS_KEYS)
        self._check_told_addresses()
        if not self.cluster_key:
            flag = "--data-interface" if self.data_interface else "--advertise-host"
            check_reach(flag, self.data_host, self.insecure, "set --cluster-key, which KV pages need, or ")

    def _check_told_addresses(self) -> None:
        """Raises ConfigError: other nodes would be told an address that leads nowhere. NIXL tells its own ones."""
        told = {"--advertise-host": self.advertise_host}
        if self.data_interface and self.transport != "nixl":
            told["--data-interface"] = self.data_interface
        for flag, host in told.items():
            if is_unspecified(host):
                raise ConfigError(
                    f"{flag} {host} means every address of this machine: give the one at which other nodes reach it"
                )

    @property
    def is_listed(self) -> bool:
        """Whether gateways name this node, and not the reverse."""
        return self.gateway == LISTED

    @property
    def gateways(self) -> tuple[str, ...]:
        return () if self.is_listed else tuple(self.gateway.split(","))

    def check_gateway(self, address: str) -> None:
        """Raises ConfigError: this is not the address of a gateway to which this node may connect."""
        gateway_host, _ = host_and_port(address, "--gateway")
        if not (is_loopback(gateway_host) or self.insecure or self.keys):
            raise ConfigError(
                f"--gateway {address} is on another machine: {NEEDS_KEYS}connect without authentication with --insecure"
            )

    @property
    def is_retracted_by_priority(self) -> bool:
        return self.retraction_policy == "priority" or (
            self.retraction_policy == "auto" and self.enable_priority_scheduling
        )

    @property
    def overrides(self) -> dict[str, Any]:
        """Keys of config.json that have other values than in the file."""
        return parse_overrides(self.hf_overrides)

    @property
    def node_name(self) -> str:
        return self.name or f"{self.role}-{platform.node()}-{os.getpid()}"

    @property
    def data_host(self) -> str:
        """Address on which a decode node receives KV pages."""
        return self.data_interface or self.advertise_host
