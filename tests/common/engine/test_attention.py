"""Every attention backend agrees with ``reference`` on any mixture of rows."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.devices import DEVICES

from common.cache.page_layout import PageLayout
from common.engine.attention import BACKENDS, make_attention
from common.engine.batch import RowArrays, StepBatch, make_batch
from common.engine.kv_pool import KVPool
from common.engine.models.linear import Linear
from common.errors import ConfigError

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
FAST = [name for name in BACKENDS if name != "reference"]

rows_strategy = st.lists(
    st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=5
)


def make_step(rows: list[tuple[int, int]], page_size: int, num_pages: int, device: str, seed: int) -> StepBatch:
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


def attend(backend: str, pool: KVPool, content: torch.Tensor, batch: StepBatch, qkv: tuple[Any, ...]) -> torch.Tensor:
    pool.tensor.copy_(content)
    q, k, v = (tensor.clone() for tensor in qkv)
    return make_attention(backend, pool, q.shape[1]).prepare(batch).extend(1, q, k, v).float()


def compare(
    backend: str, device: str, dtype: str, rows: list[tuple[int, int]], page_size: int, heads: tuple[int, int, int]
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    num_pages = sum(-(-(start + new) // page_size) for start, new in rows) + 3
    pool = KVPool(PageLayout(2, num_kv_heads, head_dim, page_size, dtype), num_pages, device)
    batch = make_step(rows, page_size, num_pages, device, seed=page_size)
    torch.manual_seed(0)
    content = torch.randn(pool.tensor.shape).to(pool.tensor)
    num_tokens = batch.num_tokens
    # As in the model: views into one merged matrix.
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(pool.tensor)
    parts = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected = attend("reference", pool, content, batch, parts)
    written = pool.tensor.clone()
    found = attend(backend, pool, content, batch, parts)
    assert torch.equal(pool.tensor, written), "the backends wrote different KV"
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    pool.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", FAST)
def test_a_backend_equals_the_reference_on_any_mixture_of_rows(backend: str, dtype: str, device: str) -> None:
    skip_if_not_served(backend, device)

    @settings(max_examples=25, deadline=None)
    @given(
        rows=rows_strategy,
        page_size=st.sampled_from([1, 3, 16, 64]),
        heads=st.sampled_from([(4, 2, 16), (4, 4, 64), (6, 1, 24), (16, 8, 128), (5, 5, 20)]),
    )
    def check(rows: list[tuple[int, int]], page_size: int, heads: tuple[int, int, int]) -> None:
        compare(backend, device, dtype, rows, page_size, heads)

    check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", FAST)
def test_long_rows_keep_their_precision(backend: str, device: str) -> None:
    skip_if_not_served(backend, device)
    compare(backend, device, "float32", [(1500, 1), (900, 70), (0, 300)], 16, (4, 2, 32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(2, 2, 32), (4, 2, 64), (8, 1, 128), (4, 1, 256), (6, 2, 32)])
@pytest.mark.parametrize("backend", FAST)
def test_long_extends_equal_the_reference_inside_and_on_the_edge_of_tiles(
    backend: str, heads: tuple[int, int, int], dtype: str, device: str
) -> None:
    """Rows end inside and on the edge of tiles of 32 and 256 tokens, cold and with a prefix; one row decodes."""
    skip_if_not_served(backend, device)
    compare(backend, device, dtype, [(0, 33), (0, 256), (37, 1), (250, 70), (512, 32), (5, 289)], 16, heads)


@pytest.mark.parametrize("backend", FAST)
def test_a_row_longer_than_one_unit_of_work_is_split(backend: str) -> None:
    compare(backend, "cpu", "bfloat16", [(30, 1_100)], 64, (2, 1, 32))


def test_attention_leaves_the_state_of_matrix_units_to_onednn() -> None:
    """Each thread has one configuration of the AMX tiles, and oneDNN uses it too."""
    torch.manual_seed(0)
    linear = Linear(torch.randn(64, 64).bfloat16())
    linear.pack()
    x = torch.randn(40, 64).bfloat16()
    before = linear(x)
    compare("cpu", "cpu", "bfloat16", [(0, 40)], 16, (2, 1, 32))
    assert torch.equal(linear(x), before)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", FAST)
def test_pool_slots_past_a_rows_last_token_are_never_read(backend: str, dtype: str) -> None:
    """Every slot of the pool without a token of the row holds NaN."""
    pool = KVPool(PageLayout(2, 2, 32, 16, dtype), 8)
    pool.tensor.fill_(float("nan"))
    batch = make_step([(0, 1), (0, 5), (0, 50)], 16, 8, "cpu", seed=0)
    qkv = torch.randn(56, 8, 32).to(pool.tensor).split([4, 2, 2], dim=1)
    out = make_attention(backend, pool, 4).prepare(batch).extend(0, *qkv)
    assert out.isfinite().all()
    pool.close()


def test_the_reference_agrees_with_attention_worked_out_by_hand() -> None:
    """One head of two numbers; scores (q . k) / sqrt(2) are 0 and ln 3, so the weights are 1/4 and 3/4."""
    pool = KVPool(PageLayout(1, 1, 2, 1, "float32"), 2)
    batch = make_batch(RowArrays(np.array([1]), np.array([1]), np.array([[1, 0]], np.int32), 1), torch.device("cpu"))
    keys, values = pool.layer(0)
    keys[1, 0, 0] = torch.tensor([0.0, 1.0])
    values[1, 0, 0] = torch.tensor([4.0, 8.0])
    q = torch.tensor([[[2.0**0.5, 0.0]]])
    k = torch.tensor([[[float(np.log(3)), 5.0]]])
    v = torch.tensor([[[0.0, 4.0]]])
    out = make_attention("reference", pool, 1).prepare(batch).extend(0, q, k, v)
    torch.testing.assert_close(out, torch.tensor([[[1.0, 5.0]]]))
    assert keys[0, 0, 0].tolist() == k[0, 0].tolist()
    pool.close()


def test_an_unknown_backend_is_refused_with_the_list_of_backends() -> None:
    pool = KVPool(PageLayout(1, 1, 2, 1, "float32"), 2)
    with pytest.raises(ConfigError, match=r"--attention-backend flash.*reference.*torch"):
        make_attention("flash", pool, 1)
    pool.close()


def skip_if_not_served(backend: str, device: str) -> None:
    if backend == "cpu" and device != "cpu":
        pytest.skip("a backend for CPUs")
