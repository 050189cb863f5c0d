"""Attention over paged KV: one protocol and several backends, all of which must agree with ``reference``."""

import logging
from collections.abc import Callable
from importlib.util import find_spec

import torch

from common.cache.page_layout import PageLayout
from common.engine.attention.cpu import copied_bytes, cpu_attention, cpu_conflict
from common.engine.attention.grouped import GroupedAttention
from common.engine.attention.protocol import AttentionBackend, AttentionParams, LayerParams
from common.engine.attention.reference import ReferenceAttention
from common.engine.attention.torch_sdpa import TorchAttention, gathered_bytes
from common.engine.kv_pool import KVPool
from common.engine.triton_kernels import has_interpreter
from common.errors import ConfigError, needs_extra

log = logging.getLogger(__name__)


def _triton(pool: KVPool, num_heads: int, params: LayerParams) -> AttentionBackend:
    from common.engine.attention.triton_backend import TritonAttention  # imports triton, which only CUDA nodes need

    return TritonAttention(pool, num_heads, params)


def _flash_attn(pool: KVPool, num_heads: int, params: LayerParams) -> AttentionBackend:
    from flash_attn.cute import flash_attn_varlen_func

    from common.engine.attention.flash_attn_backend import FlashAttention

    backend = FlashAttention(pool, num_heads, params, flash_attn_varlen_func)
    backend.compile()
    return backend


#: Backends by name; each is built from a pool, the number of query heads, and the parameters of each layer.
BACKENDS: dict[str, Callable[[KVPool, int, LayerParams], AttentionBackend]] = {
    "reference": lambda pool, _, params: ReferenceAttention(pool, params),
    "torch": lambda pool, _, params: TorchAttention(pool, params),
    "cpu": cpu_attention,
    "triton": _triton,
    "flash-attn": _flash_attn,
}

MAX_FLASH_PAGE_SIZE = 32
MAX_FLASH_HEAD_DIM = 256

#: The backends that are ``GraphSafeAttention``; the others run every step eagerly.
GRAPH_SAFE = ("triton", "flash-attn")


def resolve_attention(name: str, device: torch.device, layout: PageLayout) -> str:
    """Return the name of a backend for pools of this layout on this device; ``auto`` picks the fastest.

    Raises:
        ConfigError: the backend is unknown, is not installed, does not run on this device or cannot read the layout.
    """
    if name == "auto":
        if device.type == "cpu":
            return "torch" if cpu_conflict(layout) else "cpu"
        name = "triton" if find_spec("triton") and not _is_old(device) else "torch"
    if name not in BACKENDS:
        raise ConfigError(f"--attention-backend {name}: unknown; give auto, {', '.join(BACKENDS)}")
    reason = _conflict(name, device, layout)
    if reason:
        raise ConfigError(f"--attention-backend {name}: {reason}")
    return name


def copied_bytes_on_cpu(name: str, layout: PageLayout, *, num_heads: int, num_threads: int) -> int:
    """Return the bytes that a backend on a CPU copies for each token of the longest request."""
    is_native = resolve_attention(name, torch.device("cpu"), layout) == "cpu"
    return copied_bytes(layout, num_heads, num_threads) if is_native else gathered_bytes(layout, num_heads)


def log_choice(name: str, device: torch.device, layout: PageLayout) -> None:
    """Say why ``auto`` is not the fastest backend; ``resolve_attention`` says nothing, since a start asks it often."""
    if name == "auto" and device.type == "cpu" and (reason := cpu_conflict(layout)):
        log.info("--attention-backend auto is torch here: cpu %s", reason.partition(":")[0])


def _conflict(name: str, device: torch.device, layout: PageLayout) -> str:
    """Return why a backend cannot serve, with the fix; empty if it can."""
    is_cpu = device.type == "cpu"
    if name == "cpu":
        if not is_cpu:
            return f"the KV pool is on {device}; give auto, triton, reference or torch"
        return cpu_conflict(layout)
    if name == "triton":
        if layout.dtype == "int8":
            return "cannot read KV pages in int8: give --kv-cache-dtype fp8, or torch, which is slow"
        if not find_spec("triton"):
            return "the package triton is missing; install it, or give auto or torch"
        if is_cpu and not has_interpreter():
            return "runs on CUDA; give auto or cpu (TRITON_INTERPRET=1 runs its kernels slowly on the CPU, for tests)"
        if _is_old(device):
            return "needs a GPU of compute capability 8.0 or newer: give auto or torch"
    if name == "flash-attn":
        if is_cpu:
            return "runs on CUDA; give auto or cpu"
        if not _has_flash_attn():
            return f"{needs_extra('flash-attn')}; or give auto or triton"
        if reason := _flash_attn_conflict(layout):
            return reason
        major, _ = _capability(device)
        if major not in (9, 10, 11):
            return "needs a GPU of compute capability 9 to 11 (Hopper or Blackwell): give triton"
        if major > 9 and 128 < layout.head_dim < MAX_FLASH_HEAD_DIM:
            return f"has no kernel for heads of {layout.head_dim} on this GPU, only up to 128 or of 256: give triton"
    return ""


def _flash_attn_conflict(layout: PageLayout) -> str:
    """Return why FlashAttention-4 cannot read pages of this layout, with the fix; empty if it can."""
    if layout.page_size > MAX_FLASH_PAGE_SIZE:
        return (  # it reads such pages whole, and what lies behind a row's last token need not be a number
            f"needs pages of at most {MAX_FLASH_PAGE_SIZE} tokens: give --page-size {MAX_FLASH_PAGE_SIZE}, or triton"
        )
    if layout.has_scales:
        return f"cannot read KV pages in {layout.dtype}: give --kv-cache-dtype auto, or triton"
    if layout.is_latent or layout.value_dim != layout.head_dim:
        return "needs keys and values of one size, which this model has not: give triton"
    if layout.dtype not in ("bfloat16", "float16"):
        return f"computes in bfloat16 or float16, not in {layout.dtype}: give --dtype bfloat16, or triton"
    if layout.head_dim % 8 or layout.head_dim > MAX_FLASH_HEAD_DIM:
        return f"needs heads of a multiple of 8, at most {MAX_FLASH_HEAD_DIM}, not of {layout.head_dim}: give triton"
    return ""


def _has_flash_attn() -> bool:
    """Whether FlashAttention-4 is installed, which shares its folder with earlier versions."""
    try:
        return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None
    except ImportError:  # of an earlier version, built for another torch
        return False


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) for other devices, and where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def _is_old(device: torch.device) -> bool:
    """Whether a GPU is older than those for which Triton is made, and has too little shared memory for our tiles."""
    return (0, 0) < _capability(device) < (8, 0)


def make_attention(name: str, pool: KVPool, num_heads: int, params: LayerParams | None = None) -> AttentionBackend:
    """Build a backend for a pool. ``params`` has an entry for each layer; without it every layer is plain."""
    if params is None:
        params = (AttentionParams(),) * pool.num_layers
    assert len(params) == pool.num_layers
    backend = BACKENDS[resolve_attention(name, pool.device, pool.layout)](pool, num_heads, params)
    return backend if pool.groups is None else GroupedAttention(backend, pool.groups.windowed)
