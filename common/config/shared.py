"""Constants and options that several commands share, and the options that other systems have and Baton refuses by
name."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.config.batching import check_batching
from common.config.options import option
from common.config.scheduling import check_scheduling
from common.errors import ConfigError

Role = Literal["prefill", "decode"]
LogLevel = Literal["debug", "info", "warning", "error"]
LocalPrefill = Literal["never", "auto", "always"]

#: The model that comes with Baton, for those who name none.
SMALL_MODEL = str(Path(__file__).resolve().parents[2] / "scripts" / "models" / "small_model")
SMALL_MODEL_NAME = "baton-small"

#: Constants of scheduling, read by ``common.scheduling.new_token_ratio`` and
#: ``common.scheduling.in_batch_prefix_caching``.
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


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
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
class EngineOptions:
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


def check_engine(config: Any) -> None:
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
    check_revision(config)


def check_revision(config: Any) -> None:
    if config.revision is not None and Path(config.model).is_dir():
        raise ConfigError(f"--revision is for hub models, and --model {config.model} is a folder")
