"""Attention over paged KV: one protocol, several backends that must all agree with ``reference``."""

from collections.abc import Callable

from common.engine.attention.protocol import AttentionBackend, StepAttention
from common.engine.attention.reference import ReferenceAttention
from common.engine.attention.torch_sdpa import TorchAttention
from common.engine.kv_pool import KVPool
from common.errors import ConfigError

__all__ = ["BACKENDS", "AttentionBackend", "StepAttention", "make_attention"]

BACKENDS: dict[str, Callable[[KVPool], AttentionBackend]] = {"reference": ReferenceAttention, "torch": TorchAttention}


def make_attention(name: str, pool: KVPool) -> AttentionBackend:
    """The backend of that name over ``pool``; ``auto`` is the fastest one for the pool's device.

    Raises:
        ConfigError: no such backend, or not for this device.
    """
    if name == "auto":
        name = "torch"
    if name not in BACKENDS:
        raise ConfigError(f"--attention {name}: not one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](pool)
