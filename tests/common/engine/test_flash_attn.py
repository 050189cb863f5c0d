"""The flash-attn backend refuses what the package lacks, and calls it as its documentation says."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.attention_steps import compare, make_params, make_step, named

from common.cache.page_layout import PageLayout
from common.engine.attention import resolve_attention
from common.engine.attention.flash_attn_backend import FlashAttention, flash_attn_conflict
from common.engine.attention.protocol import AttentionParams
from common.engine.batch import DecodeRows
from common.engine.kv_pool import KVPool
from common.errors import ConfigError

Tensor = torch.Tensor
CUDA = torch.device("cuda")
PLAIN = (AttentionParams(),)


def layout(head_dim: int = 128, page_size: int = 256, dtype: str = "bfloat16") -> PageLayout:
    return PageLayout(1, 2, head_dim, page_size, dtype)


@pytest.mark.parametrize(
    ("refused", "params", "words"),
    [
        (layout(page_size=64), PLAIN, r"pages of a multiple of 256 tokens: give --page-size 256"),
        (layout(dtype="float32"), PLAIN, r"not in float32: give --dtype bfloat16"),
        (layout(head_dim=20), PLAIN, r"multiple of 8, at most 256, not of 20"),
        (layout(head_dim=320), PLAIN, r"multiple of 8, at most 256, not of 320"),
        (layout(), (AttentionParams(sinks=torch.zeros(4)),), r"no attention sinks"),
    ],
)
def test_what_the_package_lacks_is_refused_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, refused: PageLayout, params: tuple[AttentionParams, ...], words: str
) -> None:
    monkeypatch.setattr("common.engine.attention.find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=rf"--attention-backend flash-attn: .*{words}"):
        resolve_attention("flash-attn", CUDA, refused, params)


def test_windows_soft_caps_and_large_pages_are_accepted() -> None:
    params = (AttentionParams(window=100, soft_cap=30.0), AttentionParams(scale=1.0))
    assert flash_attn_conflict(layout(page_size=512), params) == ""


def test_the_missing_package_and_the_cpu_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--attention-backend flash-attn: runs on CUDA"):
        resolve_attention("flash-attn", torch.device("cpu"), layout())
    monkeypatch.setattr("common.engine.attention.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"flash-attn: needs the extra flash-attn; .*; or give auto or triton"):
        resolve_attention("flash-attn", CUDA, layout())


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """The function of flash-attn 2.7 by its documentation, as far as the backend uses it."""
    assert cache_seqlens is not None and block_table is not None and softmax_scale is not None and causal
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    assert cache_seqlens.shape == (len(q),) and len(block_table) == len(q) and q.ndim == 4
    rows = [
        documented(q[row], k_cache, v_cache, block_table[row], int(length), softmax_scale, window_size, softcap)
        for row, length in enumerate(cache_seqlens)
    ]
    return torch.stack(rows)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """The function of flash-attn 2.7 by its documentation, as far as the backend uses it."""
    assert block_table is not None and softmax_scale is not None and causal and q.ndim == 3
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    lengths = cu_seqlens_k.diff().tolist()
    new = q.split(cu_seqlens_q.diff().tolist())
    return torch.cat(
        [
            documented(part, k, v, block_table[row], length, softmax_scale, window_size, softcap)
            for row, (part, length) in enumerate(zip(new, lengths, strict=True))
        ]
    )


def documented(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    length: int,
    *options: Any,
) -> Tensor:
    """Attend ``[n, heads, dim]``, causal from the bottom right corner, over pages ``[pages, size, kv_heads, dim]``."""
    scale, (before, after), softcap = options
    page_size = keys.shape[1]
    assert page_size % 256 == 0 and keys.stride(-1) == values.stride(-1) == 1
    pages = blocks[: -(-length // page_size)].long()
    group = q.shape[1] // keys.shape[2]
    row_keys, row_values = (
        part[pages].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1) for part in (keys, values)
    )
    scores = torch.einsum("nhd,lhd->hnl", q.float(), row_keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    query, key = torch.arange(len(q))[:, None] + length - len(q), torch.arange(length)[None, :]
    is_seen = key <= query
    if before >= 0:
        is_seen &= (key >= query - before) & (key <= query + after)
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, row_values).to(q.dtype)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=3),
    heads=st.sampled_from([(2, 1, 16), (6, 2, 24)]),
    window=st.sampled_from([None, 1, 50]),
    soft_cap=st.sampled_from([None, 2.0]),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
def test_calls_by_the_documentation_give_what_the_reference_gives(
    rows: list[tuple[int, int]], heads: tuple[int, int, int], window: int | None, soft_cap: float | None, dtype: str
) -> None:
    params = make_params(heads[0], window=window, soft_cap=soft_cap)
    compare(
        lambda pool, _, layers: FlashAttention(pool, layers, flash_attn_with_kvcache, flash_attn_varlen_func),
        *("cpu", dtype, rows, 256, heads, params),
        may_read_outside=True,
    )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("params", [{}, {"window": 50}, {"soft_cap": 20.0}], ids=["plain", "window", "soft cap"])
def test_the_package_equals_the_reference(dtype: str, params: dict[str, Any]) -> None:
    pytest.importorskip("flash_attn")
    for heads in ((8, 2, 128), (4, 4, 64)):
        made = make_params(heads[0], "cuda", **params)
        rows = [(300, 1), (0, 70), (513, 33), (0, 1)]
        compare(named("flash-attn"), "cuda", dtype, rows, 256, heads, made, may_read_outside=True)


def test_decode_rows_that_only_the_device_knows_are_attended_as_others_are() -> None:
    """As in CUDA graphs: the rows name their slots, and the page tables of all slots are there."""
    batch = make_step([(5, 1), (300, 1), (0, 1)], 256, 8, "cpu", seed=1)
    pool = KVPool(layout(head_dim=16), 8)
    for part in pool.layer(0)[:2]:
        part.normal_()
    backend = FlashAttention(pool, PLAIN, flash_attn_with_kvcache, flash_attn_varlen_func)
    q, k, v = torch.randn(3, 8, 16).to(torch.bfloat16).split([4, 2, 2], dim=1)
    expected = backend.prepare(batch).extend(0, q, k, v)
    slots = torch.tensor([3, 0, 2])
    page_table = torch.full((4, batch.page_table.shape[1]), 7, dtype=torch.int32)
    page_table[slots] = batch.page_table
    rows = DecodeRows(slots, batch.positions, batch.token_pages, batch.token_offsets, page_table)
    assert torch.equal(backend.prepare_decode(rows).extend(0, q, k, v), expected)
    pool.close()
