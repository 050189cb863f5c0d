"""The flash-attn backend refuses what FlashAttention-4 lacks, and calls it as its documentation says.

On a CPU a function that follows the package's documentation stands in for it; a GPU runs the package itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.attention_steps import Rows, compare, make_params, make_step, named

from common.cache.page_layout import PageLayout
from common.engine.attention import resolve_attention
from common.engine.attention.protocol import AttentionParams, LayerParams
from common.engine.batch import RowArrays, make_batch
from common.engine.kv_pool import KVPool
from common.engine.triton_kernels import has_interpreter
from common.errors import ConfigError

Tensor = torch.Tensor
CUDA = torch.device("cuda")
PLAIN = (AttentionParams(),)
needs_interpreter = pytest.mark.skipif(
    not (has_interpreter() and find_spec("triton")), reason="needs Triton's interpreter"
)
#: The package and its compiler warn of each other, by their versions.
of_the_package = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("cuda"):
        monkeypatch.setattr("common.engine.attention._capability", lambda device: (9, 0))


def layout(head_dim: int = 128, page_size: int = 16, dtype: str = "bfloat16") -> PageLayout:
    return PageLayout(1, 2, head_dim, page_size, dtype)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (layout(page_size=64), r"pages of at most 32 tokens: give --page-size 32"),
        (layout(dtype="float32"), r"not in float32: give --dtype bfloat16"),
        (layout(head_dim=20), r"multiple of 8, at most 256, not of 20"),
        (layout(head_dim=320), r"multiple of 8, at most 256, not of 320"),
    ],
)
def test_what_the_package_lacks_is_refused_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, refused: PageLayout, words: str
) -> None:
    monkeypatch.setattr("common.engine.attention.find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=rf"--attention-backend flash-attn: .*{words}"):
        resolve_attention("flash-attn", CUDA, refused)


def test_gpus_that_the_package_serves_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.attention.find_spec", lambda name: name)
    for capability in ((9, 0), (10, 3)):
        monkeypatch.setattr("common.engine.attention._capability", lambda _, found=capability: found)
        assert resolve_attention("flash-attn", CUDA, layout(page_size=32)) == "flash-attn"
    for capability in ((8, 9), (12, 0)):
        monkeypatch.setattr("common.engine.attention._capability", lambda _, found=capability: found)
        with pytest.raises(ConfigError, match=r"flash-attn: needs a GPU of compute capability 9 to 11 "):
            resolve_attention("flash-attn", CUDA, layout())


def test_heads_for_which_the_package_has_no_kernel_on_blackwell_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.attention.find_spec", lambda name: name)
    assert resolve_attention("flash-attn", CUDA, layout(head_dim=160)) == "flash-attn"
    monkeypatch.setattr("common.engine.attention._capability", lambda device: (10, 0))
    for head_dim in (128, 256):
        assert resolve_attention("flash-attn", CUDA, layout(head_dim=head_dim)) == "flash-attn"
    with pytest.raises(ConfigError, match=r"flash-attn: has no kernel for heads of 160 on this GPU.*: give triton"):
        resolve_attention("flash-attn", CUDA, layout(head_dim=160))


def test_the_missing_package_and_the_cpu_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--attention-backend flash-attn: runs on CUDA"):
        resolve_attention("flash-attn", torch.device("cpu"), layout())

    def broken(name: str) -> str:
        if name == "flash_attn":
            return name
        raise ImportError("undefined symbol")

    only_earlier = {"flash_attn": "there"}
    for find in ({}.get, only_earlier.get, broken):
        monkeypatch.setattr("common.engine.attention.find_spec", find)
        with pytest.raises(ConfigError, match=r"flash-attn: needs the extra flash-attn; .*; or give auto or triton"):
            resolve_attention("flash-attn", CUDA, layout())


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int | None, int | None],
    learnable_sink: Tensor | None,
    softcap: float,
) -> tuple[Tensor, None]:
    """The function of FlashAttention-4 by its documentation, as far as the backend uses it."""
    assert causal and q.ndim == 3 and k.stride(-1) == v.stride(-1) == q.stride(-1) == page_table.stride(-1) == 1
    assert cu_seqlens_q.dtype == seqused_k.dtype == page_table.dtype == torch.int32
    assert len(page_table) == len(seqused_k) == len(cu_seqlens_q) - 1
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == seqused_k.max()
    new = q.split(cu_seqlens_q.diff().tolist())
    options = (softmax_scale, window_size, softcap, learnable_sink)
    parts = [
        attend_row(part, k, v, page_table[row], length, *options)
        for row, (part, length) in enumerate(zip(new, seqused_k.tolist(), strict=True))
    ]
    return torch.cat(parts), None


def attend_row(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    length: int,
    scale: float,
    window_size: tuple[int | None, int | None],
    softcap: float,
    sink: Tensor | None,
) -> Tensor:
    """Attend ``[n, heads, dim]``, causal from the bottom right corner, over pages ``[pages, size, kv_heads, dim]``."""
    pages = page_table[: -(-length // keys.shape[1])].long()
    group = q.shape[1] // keys.shape[2]
    query, key = torch.arange(len(q))[:, None] + length - len(q), torch.arange(length)[None, :]
    is_seen = key <= query
    before, after = window_size
    if before is not None and after is not None:
        is_seen &= (key >= query - before) & (key <= query + after)
    row_keys, row_values = (
        part[pages].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1) for part in (keys, values)
    )
    row_keys, row_values = (part.where(is_seen.any(0)[:, None, None], 0) for part in (row_keys, row_values))
    scores = torch.einsum("nhd,lhd->hnl", q.float(), row_keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~is_seen, float("-inf"))
    if sink is not None:
        scores = torch.cat((scores, sink[:, None, None].expand(-1, len(q), 1)), 2)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hnl,lhd->nhd", weights, row_values).to(q.dtype)


def flash(pool: KVPool, num_heads: int, params: LayerParams) -> Any:
    from common.engine.attention.flash_attn_backend import FlashAttention

    return FlashAttention(pool, num_heads, params, flash_attn_varlen_func, min_scores=0)


@pytest.mark.slow
@needs_interpreter
@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 130))), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 16, 32]),
    heads=st.sampled_from([(4, 1, 16), (6, 2, 24)]),
    window=st.sampled_from([None, 1, 50]),
    soft_cap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
)
def test_calls_by_the_documentation_give_what_the_reference_gives(
    rows: Rows,
    page_size: int,
    heads: tuple[int, int, int],
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    params = make_params(heads[0], window=window, soft_cap=soft_cap, has_sinks=has_sinks)
    compare(flash, "cpu", "float16", rows, page_size, heads, params)


@needs_interpreter
@pytest.mark.parametrize(
    ("rows", "is_package"),
    [
        ([(0, 200)], True),
        ([(0, 1), (0, 200), (5, 1), (0, 180)], True),  # rows of the package that are not neighbours
        ([(0, 130)], False),
        ([(500, 20), (500, 30)], False),
        ([(1000, 96)], False),  # fits into one tile, for which another kernel would be compiled
        ([(0, 1), (500, 1)], False),
    ],
)
def test_the_package_computes_long_prompts_alone(rows: Rows, is_package: bool) -> None:
    from common.engine.attention.flash_attn_backend import MIN_LINES, FlashAttention, FlashPass

    num_pages = sum(-(-(start + new) // 16) for start, new in rows)
    pool = KVPool(layout(head_dim=16), num_pages)
    backend = FlashAttention(pool, 4, PLAIN, flash_attn_varlen_func, min_scores=MIN_LINES**2)
    step = backend.prepare(make_step(rows, 16, num_pages, "cpu", seed=1))
    assert any(isinstance(one, FlashPass) for one in step._passes) == is_package
    pool.close()


@needs_interpreter
def test_each_kind_of_layer_is_compiled_once_at_start_on_the_device_of_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from common.engine.attention.flash_attn_backend import FlashAttention

    calls: list[dict[str, Any]] = []
    current: list[torch.device] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        assert current == [pool.device]
        calls.append(options)
        return flash_attn_varlen_func(q, k, v, **options)

    @contextmanager
    def current_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr("common.engine.attention.flash_attn_backend.current_device", current_device)

    params = (*PLAIN, AttentionParams(window=9), *PLAIN, AttentionParams(window=7), AttentionParams(soft_cap=2.0))
    pool = KVPool(PageLayout(5, 2, 16, 16, "bfloat16"), 2)
    FlashAttention(pool, 4, params, attend).compile()
    pool.close()
    found = sorted((options["window_size"] != (None, None), options["softcap"]) for options in calls)
    assert found == [(False, 0.0), (False, 2.0), (True, 0.0)]


def package(pool: KVPool, num_heads: int, params: LayerParams) -> Any:
    """The backend on a GPU, for steps with any number of scores."""
    backend = named("flash-attn")(pool, num_heads, params)
    backend._min_scores = 0  # type: ignore[attr-defined]
    return backend


@pytest.mark.cuda
@of_the_package
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "params",
    [{}, {"window": 50}, {"soft_cap": 20.0}, {"has_sinks": True}],
    ids=["plain", "window", "soft cap", "sinks"],
)
def test_the_package_equals_the_reference(dtype: str, params: dict[str, Any]) -> None:
    pytest.importorskip("flash_attn.cute")
    for heads in ((8, 2, 128), (4, 4, 64), (4, 2, 256)):
        for page_size in (16, 32, 1):
            made = make_params(heads[0], "cuda", **params)
            rows = [(300, 1), (0, 700), (513, 333), (0, 1), (70, 40), (8, 130)]
            compare(package, "cuda", dtype, rows, page_size, heads, made, may_read_outside="window" in params)


@pytest.mark.cuda
@of_the_package
def test_pages_far_behind_the_first_are_found() -> None:
    """Offsets of numbers do not fit into 32 bits."""
    pytest.importorskip("flash_attn.cute")
    one_layer = PageLayout(1, 8, 128, 16, "bfloat16")
    num_pages = 2**32 // one_layer.page_bytes + 300
    found = []
    for first in (0, num_pages - 256):
        pool = KVPool(one_layer, num_pages, CUDA)
        backend = package(pool, 16, PLAIN)
        table = np.arange(first, first + 256, dtype=np.int32)[None]
        batch = make_batch(RowArrays(np.array([0]), np.array([4096]), table, 16), CUDA)
        torch.manual_seed(0)
        q, k, v = torch.randn(4096, 32, 128, device=CUDA, dtype=torch.bfloat16).split([16, 8, 8], dim=1)
        found.append(backend.prepare(batch).extend(0, q, k, v))
        pool.close()
    assert torch.equal(*found)
