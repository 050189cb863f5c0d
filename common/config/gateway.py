"""Options of the gateway."""

import re
from dataclasses import dataclass
from typing import Any

from common.capacity import UTILIZATION
from common.config.access import AccessOptions, check_access
from common.config.discovery import DiscoveryOptions, check_discovery
from common.config.options import option
from common.config.scheduling import SchedulingOptions, check_scheduling, is_user_defined
from common.config.shared import (
    NEEDS_KEYS,
    DrainOptions,
    LocalPrefillMode,
    ModelOptions,
    Role,
    check_keys,
    check_revision,
)
from common.config.tenancy import TenantOptions, check_tenancy
from common.errors import ConfigError
from common.wire.address import check_reach, host_and_port, is_host, is_loopback, is_unspecified

#: Name, index and count of ``--group``.
GROUP = re.compile(r"([0-9a-f]{8,64}):([0-9]{1,3})/([0-9]{1,3})")


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    local_prefill: LocalPrefillMode = option(
        "never",
        "Whether decode nodes compute prompts themselves: never, auto (if that delays requests less, by the nodes' "
        "measurements) or always (without prefill nodes).",
    )
    local_prefill_threshold: int | None = option(
        None,
        "With --local-prefill auto: a decode node computes every prompt with fewer uncached tokens than this. Without "
        "it: the estimated delay decides.",
        minimum=1,
    )
    max_queued_requests: int | None = option(
        None,
        "Requests that may wait at a node, and at the gateway for each model; further ones get 429. Without it: 1,024 "
        "at a node, 512 at the gateway.",
        minimum=0,
    )
    max_dispatch_ahead: int = option(
        64,
        "Requests that the gateway sends beyond what the decode nodes run at once, per node that computes prompts; "
        "the others wait in the gateway, in order. A low value delays first tokens; with a high one, more requests are "
        "on nodes already when a more urgent one arrives.",
        minimum=0,
    )
    auto_roles: bool = option(
        False, "Let nodes change their role when the nodes of one role are full and the other role can spare one."
    )
    auto_roles_per_hour: int = option(
        6, "With --auto-roles: maximum number of changes in any hour, for each model.", minimum=1
    )
    starvation_bound: float = option(
        30.0, "Seconds of waiting after which the metrics count a request as starved.", minimum=0.001
    )
    refuse_hopeless: bool = option(
        False, "Refuse requests that are expected to miss their slo_ttft_ms, like those that would miss deadline_ms."
    )
    request_timeout: float = option(
        600.0, "Seconds after which a request without its own deadline ends with an error.", minimum=0.001, maximum=1e9
    )


@dataclass(frozen=True, kw_only=True)
class HttpOptions(AccessOptions):
    host: str = option("127.0.0.1", "Address of the HTTP server.")
    port: int = option(8000, "Port of the HTTP server; 0 takes a free port.", minimum=0, maximum=65535)
    control_host: str = option("127.0.0.1", "Address on which the gateway listens for nodes.")
    also_serve: tuple[str, ...] = option(
        (),
        "Another model to serve: its name in the API, and the folder or hub id of its tokenizer (a hub id may end in "
        "@REVISION). Start its nodes with --served-model-name NAME. May be given more than once.",
        metavar="NAME=DIR_OR_ID",
    )
    chat_template: str | None = option(
        None, "File with a Jinja chat template for --model, instead of the template of the model.", metavar="FILE"
    )
    tool_call_parser: str = option(
        "auto",
        "Format of the model's tool calls; auto detects it from the chat template, none leaves calls in the text.",
        metavar="NAME|auto|none",
    )
    reasoning_parser: str = option(
        "auto",
        "Format of the model's reasoning; auto detects it from the chat template, none leaves reasoning in the text.",
        metavar="NAME|auto|none",
    )
    max_unread_tokens: int = option(
        4_096,
        "Output tokens, log-probability alternatives included, that may wait for a client that reads slowly; beyond "
        "that, the request is paused on its decode node until the client has read them.",
        minimum=1,
    )
    strict_fields: bool = option(
        False, "Refuse request fields that have no effect, instead of naming them in a response header."
    )
    app_plugin: tuple[str, ...] = option(
        (),
        "Your own function, called with the FastAPI application before it starts; it may add middleware and routers. "
        "May be given more than once.",
        metavar="MODULE:NAME",
    )
    max_body_bytes: int = option(8 << 20, "Largest HTTP request body in bytes; larger ones get 413.", minimum=1024)
    max_stored_responses: int = option(
        1024,
        "Responses of /v1/responses that the gateway keeps in memory so that they can be continued; 0 keeps none.",
        minimum=0,
    )
    max_stored_response_bytes: int = option(
        64 << 20,
        "Total size of kept responses. Beyond it, the tenant with the most loses the least recently used ones.",
        minimum=0,
    )
    stored_response_ttl: float = option(86_400.0, "Seconds for which a response is kept after its last use.", minimum=1)
    idempotency_ttl: float = option(
        600.0, "Seconds for which a request with an Idempotency-Key or a rid is remembered after its end.", minimum=1
    )
    max_idempotent_results: int = option(
        1024, "Ended requests with a key that the gateway keeps in memory for retries; 0 keeps none.", minimum=0
    )
    max_idempotent_result_bytes: int = option(
        64 << 20,
        "Total size of kept requests with a key. Beyond it, the tenant with the most loses its oldest ones.",
        minimum=0,
    )
    retry_grace: float = option(
        10.0,
        "Seconds for which a request with a key continues after its client has disconnected; 0 ends it at once.",
        minimum=0,
        maximum=3600,
    )
    incremental_streaming_output: bool = option(
        False, "Send only new text in each event of a /generate stream, instead of all text so far."
    )
    sse_ping_interval: float = option(
        15.0,
        "Seconds of silence after which a stream gets a comment, which clients skip, so that no proxy takes its "
        "connection for dead; 0 sends none.",
        minimum=0,
        maximum=3600,
    )
    log_requests: bool = option(
        True, "Log one line for each output when it ends: ids, counts and times, never its text."
    )
    heartbeat_interval: float = option(1.0, "Seconds between two heartbeats of a node.", minimum=0.05, maximum=3600)
    node_timeout: float = option(
        5.0,
        "Seconds without a heartbeat after which a node counts as lost. A closed connection counts at once.",
        minimum=0.1,
        maximum=86_400,
    )
    recovery_timeout: float = option(
        60.0,
        "Seconds that an accepted request waits for nodes that can serve or continue it before it ends with an error.",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class AdviceOptions:
    """Objectives of requests, and how ``/v1/advice`` finds the nodes that the load needs."""

    slo_ttft_ms: float | None = option(
        None,
        "Objective in milliseconds for the first token, for requests without slo_ttft_ms. /v1/advice plans for it.",
        minimum=0.001,
    )
    slo_itl_ms: float | None = option(
        None,
        "Objective in milliseconds between two tokens, for requests without slo_itl_ms. /v1/advice plans for it.",
        minimum=0.001,
    )
    advice_window: float = option(60.0, "Seconds over which /v1/advice averages the load.", minimum=5, maximum=3600)
    advice_hold: float = option(
        300.0, "Seconds for which fewer nodes must have been enough before /v1/advice suggests fewer.", minimum=0
    )
    advice_utilization: float = option(
        UTILIZATION,
        "Share of a node's time, and of its largest batch, that /v1/advice plans to use; the rest is for bursts.",
        minimum=0.05,
        maximum=1.0,
    )


@dataclass(frozen=True, kw_only=True)
class TracingOptions:
    timeline_requests: int = option(
        1_000,
        "Number of ended requests whose timelines the gateway keeps for /v1/requests and /v1/trace; 0 keeps none.",
        minimum=0,
        maximum=100_000,
    )
    otlp_endpoint: str | None = option(
        None,
        "URL of an OpenTelemetry collector, such as http://localhost:4318, to which the spans of sampled requests are"
        " sent over HTTP (needs the extra otlp). Without it, nothing is exported.",
        metavar="URL",
    )
    trace_sample_rate: float = option(
        1.0,
        "Share of requests without a traceparent header whose spans are exported. With the header, its flag decides.",
        minimum=0.0,
        maximum=1.0,
    )


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(
    DrainOptions,
    RoutingOptions,
    HttpOptions,
    AdviceOptions,
    TracingOptions,
    TenantOptions,
    DiscoveryOptions,
    SchedulingOptions,
    ModelOptions,
):
    control_port: int = option(
        8001, "Port on which the gateway listens for nodes; 0 takes a free port.", minimum=0, maximum=65535
    )
    prefill: tuple[str, ...] = option(
        (),
        "Address of a prefill node that was started with --gateway listed: its --advertise-host and --data-port. May "
        "be given more than once.",
        metavar="HOST:PORT",
    )
    decode: tuple[str, ...] = option(
        (), "The same for a decode node. May be given more than once.", metavar="HOST:PORT"
    )
    advertise_control_host: str | None = option(
        None,
        "Address at which nodes of --etcd, --prefill and --decode reach --control-port. Without it: --control-host.",
        metavar="ADDRESS",
    )
    group: str | None = option(
        None,
        "One of several gateways behind one port, as serve --workers starts them: NAME:INDEX/COUNT, where NAME is the "
        "same hexadecimal number for all. It needs --listen-fd.",
        metavar="NAME:INDEX/COUNT",
    )
    listen_fd: int | None = option(
        None,
        "Number of a listening socket that the gateway inherits from the process that starts it, used in place of "
        "--host and --port.",
        minimum=3,
        metavar="FD",
    )

    def __post_init__(self) -> None:
        check_http(self)
        check_group(self)
        check_discovery(self)
        check_listed(self)
        check_announced(self)

    @property
    def listed_nodes(self) -> dict[str, Role]:
        """The roles of --prefill and --decode by address."""
        return {**dict.fromkeys(self.prefill, "prefill"), **dict.fromkeys(self.decode, "decode")}

    @property
    def announced_host(self) -> str:
        """Address at which nodes reach the control port."""
        return self.advertise_control_host or self.control_host


def check_listed(config: GatewayConfig) -> None:
    """Raises ConfigError: an address of --prefill or --decode is none, is given twice, or must not be dialled."""
    for flag, addresses in (("--prefill", config.prefill), ("--decode", config.decode)):
        for address in addresses:
            host, _ = host_and_port(address, flag)
            if not (is_loopback(host) or config.insecure or config.keys):
                remedy = f"{NEEDS_KEYS}connect without authentication with --insecure"
                raise ConfigError(f"{flag} {address} is on another machine: {remedy}")
            if (config.prefill + config.decode).count(address) > 1:
                raise ConfigError(f"--prefill and --decode name the node at {address} twice; leave one of them out")


def check_announced(config: GatewayConfig) -> None:
    """Raises ConfigError: nodes would be told an address that leads nowhere, or are told none."""
    if config.etcd is None and not config.listed_nodes:
        if config.advertise_control_host is not None:
            raise ConfigError("--advertise-control-host needs --etcd, --prefill or --decode, whose nodes are told it")
    elif is_unspecified(config.announced_host) or config.announced_host == "*":
        raise ConfigError(
            f"--control-host {config.control_host} means every address of this machine: give the one at which nodes "
            "reach it with --advertise-control-host"
        )
    elif config.announced_host.startswith("[") or not is_host(config.announced_host):
        flag = "--control-host" if config.advertise_control_host is None else "--advertise-control-host"
        raise ConfigError(
            f"{flag} {config.announced_host} is not an address that nodes can connect to; give a name or an IP address"
        )
    elif is_loopback(config.announced_host):
        far = (address for address in config.listed_nodes if not is_loopback(host_and_port(address, "")[0]))
        if (address := next(far, None)) is not None:
            raise ConfigError(
                f"the node at {address} cannot reach the control port at {config.announced_host}: give the address at "
                "which it can with --control-host, or with --advertise-control-host"
            )


def check_group(config: GatewayConfig) -> None:
    if config.group is None:
        return
    if not GROUP.fullmatch(config.group):
        raise ConfigError(f"--group must be NAME:INDEX/COUNT with a hexadecimal NAME, not {config.group!r}")
    if config.listen_fd is None:
        raise ConfigError("--group needs --listen-fd, the socket that the gateways share; serve --workers gives both")


def check_auto_roles(config: RoutingOptions) -> None:
    if config.auto_roles and config.local_prefill == "always":
        raise ConfigError("--auto-roles has no effect with --local-prefill always, which needs no prefill nodes")
    if not config.auto_roles and config.auto_roles_per_hour != RoutingOptions.auto_roles_per_hour:
        raise ConfigError("--auto-roles-per-hour has no effect without --auto-roles; add that")


def also_served(config: Any) -> dict[str, str]:
    """Return the folders or hub ids of the models of ``--also-serve``, by name.

    Raises:
        ConfigError: an entry is not NAME=DIR_OR_ID, or a name occurs twice.
    """
    models: dict[str, str] = {}
    for text in config.also_serve:
        name, _, place = text.partition("=")
        if not name or not place:
            raise ConfigError(f"--also-serve must be NAME=DIR_OR_ID, not {text!r}")
        if name == config.served_name or name in models:
            raise ConfigError(f"--also-serve {text}: another model has the name {name}; choose a different one")
        models[name] = place
    return models


def check_http(config: Any) -> None:
    check_revision(config)
    check_scheduling(config)
    check_tenancy(config)
    also_served(config)
    for spec in config.app_plugin:
        if not is_user_defined(spec):
            raise ConfigError(f"--app-plugin must be MODULE:NAME, not {spec!r}")
    check_auto_roles(config)
    if config.local_prefill_threshold is not None and config.local_prefill != "auto":
        raise ConfigError("--local-prefill-threshold has no effect without --local-prefill auto; add that")
    if config.otlp_endpoint is None and config.trace_sample_rate != TracingOptions.trace_sample_rate:
        raise ConfigError("--trace-sample-rate has no effect without --otlp-endpoint; add that")
    if config.node_timeout < 2 * config.heartbeat_interval:
        raise ConfigError("--node-timeout must be at least twice --heartbeat-interval")
    if config.port and config.port == config.control_port and config.host == config.control_host:
        raise ConfigError(f"--port and --control-port are both {config.port}; choose different ports")
    check_access(config)
    check_keys(config)
    check_reach("--control-host", config.control_host, config.insecure or bool(config.keys), NEEDS_KEYS)
