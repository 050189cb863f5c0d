"""Makes an executor: loads the weights of a checkpoint and allocates the KV pool beside them."""

from collections.abc import Callable

import torch

from common.cache.window_pages import LayerGroups
from common.config.shared import WeightDtype
from common.engine.attention import log_choice, make_attention, resolve_attention
from common.engine.executor import TorchExecutor
from common.engine.kv_pool import KVPool
from common.engine.models.base_config import BaseModelConfig
from common.engine.models.implementation import load_model
from common.engine.sampling.grammar import load_compiler
from common.engine.tensor_parallel.rank_executor import OtherRanks
from common.engine.tensor_parallel.shard import WHOLE_MODEL, Shard
from common.errors import ConfigError


def load_executor(
    config: BaseModelConfig,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    num_slots: int,
    num_pages: int | Callable[[], int],
    page_size: int,
    attention: str = "auto",
    num_threads: int | None = None,
    ranks: OtherRanks | None = None,
    weight_dtype: WeightDtype = "auto",
    groups: LayerGroups | None = None,
    num_window_pages: Callable[[int], int] = lambda num_pages: num_pages,
) -> TorchExecutor:
    """Load a checkpoint's weights, allocate the KV pool and return an executor over both.

    Args:
        kv_cache_dtype: a value of ``--kv-cache-dtype``.
        num_pages: pages of the KV pool; a function is called once the weights are in memory.
        num_threads: compute threads of the process (torch's OpenMP team); None leaves their number as it is.
        ranks: have the other parts of the model, of which this process then loads the first; None: it loads all of it.
        weight_dtype: format to which matrices are rounded; auto: none.
        groups: the layers of the model, if its window layers get pages of their own.
        num_window_pages: their number, from that of the pool's other pages.
    Raises:
        ConfigError: the dtype, device or attention backend is unknown, the weights do not match the configuration, or
            the device has too little memory.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    place = check_device(device)
    dtype = config.resolve_dtype(dtype)
    shard = WHOLE_MODEL if ranks is None else Shard(0, ranks.num_ranks)
    layout = config.layout(page_size, dtype, kv_cache_dtype)
    layout = layout.of_heads(len(shard.kv_heads(layout.num_kv_heads)))
    log_choice(attention, place, layout)
    attention = resolve_attention(attention, place, layout)
    if (attention, place.type, dtype, layout.dtype) == ("triton", "cuda", "float32", "fp8_e4m3"):
        raise ConfigError("--kv-cache-dtype fp8: triton computes FP8 pages in 16 bits; give --dtype bfloat16, or torch")
    try:
        make_model = load_model(config, dtype, place, weight_dtype=weight_dtype, shard=shard)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--device {device} has too little memory for the weights of the model: each node has its own, so serve "
            "fewer on this device (serve --prefill 0 --local-prefill always has one), or divide the model with --tp "
            f"({str(error).splitlines()[0]})"
        ) from error
    try:
        num_pages = num_pages() if callable(num_pages) else num_pages
        pool = KVPool(layout, num_pages, place, groups=groups, num_window_pages=num_window_pages(num_pages))
        model = make_model(None if ranks is None else ranks.join(pool))
        backend = make_attention(attention, pool, model.config.num_heads, model.attention_params)
        grammars = load_compiler(
            config.tokenizer_folder or config.folder, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
        )
        try:
            return TorchExecutor(model, pool, backend, num_slots=num_slots, grammars=grammars, ranks=ranks)
        except MemoryError as error:
            raise ConfigError(
                f"--context-length {config.context_length}: page tables do not fit into memory; lower it"
            ) from error
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--device {device} has too little memory for KV pages beside the model: lower --memory-fraction or "
            f"--max-total-tokens ({str(error).splitlines()[0]})"
        ) from error


def check_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises:
        ConfigError: the machine has no such device, or Baton does not support it.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: unknown device; give cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch finds no CUDA device here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: torch finds only {torch.cuda.device_count()} CUDA devices here")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: not supported; give cpu, cuda or cuda:N")
    return device
