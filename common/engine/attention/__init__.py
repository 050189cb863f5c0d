"""Attention over paged KV: one protocol, several backends that must all agree with ``reference``."""

from collections.abc import Callable

from common.engine.attention.cpu import cpu_attention
from common.engine.attention.protocol import AttentionBackend, StepAttention
from common.engine.attention.reference import ReferenceAttention
from common.engine.attention.torch_sdpa import TorchAttention
from common.engine.kv_pool import KVPool
from common.errors import ConfigError

__all__ = ["BACKENDS", "AttentionBackend", "StepAttention", "make_attention"]

#: name -> made from a pool and the number of query heads
BACKENDS: dict[str, Callable[[KVPool, int], AttentionBackend]] = {
    "reference": lambda pool, _: ReferenceAttention(pool),
    "torch": lambda pool, _: TorchAttention(pool),
    "cpu": cpu_attention,
}


def make_attention(name: str, pool: KVPool, num_heads: int) -> AttentionBackend:
    """The backend of that name over ``pool``; ``auto`` is the fastest one for the pool's device.

    Raises:
        ConfigError: no such backend, or not for this device.
    """
    is_cpu = pool.device.type == "cpu"
    if name == "auto":
        name = "cpu" if is_cpu else "torch"
    if name not in BACKENDS:
        raise ConfigError(f"--attention {name}: not one of auto, {', '.join(BACKENDS)}")
    if name == "cpu" and not is_cpu:
        raise ConfigError(f"--attention cpu: the KV pool is on {pool.device}; give auto, reference or torch")
    return BACKENDS[name](pool, num_heads)
