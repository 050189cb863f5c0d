"""The configuration of every command: what can be set, what it defaults to, and which combinations cannot be.

Resolved once, at start, into one of the frozen classes at the end of this file (``GatewayConfig``, ``NodeConfig``,
``ServeConfig``) and never written again; a measured fact makes a new object with ``dataclasses.replace``. Where values
come from is told in ``common/config/options.py``; the command line itself is ``common/config/cli.py``. Options that users may know
from elsewhere and that do not work yet are listed here too, to be refused by name.
"""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.config.batching import Batching, check_batching
from common.config.options import option
from common.config.scheduling import SchedulingOptions, check_scheduling
from common.config.tenancy import TenantOptions, check_tenancy
from common.errors import ConfigError
from common.wire.address import check_brackets, check_reach, host_and_port

Role = Literal["prefill", "decode"]
LogLevel = Literal["debug", "info", "warning", "error"]
LocalPrefill = Literal["never", "auto", "always"]

#: The model that comes with Baton, for those who name none.
SMALL_MODEL = str(Path(__file__).resolve().parents[1] / "scripts" / "models" / "small_model")
SMALL_MODEL_NAME = "baton-small"

#: Constants of scheduling, read by ``common.scheduling.new_token_ratio`` and ``common.scheduling.in_batch_prefix_caching``.
SCHEDULING_VARIABLES = (
    "BATON_INIT_NEW_TOKEN_RATIO",
    "BATON_MIN_NEW_TOKEN_RATIO_FACTOR",
    "BATON_NEW_TOKEN_RATIO_DECAY_STEPS",
    "BATON_RETRACT_DECODE_STEPS",
    "BATON_CLIP_MAX_NEW_TOKENS_ESTIMATION",
    "BATON_IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD",
    "BATON_IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD",
)
#: Those that are no options: two of scripts/setup.sh, one of ``common.config.cli``, and the constants.
OTHER_VARIABLES = ("BATON_VENV", "BATON_TORCH_INDEX", "BATON_CONFIG", *SCHEDULING_VARIABLES)

#: Flags that users may know from elsewhere, and what to say about them as long as they have no effect.
NOT_YET: dict[str, str] = {
    "--tensor-parallel-size": "a node is one process on one device",
    "--tp-size": "a node is one process on one device",
    "--quantization": "weights are served as they are stored",
    "--speculative-algorithm": "every token is computed by the model itself",
    "--enable-lora": "only plain checkpoints are served",
}

#: Why a node cannot have ``--transport inprocess``.
IN_PROCESS = "joins nodes of one process, as tests and the simulator have them; nodes here are processes of their own"


# ---- options that several commands share ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Model:
    model: str = option(
        SMALL_MODEL, "Folder with a checkpoint in Hugging Face's layout, or a hub id.", metavar="DIR_OR_ID"
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    served_model_name: str | None = option(
        None, "Name of the model in the API; otherwise the hub id or the folder's name."
    )
    insecure: bool = option(
        False, "Allow addresses that other machines can reach although nothing there is authenticated yet."
    )
    log_level: LogLevel = option("info", "How much is logged. Prompts never are.")

    @property
    def served_name(self) -> str:
        """What the API calls the model."""
        if self.served_model_name:
            return self.served_model_name
        if self.model == SMALL_MODEL:
            return SMALL_MODEL_NAME
        return Path(self.model).resolve().name if Path(self.model).is_dir() else self.model


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
class _Http:
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
class _Engine:
    device: str = option("auto", "auto (CUDA where there is a GPU), cpu, cuda or cuda:N.", metavar="DEVICE")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Number format of weights and KV pages; auto takes the checkpoint's own."
    )
    threads: int | None = option(
        None,
        "Compute threads of a node; otherwise every core it may use (serve divides them).",
        minimum=1,
        maximum=1024,
    )
    attention_backend: str = option("auto", "Name of an attention backend; auto takes the fastest that fits.")
    transport: Literal["auto", "shm", "tcp", "nixl", "gloo", "nccl", "inprocess"] = option(
        "auto",
        "How KV pages travel: shm (shared memory, one machine), tcp, nixl (UCX; needs the extra nixl), gloo or nccl"
        " (torch.distributed's; nccl between CUDA devices); auto tries shm, nixl (only with a --data-interface that"
        " other machines reach) and tcp for each pair, and keeps the first that works. inprocess is for tests and the"
        " simulator: commands refuse it.",
    )
    record: str | None = option(
        None,
        "Write what every node is told and what it plans, for simulate --replay; prompts are in it. serve adds each "
        "node's name. No file is overwritten: a number is added.",
        metavar="FILE",
    )
    kv_checksum: bool = option(
        False,
        "Send a checksum with every KV page and verify it where the page arrives; damaged pages are sent again. One"
        " node of a pair that asks for it is enough.",
    )
    gpu_direct: bool = option(
        False,
        "With --transport nixl on CUDA: KV pages go from GPU memory to GPU memory (RDMA, or NVLink on one host), not"
        " through host memory. Has not been run on a GPU yet.",
    )
    cluster_key: str | None = option(
        None,
        "Secret that the nodes share and prove to each other on tcp, gloo and nccl data connections; offers of nixl are"
        " sealed with it. Better set by environment.",
        is_secret=True,
    )


# ---- the configurations ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(Routing, _Http, TenantOptions, SchedulingOptions, _Model):
    """What ``gateway`` runs with."""

    control_port: int = option(
        8001, "Port on which the gateway listens for nodes; 0 takes any free one.", minimum=0, maximum=65535
    )

    def __post_init__(self) -> None:
        _check_http(self)


@dataclass(frozen=True, kw_only=True)
class NodeConfig(Batching, _Engine, SchedulingOptions, _Model):
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
        _check_engine(self)
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


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Batching, _Engine, Routing, _Http, TenantOptions, SchedulingOptions, _Model):
    """What ``serve`` runs with: a gateway and nodes on one machine."""

    prefill: int = option(1, "Prefill nodes to start; 0 with --local-prefill always.", minimum=0, maximum=256)
    decode: int = option(1, "Decode nodes to start.", minimum=1, maximum=256)
    control_port: int = option(0, "Port on which the gateway listens for nodes; 0 takes any free one.", maximum=65535)
    memory_fraction: float = option(
        0.8,
        "Share of the device's free memory that the KV pools of all nodes together take at most.",
        minimum=0.001,
        maximum=0.95,
    )
    ready_timeout: float = option(900.0, "Seconds that nodes may take to load before serve gives up.", minimum=1)

    def __post_init__(self) -> None:
        _check_engine(self)
        _check_http(self)
        check_local_prefill(self)


# ---- rules between options ------------------------------------------------------------------------------------------


def _check_engine(config: Any) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, not {config.device!r}")
    if config.transport == "inprocess":
        raise ConfigError(f"--transport inprocess {IN_PROCESS}")
    if config.gpu_direct and (config.transport != "nixl" or config.device == "cpu"):
        raise ConfigError("--gpu-direct is NIXL's, between CUDA devices: add --transport nixl, and no --device cpu")
    check_scheduling(config)
    check_batching(config)
    if config.record and config.kv_checksum:
        raise ConfigError("--record holds no pages, so a replay cannot verify --kv-checksum: leave one of them out")
    _check_revision(config)


def check_local_prefill(config: Any) -> None:
    """Raises ConfigError: nobody would compute prompts, or prefill nodes would have none to compute."""
    if config.prefill == 0 and config.local_prefill != "always":
        raise ConfigError("--prefill 0 leaves nobody to compute prompts: add --local-prefill always")
    if config.prefill > 0 and config.local_prefill == "always":
        raise ConfigError("--local-prefill always leaves prefill nodes without work: add --prefill 0")


def _check_revision(config: Any) -> None:
    if config.revision is not None and Path(config.model).is_dir():
        raise ConfigError(f"--revision is for hub models, and --model {config.model} is a folder")


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


def _check_http(config: Any) -> None:
    _check_revision(config)
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
