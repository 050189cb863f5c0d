"""Each kernel against its limit: attention backends, torch's attention over whole tensors, and the operations between
the matrix products.

Attention of decode rows and of a prompt reads pages that lie scattered over the pool. ``sdpa`` is torch's own over
tensors without pages, which a server does not have: it is what the backends are compared with.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.cache.page_layout import ITEM_BYTES, PageLayout
from common.engine.attention import make_attention
from common.engine.batch import RowArrays, make_batch
from common.engine.kv_pool import KVPool
from common.engine.models.config import ModelConfig
from common.engine.models.layers import make_operations
from common.errors import ConfigError
from scripts.benchmarks.engines.gpu_parts.device import Device, Limits

PAGE_SIZE = 16


@dataclass(frozen=True)
class AttentionCase:
    """``batch`` rows of ``context`` tokens, of which the last ``num_new`` are computed."""

    batch: int
    context: int
    num_new: int

    @property
    def name(self) -> str:
        if self.num_new == 1:
            return f"attention, decode batch {self.batch} of {self.context}"
        return f"attention, prompt of {self.context}"

    def least_s(self, config: ModelConfig, dtype: str, limits: Limits) -> float:
        """KV is read once; half of a prompt's products are masked."""
        seen = self.num_new * (self.context - self.num_new / 2)
        flops = 4 * self.batch * seen * config.num_heads * config.head_dim
        return limits.seconds(num_bytes=self.kv_bytes(config, dtype), flops=flops)

    def kv_bytes(self, config: ModelConfig, dtype: str) -> int:
        return 2 * self.batch * self.context * config.num_kv_heads * config.head_dim * ITEM_BYTES[dtype]


def attention_s(case: AttentionCase, name: str, config: ModelConfig, device: Device) -> float:
    """Seconds of one layer's attention by a backend, or by ``sdpa``.

    Raises:
        ConfigError: the backend is not available here.
    """
    if name == "sdpa":
        return device.kernel_s(_sdpa(case, config, device))
    width = -(-case.context // PAGE_SIZE)
    layout = PageLayout(1, config.num_kv_heads, config.head_dim, PAGE_SIZE, device.dtype_name)
    pool = KVPool(layout, case.batch * width, device.device)
    try:
        pool.pages.view(device.dtype).normal_()
        backend = make_attention(name, pool, config.num_heads)
        table = np.random.default_rng(0).permutation(case.batch * width).astype(np.int32).reshape(case.batch, width)
        num_new = np.full(case.batch, case.num_new)
        batch = make_batch(RowArrays(case.context - num_new, num_new, table, PAGE_SIZE), device.device)
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        qkv = torch.randn(batch.num_tokens, sum(heads), config.head_dim, device=device.device).to(device.dtype)
        step = backend.prepare(batch)
        q, k, v = qkv.split(heads, dim=1)
        return device.kernel_s(lambda: step.extend(0, q, k, v))
    except ImportError as error:
        raise ConfigError(str(error)) from error
    finally:
        pool.close()


def _sdpa(case: AttentionCase, config: ModelConfig, device: Device) -> Callable[[], Tensor]:
    def random(num_heads: int, num_tokens: int) -> Tensor:
        shape = (case.batch, num_heads, num_tokens, config.head_dim)
        return torch.randn(shape, device=device.device, dtype=device.dtype)

    query = random(config.num_heads, case.num_new)
    key, value = random(config.num_kv_heads, case.context), random(config.num_kv_heads, case.context)
    is_causal = case.num_new == case.context > 1
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, enable_gqa=True
    )


def operations(config: ModelConfig, num_tokens: int, device: Device) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Operations between the matrix products, with the bytes that each must move."""
    ops = make_operations(config, device.device)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device.device, dtype=device.dtype)

    x, delta = (zeros(num_tokens, config.hidden_size) for _ in range(2))
    weight = zeros(config.hidden_size)
    gate_up = zeros(num_tokens, 2 * config.intermediate_size)
    size = ITEM_BYTES[device.dtype_name]
    yield "add and norm", lambda: ops.add_rms_norm(x, delta, weight, config.rms_norm_eps), 4 * x.numel() * size
    yield "silu and multiply", lambda: ops.silu_and_multiply(gate_up), 3 * gate_up.numel() // 2 * size
