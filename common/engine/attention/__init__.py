"""Attention over paged KV: one protocol and several backends, all of which must agree with ``reference``."""

from collections.abc import Callable

import torch

from common.engine.attention.cpu import cpu_attention
from common.engine.attention.protocol import AttentionBackend
from common.engine.attention.reference import ReferenceAttention
from common.engine.attention.torch_sdpa import TorchAttention
from common.engine.kv_pool import KVPool
from common.errors import ConfigError

#: Backends by name; each is built from a pool and the number of query heads.
BACKENDS: dict[str, Callable[[KVPool, int], AttentionBackend]] = {
    "reference": lambda pool, _: ReferenceAttention(pool),
    "torch": lambda pool, _: TorchAttention(pool),
    "cpu": cpu_attention,
}


def resolve_attention(name: str, device: torch.device) -> str:
    """Return the name of a backend for pools on this device; ``auto`` picks the fastest.

    Raises:
        ConfigError: the backend is unknown, or does not run on this device.
    """
    is_cpu = device.type == "cpu"
    if name == "auto":
        return "cpu" if is_cpu else "torch"
    if name not in BACKENDS:
        raise ConfigError(f"--attention-backend {name}: unknown; give auto, {', '.join(BACKENDS)}")
    if name == "cpu" and not is_cpu:
        raise ConfigError(f"--attention-backend cpu: the KV pool is on {device}; give auto, reference or torch")
    return name


def make_attention(name: str, pool: KVPool, num_heads: int) -> AttentionBackend:
    return BACKENDS[resolve_attention(name, pool.device)](pool, num_heads)
