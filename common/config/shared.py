"""Options and constants of more than one command."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.config.batching import check_batching
from common.config.options import check_unset, option
from common.config.scheduling import check_scheduling
from common.errors import ConfigError
from common.wire.address import check_host

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]
LocalPrefillMode = Literal["never", "auto", "always"]
WeightDtype = Literal["auto", "int8", "int4"]
ModelImplementation = Literal["auto", "native", "transformers"]
#: Values of ``--load-format``. Others name formats that are not read, and are refused by ``check_model_source``.
LOAD_FORMATS = ("auto", "safetensors", "dummy")

#: The small model of the repository, the default of --model.
SMALL_MODEL = str(Path(__file__).resolve().parents[2] / "scripts" / "models" / "small_model")
SMALL_MODEL_NAME = "baton-small"

#: Variables that ``common.scheduling.in_batch_prefix_caching`` reads.
SCHEDULING_VARIABLES = (
    "BATON_IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD",
    "BATON_IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD",
)
#: BATON_* variables that are not options: two of scripts/setup.sh, one each of ``common.config.cli`` and
#: ``common.engine.cpu.targets``, and those above.
OTHER_VARIABLES = ("BATON_VENV", "BATON_TORCH_INDEX", "BATON_CONFIG", "BATON_CPU_TARGET", *SCHEDULING_VARIABLES)

#: Largest length of ``--weight-version``, which must fit into a control message beside the model's digest.
MAX_WEIGHT_VERSION = 128

#: What makes an address of the control plane safe; see ``common.wire.address.check_reach``.
NEEDS_KEYS = "give it keys of baton keygen with --keys, or "

#: The back-end of NIXL whose fences are known; see ``kv_transfer.transports.nixl.agent``.
UCX = "UCX"

#: Why nodes refuse ``--weight-dtype`` on CUDA.
ONLY_ON_CPUS = "runs on CPUs only so far; add --device cpu"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    model: str = option(
        SMALL_MODEL, "Folder with a checkpoint in the Hugging Face layout, or a hub id.", metavar="DIR_OR_ID"
    )
    revision: str | None = option(None, "Branch, tag or commit of a model from the Hugging Face hub.")
    served_model_name: str | None = option(
        None, "Name of the model in the API. Without it: the hub id, or the name of the folder."
    )
    tokenizer: str | None = option(
        None,
        "Folder or hub id of the tokenizer and the chat template. Without it: those of the model. The gateway and all"
        " nodes must agree.",
        metavar="DIR_OR_ID",
    )
    keys: str | None = option(
        None,
        "Folder with the keys of the control plane, made by baton keygen; needed between machines. Without it: serve "
        "makes new keys at every start, and other commands use a folder of this user, made at the first start.",
        metavar="DIR",
        is_secret=True,  # serve hands on the keys themselves, in the environment
    )
    insecure: bool = option(
        False,
        "Use no keys: any process that can reach a port can then send requests, impersonate a node or the gateway, and "
        "read prompts and answers. Allows addresses that other machines can reach.",
    )
    log_level: LogLevel = option("info", "Least severe messages to log. Prompts are never logged.")
    log_format: LogFormat = option("console", "Format of log lines: text for people, or one JSON object per line.")

    @property
    def served_name(self) -> str:
        if self.served_model_name:
            return self.served_model_name
        if self.model == SMALL_MODEL:
            return SMALL_MODEL_NAME
        folder = Path(os.path.expanduser(self.model))
        return folder.resolve().name if os.path.isdir(folder) else self.model


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    device: str = option(
        "auto", "Device to compute on: auto (CUDA if there is a GPU), cpu, cuda or cuda:N.", metavar="DEVICE"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Number format of weights and KV pages; auto takes the format of the checkpoint."
    )
    model_impl: ModelImplementation = option(
        "auto",
        "Implementation of the model: native (Baton's own decoder, for the families that it knows), transformers (the"
        " model's class in the transformers library; needs the extra transformers), or auto: native if possible, else"
        " transformers. All nodes of a model must agree.",
    )
    trust_remote_code: bool = option(
        False,
        "Run Python code that comes with the checkpoint, on every node, with the rights of this user. Only for models"
        " that transformers does not include, and only from sources that you would trust to run programs here.",
    )
    hf_overrides: str | None = option(
        None,
        "JSON object with keys of config.json whose values it replaces. All nodes of a model must agree.",
        metavar="JSON",
    )
    load_format: str = option(
        "auto",
        "Where the weights come from: auto and safetensors read *.safetensors files; dummy draws random numbers, the"
        " same on all nodes, for benchmarks with config.json and tokenizer.json alone.",
        metavar="auto|safetensors|dummy",
    )
    weight_dtype: WeightDtype = option(
        "auto",
        "Number format of weight matrices: int8 (one scale per output) or int4 (one scale per group of 32 to 128"
        " inputs) reads half or a quarter of the bytes of bfloat16 in every step, and changes answers slightly; auto"
        " uses --dtype. All nodes of a model must agree. CPUs only so far.",
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "int8"] = option(
        "auto",
        "Number format of KV pages: auto uses that of the weights; fp8 (the same as fp8_e4m3, for GPUs) and int8 (for"
        " CPUs) take half the memory of 16 bits, with a scale for each key and value. Prefill and decode nodes"
        " must agree.",
    )
    weight_version: str | None = option(
        None,
        "Name that identifies the weights. Without it: a hash of the weight files. KV pages go only between nodes with"
        " the same weight version.",
        metavar="NAME",
    )
    tp: int = option(
        1,
        "Tensor parallelism: number of processes (ranks) that share the model of a node. It must divide the number of "
        "attention heads and the intermediate size, and be a divisor or a multiple of the number of KV heads. A model "
        "computed by transformers needs a tensor-parallel plan there. On CUDA, each rank has its own device, starting "
        "with --device.",
        minimum=1,
        maximum=64,
    )
    threads: int | None = option(
        None,
        "Compute threads of a node, divided among its ranks; on CPUs at most one per core. Without it: one per core; "
        "serve divides the cores among its nodes.",
        minimum=1,
        maximum=1024,
    )
    attention_backend: str = option(
        "auto",
        "Attention backend: triton (CUDA), flash-attn (triton with FlashAttention-4 for long prompts; needs the extra "
        "flash-attn), torch, cpu or reference; auto uses cpu on CPUs, triton on CUDA (torch if triton is missing).",
    )
    disable_overlap_schedule: bool = option(
        False,
        "Plan a step only after the previous one has ended. Without it, a node on CUDA plans the next step while one "
        "runs; on CPUs this option has no effect.",
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "Largest batch of decode rows for which a node on CUDA captures a CUDA graph at start; larger batches run "
        "eagerly. Without it: as many requests as the node runs at once, at most 256.",
        minimum=1,
        maximum=4096,
    )
    disable_cuda_graph: bool = option(False, "Capture no CUDA graphs: run every step of a node on CUDA eagerly.")
    transport: Literal["auto", "shm", "cuda-ipc", "tcp", "nixl", "gloo", "nccl"] = option(
        "auto",
        "Transport of KV pages: shm (shared memory, on one machine), cuda-ipc (between GPUs of one machine), tcp, nixl "
        "(UCX; needs the extra nixl), gloo or nccl (torch.distributed; nccl between CUDA devices). auto tries cuda-ipc "
        "(only on CUDA), shm, nixl (except at a loopback address) and tcp for each pair of nodes, and uses the first "
        "that works.",
    )
    record: str | None = option(
        None,
        "Record the events and plans of a node in this file, prompts included, for simulate --replay. serve appends the"
        " name of each node. An existing file is not overwritten: a number is appended to the name.",
        metavar="FILE",
    )
    profile_dir: str | None = option(
        None,
        "Folder for traces of torch's profiler, which POST /start_profile and /stop_profile at the gateway start and "
        "stop. Without it, they are refused.",
        metavar="DIR",
    )
    kv_checksum: Literal["auto", "all", "sampled", "off"] = option(
        "auto",
        "Which KV pages are sent with a checksum and verified on arrival; damaged pages are sent again. If the nodes of"
        " a pair differ, the stricter setting applies. auto: all pages of a pool in host memory, one in 16 of a pool on"
        " a device, none with --record.",
    )
    gpu_direct: bool = option(
        False,
        "With --transport nixl, or auto between machines, on CUDA: transfer KV pages directly between GPU memories"
        " (RDMA, or NVLink on one host) instead of through host memory. Tested with two nodes on one GPU.",
    )
    nixl_backend: str = option(
        UCX,
        "NIXL's backend for --transport nixl: UCX, LIBFABRIC or any other that is installed. Only UCX has been tested; "
        "with others, pages granted to a prefill node on another host stay in quarantine if that node dies.",
        metavar="NAME",
    )
    cluster_key: str | None = option(
        None,
        "Secret shared by all nodes. It authenticates tcp, gloo and nccl data connections, and the addresses that nixl"
        " exchanges. Set it in the environment to keep it out of the process list.",
        is_secret=True,
    )


@dataclass(frozen=True, kw_only=True)
class DrainOptions:
    drain_timeout: float = option(
        30.0,
        "Seconds that requests in flight may still take after SIGTERM. Meanwhile a node moves them to other nodes, and "
        "the gateway refuses new ones.",
        minimum=0,
        maximum=86_400,
    )


@dataclass(frozen=True, kw_only=True)
class OrphanOptions:
    orphan_timeout: float = option(
        10.0,
        "Seconds for which requests with a key continue, and their outputs are kept, after their gateway is lost.",
        minimum=0,
        maximum=3600,
    )


@dataclass(frozen=True, kw_only=True)
class NodeHttpOptions:
    """Where each prefill and decode node serves its own ``/health`` and ``/metrics``."""

    http_host: str = option(
        "127.0.0.1",
        "Address on which each node serves its own /health and /metrics. They can be read there without a key.",
    )
    http_port: int | None = option(
        0,
        "Port on which each node serves its own /health and /metrics: 0 takes a free port, none serves neither. serve"
        " gives its first node this port, the next node the next one, and so on.",
        minimum=0,
        maximum=65535,
        metavar="INT|none",
    )
    health_timeout: float = option(
        10.0,
        "Seconds that a turn of a node's event loop, or one step, may take before its /health answers 503. Must be"
        " longer than the longest step.",
        minimum=2,
    )


def check_node_http(config: NodeHttpOptions) -> None:
    check_host("--http-host", config.http_host)
    if config.http_port is None:
        check_unset(config, ("http_host", "health_timeout"), "has no effect with --http-port none; leave one out")


def check_engine(config: Any) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, not {config.device!r}")
    if config.gpu_direct and (config.transport not in ("nixl", "auto") or config.device == "cpu"):
        raise ConfigError(
            "--gpu-direct needs --transport nixl or auto, and CUDA: give --transport nixl, and leave out --device cpu"
        )
    if config.nixl_backend != UCX and config.transport not in ("nixl", "auto"):
        raise ConfigError(f"--nixl-backend has no effect with --transport {config.transport}; leave one out")
    if config.transport == "cuda-ipc" and config.device == "cpu":
        raise ConfigError("--transport cuda-ipc needs CUDA: leave out --device cpu, or use --transport shm")
    if config.weight_dtype != "auto" and config.device.startswith("cuda"):
        raise ConfigError(f"--weight-dtype {config.weight_dtype} {ONLY_ON_CPUS}")
    check_model_source(config)
    if config.cuda_graph_max_bs is not None:
        if config.disable_cuda_graph:
            raise ConfigError("--cuda-graph-max-bs has no effect with --disable-cuda-graph; leave one out")
        if config.device == "cpu":
            raise ConfigError("--cuda-graph-max-bs: there are no CUDA graphs on a CPU; leave out this or --device cpu")
    if config.weight_version is not None and not 0 < len(config.weight_version) <= MAX_WEIGHT_VERSION:
        raise ConfigError(
            f"--weight-version must have 1 to {MAX_WEIGHT_VERSION} characters, not {len(config.weight_version)}"
        )
    check_keys(config)
    check_scheduling(config)
    check_batching(config)
    if config.record and config.kv_checksum not in ("auto", "off"):
        raise ConfigError(
            "--record and --kv-checksum exclude each other: a recording holds no pages to verify; leave one out"
        )
    check_revision(config)


def check_model_source(config: EngineOptions) -> None:
    if config.load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"--load-format {config.load_format}: only safetensors files are read; convert the checkpoint, and give one"
            f" of {', '.join(LOAD_FORMATS)}"
        )
    if config.model_impl == "native" and config.trust_remote_code:
        raise ConfigError("--trust-remote-code has no effect with --model-impl native; leave one out")
    parse_overrides(config.hf_overrides)


def parse_overrides(given: str | None) -> dict[str, Any]:
    """Return the keys of ``--hf-overrides``. Raises ConfigError: it is no JSON object."""
    try:
        overrides = json.loads(given or "{}")
    except ValueError as error:
        raise ConfigError(f"--hf-overrides: not JSON ({error})") from error
    if not isinstance(overrides, dict):
        raise ConfigError("--hf-overrides must be a JSON object, such as '{\"max_position_embeddings\": 8192}'")
    return overrides


def check_keys(config: ModelOptions) -> None:
    if config.keys and config.insecure:
        raise ConfigError("--keys and --insecure exclude each other: --insecure uses no keys; leave one out")


def check_revision(config: ModelOptions) -> None:
    if config.revision is not None and os.path.isdir(os.path.expanduser(config.model)):
        raise ConfigError(f"--revision is for hub models, but --model {config.model} is a folder; leave one out")
