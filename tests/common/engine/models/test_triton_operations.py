"""The Triton kernels between matrix products equal torch's operations."""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.attention_steps import make_step
from support.engine.devices import DEVICES

from common.cache.page_layout import PageLayout
from common.engine.attention.protocol import AttentionParams
from common.engine.kv_pool import KVPool
from common.engine.models.layers import TorchOperations

if not find_spec("triton"):
    pytest.skip("needs triton", allow_module_level=True)

from common.engine.attention.triton_backend import TritonAttention
from common.engine.triton_kernels.elementwise import TritonOperations

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
num_rows = st.sampled_from([1, 2, 5])
each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def skip_if_not_served(device: str, dtype: torch.dtype) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16 instead of rounding")


def assert_same(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


@each_device
@each_dtype
def test_add_rms_norm_equals_torch(device: str, dtype: torch.dtype) -> None:
    skip_if_not_served(device, dtype)

    @settings(max_examples=15, deadline=None)
    @given(rows=num_rows, width=st.sampled_from([16, 48, 1000]), has_delta=st.booleans())
    def check(rows: int, width: int, has_delta: bool) -> None:
        torch.manual_seed(rows)
        x, weight = torch.randn(rows, width).to(device, dtype), torch.rand(width).to(device, dtype)
        delta = torch.randn(rows, width).to(device, dtype) if has_delta else None
        theirs = x.clone()
        expected = TorchOperations().add_rms_norm(theirs, delta, weight, 1e-6)
        assert_same(TritonOperations().add_rms_norm(x, delta, weight, 1e-6), expected, TOLERANCE[dtype])
        assert torch.equal(x, theirs), "the residual stream is not rounded as in torch"

    check()


@each_device
@each_dtype
def test_norm_and_rotate_equals_torch(device: str, dtype: torch.dtype) -> None:
    skip_if_not_served(device, dtype)

    @settings(max_examples=15, deadline=None)
    @given(
        rows=num_rows,
        heads=st.sampled_from([(4, 2), (3, 3), (8, 1)]),
        dim=st.sampled_from([16, 24, 64]),
        has_norms=st.booleans(),
    )
    def check(rows: int, heads: tuple[int, int], dim: int, has_norms: bool) -> None:
        torch.manual_seed(rows)
        num_heads, num_kv_heads = heads
        qkv = torch.randn(rows, num_heads + 2 * num_kv_heads, dim).to(device, dtype)
        norms = (torch.rand(dim).to(device, dtype), torch.rand(dim).to(device, dtype)) if has_norms else None
        angles = torch.rand(rows, dim // 2, device=device) * 6
        turn = (angles.cos(), angles.sin())
        expected = TorchOperations().norm_and_rotate(qkv.clone(), num_heads, norms, turn, 1e-6)
        found = TritonOperations().norm_and_rotate(qkv.clone(), num_heads, norms, turn, 1e-6)
        # torch rounds after the norm and after the rotation; the kernel rounds once.
        assert_same(found, expected, 4 * TOLERANCE[dtype])
        assert torch.equal(found[:, num_heads + num_kv_heads :], qkv[:, num_heads + num_kv_heads :]), "values changed"

    check()


@each_device
@each_dtype
@pytest.mark.parametrize("has_norms", [True, False], ids=["norms", "no norms"])
def test_one_launch_writes_the_same_kv_as_separate_launches(device: str, dtype: torch.dtype, has_norms: bool) -> None:
    """Queries, pages and attention have the same bits; places of no new token keep their content."""
    skip_if_not_served(device, dtype)
    num_heads, num_kv_heads, dim = (6, 2, 16) if has_norms else (3, 3, 24)
    torch.manual_seed(dim)
    pools = [KVPool(PageLayout(2, num_kv_heads, dim, 16, NAMES[dtype]), 6, device) for _ in range(2)]
    content = torch.randn(6, pools[0].layout.page_bytes // dtype.itemsize).to(device, dtype)
    backends = [TritonAttention(pool, num_heads, (AttentionParams(),) * 2, tiles={}) for pool in pools]
    batch = make_step([(5, 1), (14, 9)], 16, 6, device, seed=dim)
    qkv = torch.randn(batch.num_tokens, num_heads + 2 * num_kv_heads, dim).to(content)
    norms = (torch.rand(dim).to(content), torch.rand(dim).to(content)) if has_norms else None
    angles = torch.rand(batch.num_tokens, dim // 2, device=device) * 6
    turn = (angles.cos(), angles.sin())
    for pool in pools:
        pool.pages.copy_(content.view(torch.uint8))
    turned = TritonOperations().norm_and_rotate(qkv.clone(), num_heads, norms, turn, 1e-6)
    parts = turned.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected = backends[0].prepare(batch).extend(1, *parts)
    found = backends[1].prepare(batch).rotate_and_extend(1, qkv, norms, turn, 1e-6)
    assert torch.equal(pools[1].pages, pools[0].pages)
    assert torch.equal(found, expected)
    for pool in pools:
        pool.close()


@each_device
@each_dtype
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # the interpreter's, where float16 becomes infinite
def test_silu_and_multiply_equals_torch_for_large_inputs_too(device: str, dtype: torch.dtype) -> None:
    skip_if_not_served(device, dtype)

    @settings(max_examples=15, deadline=None)
    @given(rows=num_rows, width=st.sampled_from([16, 80, 3000]), scale=st.sampled_from([1.0, 30.0, 100.0]))
    def check(rows: int, width: int, scale: float) -> None:
        torch.manual_seed(rows)
        gate_up = (torch.randn(rows, 2 * width) * scale).to(device, dtype)
        gate, up = gate_up.float().chunk(2, dim=-1)
        expected = (torch.nn.functional.silu(gate) * up).to(dtype)
        assert_same(TritonOperations().silu_and_multiply(gate_up), expected, TOLERANCE[dtype])

    check()
