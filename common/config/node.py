"""Configuration of prefill and decode nodes."""

import os
import platform
from dataclasses import dataclass

from common.config.batching import Batching
from common.config.options import option
from common.config.scheduling import SchedulingOptions
from common.config.shared import (
    EngineOptions,
    ModelOptions,
    Role,
    check_engine,
)
from common.errors import ConfigError
from common.wire.address import check_reach, host_and_port


@dataclass(frozen=True, kw_only=True)
class NodeConfig(Batching, EngineOptions, SchedulingOptions, ModelOptions):
    """What ``prefill_node`` and ``decode_node`` run with; ``role`` is which of them, and no flag."""

    role: Role = "prefill"
    gateway: str = option("127.0.0.1:8001", "Where the gateway listens for nodes.", metavar="HOST:PORT")
    name: str | None = option(
        None, "Name of this node, unique in the service and kept over restarts; otherwise role, host and process id."
    )
    advertise_host: str = option(
        "127.0.0.1", "Prefill nodes: the address on which they listen and under which decode nodes reach them."
    )
    data_port: int = option(
        0, "Prefill nodes: the port on which decode nodes reach them; 0 takes any free one.", minimum=0, maximum=65535
    )
    data_interface: str | None = option(
        None,
        "Decode nodes: the address on which KV pages arrive by tcp; otherwise --advertise-host.",
        metavar="ADDRESS",
    )
    max_queued_requests: int | None = option(None, "Requests that may wait here before the next is refused.", minimum=0)
    memory_fraction: float = option(
        0.4, "Share of the device's free memory that the KV pool takes at most.", minimum=0.001, maximum=0.95
    )

    def __post_init__(self) -> None:
        check_engine(self)
        host_and_port(self.gateway, "--gateway")
        if self.role == "decode" and self.data_port:
            raise ConfigError("--data-port is for prefill nodes: a decode node listens nowhere, it dials them")
        check_reach("--advertise-host", self.advertise_host, self.insecure)
        if self.data_interface is not None:
            if self.role == "prefill":
                raise ConfigError("--data-interface is for decode nodes: KV pages arrive there")
            if not self.cluster_key:
                check_reach("--data-interface", self.data_interface, self.insecure, "set --cluster-key, or ")

    @property
    def node_name(self) -> str:
        """``--name``, or one that no other node of the service has now."""
        return self.name or f"{self.role}-{platform.node()}-{os.getpid()}"

    @property
    def data_host(self) -> str:
        """Where a decode node listens for KV pages."""
        return self.data_interface or self.advertise_host
