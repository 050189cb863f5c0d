"""Steps with random rows for attention backends, and the comparison of a backend with ``reference``."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import support.engine.triton_interpreter  # noqa: F401  (makes the interpreter faster)
import torch

from common.cache.page_layout import PageLayout
from common.engine.attention import make_attention
from common.engine.attention.protocol import AttentionBackend, AttentionParams, LayerParams, write_kv
from common.engine.batch import RowArrays, StepBatch, make_batch
from common.engine.kv_pool import TORCH_DTYPES, KVPool

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
PLAIN = AttentionParams()
Rows = list[tuple[int, int]]
Build = Callable[[KVPool, int, LayerParams], AttentionBackend]


def make_step(rows: Rows, page_size: int, num_pages: int, device: str, seed: int) -> StepBatch:
    """A batch of (cached, new) rows. Pages are scattered over the pool, and stale entries follow them in the table."""
    random = np.random.default_rng(seed)
    free = random.permutation(num_pages).tolist()
    width = max(-(-(start + new) // page_size) for start, new in rows) + 2
    table = random.integers(0, num_pages, (len(rows), width)).astype(np.int32)
    for row, (start, new) in enumerate(rows):
        for index in range(-(-(start + new) // page_size)):
            table[row, index] = free.pop()
    starts, num_new = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return make_batch(RowArrays(starts, num_new, table, page_size), torch.device(device))


def named(backend: str) -> Build:
    return lambda pool, num_heads, params: make_attention(backend, pool, num_heads, params)


def compare(
    build: Build,
    device: str,
    dtype: str,
    rows: Rows,
    page_size: int,
    heads: tuple[int, int, int],
    params: AttentionParams = PLAIN,
    spare_pages: int = 3,
    format: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    may_read_outside: bool = False,
) -> None:
    """Assert that a backend writes the same KV and returns the same attention as ``reference``, in the second layer.

    Pages that hold no token of a row, places after a row's last token, and pages that its window has left hold NaN.

    Args:
        dtype: of the model, and of the pages without one in ``format``.
        format: fields of ``PageLayout``.
        tolerance: absolute and relative; None takes that of ``dtype``.
        may_read_outside: the backend may read pages that the window has left, and give them no weight.
    """
    tolerance = tolerance or TOLERANCE[dtype]
    num_heads, num_kv_heads, head_dim = heads
    num_pages = sum(-(-(start + new) // page_size) for start, new in rows) + spare_pages
    layout = PageLayout(2, num_kv_heads, head_dim, page_size, **{"dtype": dtype, **(format or {})})
    pool = KVPool(layout, num_pages, device)
    batch = make_step(rows, page_size, num_pages, device, seed=page_size)
    torch.manual_seed(0)
    content = _content(pool, batch, None if may_read_outside else params.window)
    # As in the model: views into one merged matrix.
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * layout.value_dim]
    qkv = torch.randn(batch.num_tokens, sum(sizes)).to(device, TORCH_DTYPES[dtype])
    dims = (head_dim, head_dim, layout.value_dim)
    parts = [part.unflatten(1, (-1, dim)) for part, dim in zip(qkv.split(sizes, dim=1), dims, strict=True)]

    def attend(one: Build) -> tuple[torch.Tensor, torch.Tensor]:
        pool.pages.copy_(content)
        q, k, v = (tensor.clone() for tensor in parts) if one is build_reference else parts
        backend = one(pool, num_heads, (PLAIN, params))
        return backend.prepare(batch).extend(1, q, k, v).float(), pool.pages.clone()

    expected, written = attend(build_reference)
    found, found_written = attend(build)
    pool.close()
    assert torch.equal(found_written, written), "different KV was written"
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


build_reference = named("reference")


def _content(pool: KVPool, batch: StepBatch, window: int | None) -> torch.Tensor:
    """The bytes of a pool in which the rows' cached tokens have random KV in both layers, and all else is NaN.

    Pages of which no new token sees any token are NaN, too.
    """
    layout = pool.layout
    pool.pages.fill_(0xFF)  # NaN in every format
    prefixes = make_batch(
        RowArrays(np.zeros_like(batch.rows.starts), batch.rows.starts, batch.rows.page_table, batch.rows.page_size),
        pool.device,
    )
    for layer in range(layout.num_layers):
        k, v = (
            torch.randn(prefixes.num_tokens, layout.num_kv_heads, dim).to(pool.device)
            for dim in (layout.head_dim, layout.value_dim)
        )
        write_kv(pool.layer(layer), k, v, prefixes)
    if window is not None:
        for start, table in zip(batch.rows.starts.tolist(), batch.rows.page_table.tolist(), strict=True):
            pool.pages[table[: max(0, start - window + 1) // layout.page_size]] = 0xFF
    return pool.pages.clone()


def make_params(num_heads: int, device: str = "cpu", *, has_sinks: bool = False, **fields: Any) -> AttentionParams:
    sinks = torch.linspace(-1.0, 2.0, num_heads).to(device) if has_sinks else None
    return AttentionParams(sinks=sinks, **fields)
