"""Configuration of the gateway."""

from dataclasses import dataclass
from typing import Any

from common.config.options import option
from common.config.scheduling import SchedulingOptions, check_scheduling
from common.config.shared import LocalPrefill, ModelOptions, check_revision
from common.config.tenancy import TenantOptions, check_tenancy
from common.errors import ConfigError
from common.wire.address import check_brackets, check_reach


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What the gateway's router and admission can be told; the simulator takes the same."""

    local_prefill: LocalPrefill = option(
        "never",
        "Whether decode nodes compute prompts by themselves: never, auto (short ones) or always (which needs no "
        "prefill node).",
    )
    local_prefill_threshold: int = option(
        64,
        "With --local-prefill auto: prompts of which a decode node lacks fewer tokens than this are computed there.",
        minimum=1,
    )
    max_queued_requests: int | None = option(
        None, "Requests that may wait at a node (at the gateway: for each model) before the next gets 429.", minimum=0
    )
    gateway_lookahead: int = option(
        64,
        "Requests that the gateway sends out beyond what the decode nodes run at once, for each node that computes "
        "prompts; more of them wait in the gateway, in order. Fewer keep less on the nodes, and delay first tokens.",
        minimum=0,
    )
    starvation_bound: float = option(
        30.0, "Seconds of waiting after which a request counts as starved in the metrics.", minimum=0.001
    )
    request_timeout: float = option(
        600.0, "Seconds after which a request that names no deadline of its own ends in an error.", minimum=0.001
    )


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    host: str = option("127.0.0.1", "Address on which HTTP is served.")
    port: int = option(8000, "Port on which HTTP is served; 0 takes any free one.", minimum=0, maximum=65535)
    control_host: str = option("127.0.0.1", "Address on which the gateway listens for nodes.")
    api_key: str | None = option(
        None, "Key that clients must send as a bearer token. Better set by environment than here.", is_secret=True
    )
    also_serve: tuple[str, ...] = option(
        (),
        "A further model: its name in the API, and the folder or hub id of its tokenizer (a hub id may end in "
        "@REVISION). Its nodes are started with --served-model-name NAME. May be given more than once.",
        metavar="NAME=DIR_OR_ID",
    )
    chat_template: str | None = option(
        None, "File with a Jinja chat template for --model, in place of the model's own.", metavar="FILE"
    )
    max_body_bytes: int = option(8 << 20, "Largest HTTP body that is read; larger ones get 413.", minimum=1024)
    incremental_streaming_output: bool = option(
        False, "Streams of /generate carry only what is new, instead of all the text so far."
    )
    heartbeat_interval: float = option(2.0, "Seconds between two heartbeats of a node.", minimum=0.05, maximum=3600)
    heartbeat_timeout: float = option(
        30.0,
        "Seconds without a heartbeat after which a node counts as lost. Closed connections are noticed at once.",
        minimum=0.1,
    )


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(Routing, HttpOptions, TenantOptions, SchedulingOptions, ModelOptions):
    """What ``gateway`` runs with."""

    control_port: int = option(
        8001, "Port on which the gateway listens for nodes; 0 takes any free one.", minimum=0, maximum=65535
    )

    def __post_init__(self) -> None:
        check_http(self)


def also_served(config: Any) -> dict[str, str]:
    """Names and places of the models beside ``--model``.

    Raises:
        ConfigError: no ``NAME=PLACE``, or a name twice.
    """
    models: dict[str, str] = {}
    for text in config.also_serve:
        name, _, place = text.partition("=")
        if not name or not place:
            raise ConfigError(f"--also-serve must be NAME=DIR_OR_ID, not {text!r}")
        if name == config.served_name or name in models:
            raise ConfigError(f"--also-serve {text}: a model named {name} is served already")
        models[name] = place
    return models


def check_http(config: Any) -> None:
    check_revision(config)
    check_scheduling(config)
    check_tenancy(config)
    also_served(config)
    if config.heartbeat_timeout < 2 * config.heartbeat_interval:
        raise ConfigError("--heartbeat-timeout must be at least twice --heartbeat-interval")
    if config.port and config.port == config.control_port and config.host == config.control_host:
        raise ConfigError(f"--port and --control-port are both {config.port}")
    check_brackets("--host", config.host)
    if not config.api_key and config.tenant_keys is None:
        check_reach("--host", config.host, config.insecure, "set --api-key, or ")
    check_reach("--control-host", config.control_host, config.insecure)
