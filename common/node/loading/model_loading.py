"""Loads the model of a node, and makes its KV pool. Heavy modules are imported only here, when they are needed."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from common.cache.page_layout import PageLayout
from common.cache.window_pages import LayerGroups
from common.config.batching import parse_window_ratio
from common.config.node import NodeConfig
from common.config.shared import ONLY_ON_CPUS
from common.errors import ConfigError
from common.model_folder import find_checkpoint, find_tokenizer
from common.node.loading.device_plan import (
    DeviceReserve,
    check_left,
    graph_conflict,
    pages_on_device,
    plan_graphs,
    plan_reserve,
)
from common.node.loading.end_tokens import tokenizer_end_ids
from common.node.loading.memory_plan import (
    Capacity,
    MemoryLayout,
    attention_bytes,
    auto_window_ratio,
    free_bytes,
    num_pages_that_fit,
    num_window_pages,
    plan_capacity,
)
from common.node.tensor_parallel.channel import LoadModel
from common.node.tensor_parallel.rank_processes import RankProcesses
from common.reminder import Reminder
from common.system.cpu_cores import usable_cores

if TYPE_CHECKING:
    from common.engine.executor import TorchExecutor
    from common.engine.kv_pool import KVPool
    from common.engine.models.base_config import BaseModelConfig
    from common.engine.models.implementation import ModelSource

log = logging.getLogger(__name__)

#: Shapes that oneDNN and torch's layer over it cache. The default is 1,024 each, at up to a megabyte: prompts of every
#: length would make a node grow by a gigabyte. Preparing a shape again takes about a millisecond.
SHAPE_CACHE = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}

#: The longest time that a start spends on touching KV pages, so that the kernel need not provide them at their first
#: use, which costs a prompt about a hundredth of its time. Pages with low numbers are touched first, and are used first
#: and most.
POPULATE_S = 0.5


def load_model(config: NodeConfig, ranks: RankProcesses) -> "tuple[BaseModelConfig, TorchExecutor, Capacity]":
    """Load the model and make the KV pool.

    Args:
        ranks: not started yet; they load the other parts of the model if there is more than one.

    Raises:
        ConfigError: the model cannot be loaded, or its KV pool does not fit.
    """
    for name, value in SHAPE_CACHE.items():  # read when torch is loaded
        os.environ.setdefault(name, value)
    model = _load_model_config(config)
    device = rank_device(config)
    if config.tp > 1:
        check_ranks(model, config.tp, device)
    if config.weight_dtype != "auto" and device != "cpu":
        raise ConfigError(f"--weight-dtype {config.weight_dtype} {ONLY_ON_CPUS}")
    config = with_window_ratio(config, model, device)
    groups = layer_groups(config, model)
    layout = memory_layout(config, model, device)
    capacity = plan_capacity(
        config,
        layout,
        device=device,
        context_length=model.context_length,
        crossover_tokens=model.crossover_tokens,
        window=model.window,
    )
    num_window_pages(config, groups, capacity, capacity.num_pages)  # refuses too few before the weights are read
    batch_sizes = _plan_graphs(config, model, layout, device, capacity)
    reserve = plan_reserve(config, model, layout, capacity, batch_sizes)
    num_fitting = pages_of(config, layout, capacity, device, reserve, num_heads=model.num_heads)
    num_fitting()  # refuse a pool that can never fit before the weights are read
    from common.engine.factory import load_executor

    num_threads = max(1, compute_threads(config, device) // config.tp)
    ranks.start(_load_message(config, model, device, num_threads))

    def num_pages() -> int:
        ranks.wait_until_loaded()
        return num_fitting()

    executor = load_executor(
        model,
        device=device,
        dtype=config.dtype,
        weight_dtype=config.weight_dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        num_slots=capacity.num_slots,
        num_pages=num_pages,
        page_size=config.page_size,
        attention=config.attention_backend,
        groups=groups,
        num_window_pages=lambda num_pages: num_window_pages(config, groups, capacity, num_pages),
        num_threads=num_threads,
        ranks=ranks if config.tp > 1 else None,
    )
    _populate(executor.pool)
    _warm_up(executor)
    if batch_sizes:
        _capture_graphs(executor, batch_sizes)
        check_left(reserve, free_bytes(device))
    num_pages_made = executor.num_pages
    capacity = replace(capacity, num_pages=num_pages_made, num_slots=min(capacity.num_slots, num_pages_made))
    return model, executor, capacity


def _load_model_config(config: NodeConfig) -> "BaseModelConfig":
    """What the checkpoint and the options say about the model; no weights are loaded."""
    from common.engine.models.checkpoints.checkpoint import weight_files
    from common.engine.models.checkpoints.weight_version import fingerprint
    from common.engine.models.implementation import load_config
    from common.engine.models.transformers_impl.config import TransformersConfig

    find_checkpoint(config.model, config.revision)
    log.info("loading %s", config.model)
    model = with_context_length(config, load_config(_source(config)))
    if isinstance(model, TransformersConfig):
        log.info("transformers computes this model with its class %s", model.architecture)
    version = config.weight_version or ("dummy" if model.has_dummy_weights else "")
    version = version or fingerprint(weight_files(model.folder))
    model = replace(model, weight_version="-".join([version, *formats(config, model)]))
    if config.tokenizer:
        model = replace(model, tokenizer_folder=find_tokenizer(config.tokenizer))
    ends = (*model.eos_token_ids, *tokenizer_end_ids(model.tokenizer_folder or model.folder))
    return replace(model, eos_token_ids=tuple(dict.fromkeys(ends)))


def with_context_length(config: NodeConfig, model: "BaseModelConfig") -> "BaseModelConfig":
    """The model with the context length of ``--context-length``, if that is given.

    Raises:
        ConfigError: it is more than the model's.
    """
    given = config.context_length
    if given is None:
        return model
    if given > model.context_length:
        raise ConfigError(
            f"--context-length {given} is more than the {model.context_length} tokens of this model: lower it, or give "
            "the model another context with --hf-overrides"
        )
    return replace(model, context_length=given)


def compute_threads(config: NodeConfig, device: str) -> int:
    """The threads of all ranks of the node: ``--threads``, by default one for each core that the process may use.

    Raises:
        ConfigError: ``--threads`` is more than the CPUs of these cores. Containers count hardware threads.
    """
    num_cpus = len(os.sched_getaffinity(0))
    if device == "cpu" and config.threads is not None and config.threads > num_cpus:
        raise ConfigError(
            f"--threads {config.threads}: this process may use {num_cpus} CPUs, and threads that share one are many "
            f"times slower; give at most {num_cpus}"
        )
    return config.threads or len(usable_cores())


def takes_all_cpus(config: NodeConfig) -> bool:
    """Whether the threads of a node on CPUs leave none to its loop."""
    return compute_threads(config, "cpu") == len(os.sched_getaffinity(0))


def formats(config: NodeConfig, model: "BaseModelConfig") -> list[str]:
    """The number formats that nodes must have in common, and that their page layouts do not show.

    Nodes that differ only in their pages have one weight version, so that the gateway refuses one of them.
    """
    weights: list[str] = [] if config.weight_dtype == "auto" else [config.weight_dtype]
    dtype = model.resolve_dtype(config.dtype)
    return weights if config.kv_cache_dtype == "auto" or dtype == model.dtype else [*weights, dtype]


def _source(config: NodeConfig) -> "ModelSource":
    from common.engine.models.implementation import ModelSource

    return ModelSource(
        config.model,
        revision=config.revision,
        implementation=config.model_impl,
        overrides=config.overrides,
        trust_remote_code=config.trust_remote_code,
        has_dummy_weights=config.load_format == "dummy",
    )


def _plan_graphs(
    config: NodeConfig, model: "BaseModelConfig", layout: PageLayout, device: str, capacity: Capacity
) -> Sequence[int]:
    conflict = graph_conflict(config, model, layout, device)
    if conflict and device != "cpu":
        log.info("no CUDA graphs: %s", conflict)
    return plan_graphs(config, conflict, capacity.num_slots)


def _warm_up(executor: "TorchExecutor") -> None:
    import torch

    try:
        executor.warm_up()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the device has too little memory for a step beside the model and its KV pages: lower --memory-fraction or "
            f"--max-total-tokens ({str(error).splitlines()[0]})"
        ) from error


def _capture_graphs(executor: "TorchExecutor", batch_sizes: Sequence[int]) -> None:
    import torch

    from common.engine.cuda_graphs import CudaGraphRunner

    begun_at = time.monotonic()
    reminder = Reminder(begun_at)

    def note(num_graphs: int) -> None:
        now = time.monotonic()
        if reminder.is_due(now) or num_graphs == len(batch_sizes):
            log.info("captured %d of %d CUDA graphs in %.0f s", num_graphs, len(batch_sizes), now - begun_at)

    try:
        executor.capture_graphs(CudaGraphRunner(executor.pool.device), batch_sizes, progress=note)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the device has too little memory for CUDA graphs: lower --memory-fraction, --max-total-tokens or "
            f"--cuda-graph-max-bs, or give --disable-cuda-graph ({str(error).splitlines()[0]})"
        ) from error


def check_ranks(model: "BaseModelConfig", num_ranks: int, device: str) -> None:
    """Refuse a ``--tp`` that this model or this device does not allow.

    Raises:
        ConfigError: names the reason.
    """
    from common.engine.factory import check_device
    from common.engine.models import implementation
    from common.engine.tensor_parallel.shard import Shard

    implementation.check_divided_model(model, num_ranks)
    try:
        check_device(Shard(num_ranks - 1, num_ranks).device(device))  # the last one
    except ConfigError as error:
        raise ConfigError(f"--tp {num_ranks}: {error}") from error


def rank_device(config: NodeConfig) -> str:
    """The device of rank 0: ``--device``, with a number where there are several ranks.

    Raises:
        ConfigError: there is no such device.
    """
    from common.engine.tensor_parallel.shard import Shard

    device = pick_device(config.device)
    return device if config.tp == 1 else Shard(0, config.tp).device(device)


def with_window_ratio(config: NodeConfig, model: "BaseModelConfig", device: str) -> NodeConfig:
    """The configuration with a number where ``--swa-full-tokens-ratio`` is ``auto``."""
    if parse_window_ratio(config.swa_full_tokens_ratio) is not None:
        return config
    ratio = auto_window_ratio(config, model.layer_groups, device=device, context_length=model.context_length)
    log.info("--swa-full-tokens-ratio auto is %g here", ratio)
    return replace(config, swa_full_tokens_ratio=f"{ratio:g}")


def layer_groups(config: NodeConfig, model: "BaseModelConfig") -> LayerGroups | None:
    """The groups of layers that get pages of their own; None: a page holds all layers.

    Raises:
        ConfigError: they are asked for, and are not possible.
    """
    ratio = float(config.swa_full_tokens_ratio)
    if ratio == 1:
        return None
    if config.record:
        raise ConfigError(f"--swa-full-tokens-ratio {ratio:g} does not work with --record: leave one out")
    groups = model.layer_groups
    if groups is None:
        raise ConfigError(
            f"--swa-full-tokens-ratio {ratio:g}: this model does not have both window layers and layers that see all "
            "tokens; leave it out"
        )
    return groups


def memory_layout(config: NodeConfig, model: "BaseModelConfig", device: str) -> PageLayout:
    """The layout of the part of a page that takes memory of this device: on a CPU, that of all ranks."""
    from common.engine.tensor_parallel.shard import Shard

    layout = model.layout(config.page_size, config.dtype, config.kv_cache_dtype)
    if (groups := layer_groups(config, model)) is not None:
        ratio = float(config.swa_full_tokens_ratio)
        layout = MemoryLayout(**asdict(layout), num_window_layers=len(groups.windowed), ratio=ratio)
    if config.tp == 1:
        return layout
    num_heads = len(Shard(0, config.tp).kv_heads(layout.num_kv_heads))
    return layout.of_heads(num_heads * config.tp if device == "cpu" else num_heads)


def _load_message(config: NodeConfig, model: "BaseModelConfig", device: str, num_threads: int) -> LoadModel:
    import torch

    from common.engine.attention import resolve_attention

    dtype = model.resolve_dtype(config.dtype)
    layout = model.layout(config.page_size, dtype, config.kv_cache_dtype)
    return LoadModel(
        rank=0,
        num_ranks=config.tp,
        name=config.node_name,
        folder=str(model.folder),
        digest=model.digest,
        device=device,
        dtype=dtype,
        weight_dtype=config.weight_dtype,
        has_dummy_weights=model.has_dummy_weights,
        implementation=model.implementation,
        overrides=config.overrides,
        trust_remote_code=config.trust_remote_code,
        attention=resolve_attention(config.attention_backend, torch.device(device), layout),
        num_threads=num_threads,
        log_level=config.log_level,
        log_format=config.log_format,
    )


def pages_of(
    config: NodeConfig, layout: PageLayout, capacity: Capacity, device: str, reserve: DeviceReserve, *, num_heads: int
) -> Callable[[], int]:
    """A function that tells, once the weights are in memory, how many pages the pool can have."""
    if device != "cpu":
        return lambda: pages_on_device(config, layout, capacity, reserve, free_bytes(device))
    from common.engine.attention import copied_bytes_on_cpu  # loads torch

    copied_bytes = copied_bytes_on_cpu(
        config.attention_backend, layout, num_heads=num_heads, num_threads=compute_threads(config, device)
    )

    def num_pages() -> int:
        free = free_bytes(device)
        copies = attention_bytes(layout, capacity, copied_bytes=copied_bytes, free_bytes=free)
        return num_pages_that_fit(config, layout, capacity.num_pages, free, copies)

    return num_pages


def _populate(pool: "KVPool") -> None:
    begun_at = time.monotonic()
    try:
        if taken := pool.populate(POPULATE_S):
            whole, seconds = pool.layout.pool_bytes(pool.num_pages), time.monotonic() - begun_at
            log.debug("touched %.2f of %.2f GB of KV pages in %.2f s", taken / 1e9, whole / 1e9, seconds)
    except MemoryError as error:
        raise ConfigError(f"--max-total-tokens or --memory-fraction is too large: {error}") from error


def pick_device(name: str) -> str:
    """The device for ``--device``: ``auto`` is ``cuda`` where torch finds a GPU, else ``cpu``.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "cpu":
        return name
    import torch

    from common.engine.factory import check_device

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_device(name)
    return name
