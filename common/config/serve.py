"""Options of ``serve``, a whole service on one machine."""

from dataclasses import dataclass
from typing import Any

from common.config.batching import BatchingOptions
from common.config.gateway import AdviceOptions, HttpOptions, RoutingOptions, TracingOptions, check_http
from common.config.lora import LoraOptions, check_lora
from common.config.options import option, options_of
from common.config.scheduling import SchedulingOptions
from common.config.shared import (
    EngineOptions,
    ModelOptions,
    NodeHttpOptions,
    OrphanOptions,
    check_engine,
    check_node_http,
)
from common.config.tenancy import TenantOptions
from common.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeConfig(
    BatchingOptions,
    EngineOptions,
    LoraOptions,
    NodeHttpOptions,
    OrphanOptions,
    RoutingOptions,
    HttpOptions,
    AdviceOptions,
    TracingOptions,
    TenantOptions,
    SchedulingOptions,
    ModelOptions,
):
    prefill: int = option(1, "Number of prefill nodes; 0 with --local-prefill always.", minimum=0, maximum=256)
    decode: int = option(1, "Number of decode nodes.", minimum=1, maximum=256)
    workers: int = option(1, "Number of gateway processes; they share --port and the nodes.", minimum=1, maximum=64)
    control_port: int = option(
        0, "Port on which the gateway listens for nodes; 0 takes a free port.", minimum=0, maximum=65535
    )
    memory_fraction: float = option(
        0.8,
        "Share of free memory that the KV pools of all nodes together may take; on CUDA, of what weights, CUDA graphs "
        "and steps leave free.",
        minimum=0.001,
        maximum=0.95,
    )
    drain_timeout: float = option(
        2.0, "Seconds that requests in flight may still take after Ctrl-C or SIGTERM.", minimum=0, maximum=86_400
    )
    ready_timeout: float = option(
        900.0, "Seconds that nodes may take to become ready before serve gives up.", minimum=1
    )

    def __post_init__(self) -> None:
        check_engine(self)
        check_lora(self)
        check_node_http(self)
        check_node_ports(self)
        check_node_memory(self)
        check_http(self)
        check_local_prefill(self)
        if self.max_queued_requests == 0:
            raise ConfigError("--max-queued-requests 0 would make nodes refuse every request; give at least 1")


def check_node_ports(config: ServeConfig) -> None:
    last = (config.http_port or 0) + config.prefill + config.decode - 1
    if config.http_port and last > 65535:
        raise ConfigError(f"--http-port {config.http_port} is too high: the last node would get port {last}")


def check_node_memory(config: ServeConfig) -> None:
    num_nodes = config.prefill + config.decode
    least = options_of(ServeConfig)["memory_fraction"].minimum or 0.0  # which is that of a node
    if config.memory_fraction < least * num_nodes * (1 - 1e-9):
        raise ConfigError(
            f"--memory-fraction {config.memory_fraction:g} is too little for {num_nodes} nodes; give at least "
            f"{least * num_nodes:g}"
        )


def check_local_prefill(config: Any) -> None:
    if config.prefill == 0 and config.local_prefill != "always":
        raise ConfigError("--prefill 0 leaves no node to compute prompts: add --local-prefill always")
    if config.prefill > 0 and config.local_prefill == "always":
        raise ConfigError("--local-prefill always leaves prefill nodes without work: add --prefill 0")
