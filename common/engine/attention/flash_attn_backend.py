"""The flash-attn backend: Triton's kernels, but long prompts are attended by FlashAttention-4 (CUDA, Hopper and later).

FlashAttention-4 is the package ``flash-attn-4`` (the extra ``flash-attn``). It reads pages of
``[page_size, kv_heads, head_dim]`` with any strides but the last, so that the pool's views serve as they are. A call
takes the host about three times as long as a launch of Triton's kernel, so that only steps with many scores gain.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.attention.protocol import AttentionParams, LayerParams
from common.engine.attention.triton_backend import Pass, TritonAttention
from common.engine.batch import RowArrays, StepBatch, make_batch
from common.engine.device_copies import current_device, to_device
from common.engine.kv_pool import PAGE_DTYPES, KVPool

#: Scores of a step from which on its prompts are left to the package, such as those of 4,096 tokens with 32 heads. With
#: half as many, a model of 28 layers lost more time on the host than it saved on an H200.
MIN_SCORES = 1 << 28
#: The longest row must also have more lines than this, new tokens times query heads of a KV head: the package does not
#: divide the keys of shorter rows, and would compile a further kernel for rows that fit into one of its tiles.
MIN_LINES = 256


class FlashAttention(TritonAttention):
    """``AttentionBackend`` on Triton's kernels and the package flash-attn-4.

    Args:
        attend_varlen: ``flash_attn.cute.flash_attn_varlen_func``.
    """

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        params: LayerParams,
        attend_varlen: Callable[..., Any],
        *,
        min_scores: int = MIN_SCORES,
        **options: Any,
    ) -> None:
        super().__init__(pool, num_heads, params, **options)
        self._num_heads = num_heads
        self.attend_varlen = attend_varlen
        self._min_scores = min_scores

    def extend_pass(self, batch: StepBatch, rows: NDArray[np.intp]) -> Pass:
        num_new, lengths = batch.rows.num_new[rows], batch.lengths[rows]
        num_scores = self._num_heads * int((num_new * (lengths - num_new // 2)).sum())
        num_lines = self._num_heads // self.pool.layout.num_kv_heads * int(num_new.max())
        if num_scores < self._min_scores or num_lines <= MIN_LINES:
            return super().extend_pass(batch, rows)
        return FlashPass(self, batch, rows)

    def compile(self) -> None:
        """Compile the package's kernels for each kind of layer, some seconds each, so that no request waits for it.

        The pool must be empty.
        """
        page_size, num_new = self.pool.layout.page_size, 2 * MIN_LINES
        table = np.zeros((1, -(-num_new // page_size)), np.int32)  # one page serves, whatever it holds
        batch = make_batch(RowArrays(np.array([0]), np.array([num_new]), table, page_size), self.pool.device)
        layout = self.pool.layout
        shape = (num_new, self._num_heads, layout.head_dim)
        q, out = torch.zeros(2, *shape, dtype=PAGE_DTYPES[layout.dtype], device=self.pool.device)
        one = FlashPass(self, batch, np.array([0]))
        kinds = {(p.window is None, p.soft_cap, p.sinks is None): layer for layer, p in enumerate(self.params)}
        # Warnings are what its compiler says about the package.
        with current_device(self.pool.device), warnings.catch_warnings(action="ignore"):
            for layer in kinds.values():
                one.attend(layer, q, out)


class FlashPass:
    """The package's launches of one step: lengths and page tables are copied to the device once for all layers."""

    def __init__(self, backend: FlashAttention, batch: StepBatch, rows: NDArray[np.intp]) -> None:
        self._backend = backend
        device = batch.positions.device
        num_new, lengths = batch.rows.num_new[rows], batch.lengths[rows]
        self._tokens: slice | Tensor
        if rows[-1] - rows[0] + 1 == len(rows):  # as always on a prefill node: no copies of queries
            self._tokens = slice(int(batch.first_new[rows[0]]), int(batch.first_new[rows[-1] + 1]))
            self._page_table = batch.page_table[int(rows[0]) : int(rows[-1]) + 1]
        else:
            tokens = [np.arange(batch.first_new[row], batch.first_new[row + 1]) for row in rows.tolist()]
            self._tokens = to_device(np.concatenate(tokens), device)
            self._page_table = batch.page_table[to_device(rows, device)]
        self._lengths = to_device(lengths.astype(np.int32), device)
        self._first_new = to_device(np.concatenate([[0], np.cumsum(num_new)]).astype(np.int32), device)
        self._max_new, self._max_length = int(num_new.max()), int(lengths.max())

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Write the attention of this pass's rows into ``out`` ``[N, heads, head_dim]``."""
        keys, values, _, _ = self._backend.pool.layer(layer)
        params = self._backend.params[layer]
        out[self._tokens] = self._backend.attend_varlen(
            q[self._tokens],
            keys.transpose(1, 2),
            values.transpose(1, 2),
            cu_seqlens_q=self._first_new,
            seqused_k=self._lengths,
            max_seqlen_q=self._max_new,
            max_seqlen_k=self._max_length,
            page_table=self._page_table,
            causal=True,
            softmax_scale=params.scale_for(q.shape[2]),
            window_size=_window(params),
            softcap=params.soft_cap or 0.0,
            learnable_sink=params.sinks,
        )[0]


def _window(params: AttentionParams) -> tuple[int | None, int | None]:
    """The tokens before and after its own that a query sees."""
    return (None, None) if params.window is None else (params.window - 1, 0)
