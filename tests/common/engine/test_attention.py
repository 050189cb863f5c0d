"""Every attention backend agrees with ``reference`` on any mixture of rows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.attention_steps import TOLERANCE, compare, make_params, make_step, named
from support.engine.devices import DEVICES
from support.engine.reference_models import make_model
from support.examples import examples

from common.cache.page_layout import PageLayout
from common.engine.attention import BACKENDS, copied_bytes_on_cpu, cpu, log_choice, make_attention, resolve_attention
from common.engine.attention.cpu import CpuAttention
from common.engine.attention.protocol import AttentionParams
from common.engine.batch import RowArrays, make_batch
from common.engine.cpu.kernels import LANES, load_kernels
from common.engine.factory import load_executor
from common.engine.kv_pool import KVPool
from common.engine.models.config import ModelConfig
from common.engine.models.linear import Linear
from common.errors import ConfigError

#: flash-attn has tests of its own.
FAST = [name for name in BACKENDS if name not in ("reference", "flash-attn")]

rows_strategy = st.lists(
    st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=5
)


def heads_for(backend: str, heads: list[tuple[int, int, int]]) -> st.SearchStrategy[tuple[int, int, int]]:
    """Those of (heads, KV heads, numbers in each) that the backend does not refuse."""
    return st.sampled_from([one for one in heads if backend != "cpu" or one[2] % LANES == 0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", FAST)
def test_a_backend_equals_the_reference_on_any_mixture_of_rows(backend: str, dtype: str, device: str) -> None:
    skip_if_not_served(backend, device)

    @settings(max_examples=examples(10 if backend == "triton" else 25), deadline=None)
    @given(
        rows=rows_strategy,
        page_size=st.sampled_from([1, 3, 16, 64]),
        heads=heads_for(backend, [(4, 2, 16), (4, 4, 64), (6, 1, 24), (16, 8, 128), (5, 5, 20)]),
    )
    def check(rows: list[tuple[int, int]], page_size: int, heads: tuple[int, int, int]) -> None:
        compare(named(backend), device, dtype, rows, page_size, heads)

    check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", FAST)
def test_long_rows_keep_their_precision(backend: str, device: str) -> None:
    skip_if_not_served(backend, device)
    compare(named(backend), device, "float32", [(1500, 1), (900, 70), (0, 300)], 16, (4, 2, 32))


@pytest.mark.slow(sample=0.4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(2, 2, 32), (4, 2, 64), (8, 1, 128), (4, 1, 256), (6, 2, 32)])
@pytest.mark.parametrize("backend", FAST)
def test_long_extends_equal_the_reference_inside_and_on_the_edge_of_tiles(
    backend: str, heads: tuple[int, int, int], dtype: str, device: str
) -> None:
    """Rows end inside and on the edge of tiles of 32 and 256 tokens, cold and with a prefix; one row decodes."""
    skip_if_not_served(backend, device)
    compare(named(backend), device, dtype, [(0, 33), (0, 256), (37, 1), (250, 70), (512, 32), (5, 289)], 16, heads)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 3, 32), (8, 1, 128)])
def test_decode_rows_of_every_length_around_a_tile_equal_the_reference(heads: tuple[int, int, int], dtype: str) -> None:
    """The kernel reads up to 128 tokens in one tile, 16 from each of up to 8 places."""
    lengths = (1, 2, 15, 16, 17, 33, 127, 128, 129, 143, 145, 255, 257, 300)
    for page_size in (1, 16):
        compare(named("cpu"), "cpu", dtype, [*((length - 1, 1) for length in lengths), (126, 5)], page_size, heads)


@pytest.mark.parametrize("backend", FAST)
def test_a_row_longer_than_one_unit_of_work_is_split(backend: str) -> None:
    skip_if_not_served(backend, "cpu")
    compare(named(backend), "cpu", "bfloat16", [(30, 1_100)], 64, (2, 1, 32))


def test_attention_leaves_the_state_of_matrix_units_to_onednn() -> None:
    """Each thread has one configuration of the AMX tiles, and oneDNN uses it too."""
    torch.manual_seed(0)
    linear = Linear(torch.randn(64, 64).bfloat16())
    linear.pack()
    x = torch.randn(40, 64).bfloat16()
    before = linear(x)
    compare(named("cpu"), "cpu", "bfloat16", [(0, 40)], 16, (2, 1, 32))
    assert torch.equal(linear(x), before)


@pytest.mark.parametrize(
    ("backend", "dtype", "num_bytes"),
    [
        *[("cpu", "bfloat16", 6 * 2 * 128 * 4), ("cpu", "int8", 0), ("cpu", "float16", (8 + 16) * 2 * 128 * 2)],
        *[("torch", "bfloat16", (8 + 16) * 2 * 128 * 2), ("torch", "int8", (8 + 16) * 2 * 128 * 4)],
    ],
    ids=["one head on each thread", "none", "cpu by torch", "torch", "torch with scales"],
)
def test_long_extends_copy_keys_and_values(
    monkeypatch: pytest.MonkeyPatch, backend: str, dtype: str, num_bytes: int
) -> None:
    kernels = SimpleNamespace(has_long_attention=True, has_int8_dot=True)
    monkeypatch.setattr(cpu, "load_kernels", lambda: kernels)
    layout = PageLayout(num_layers=28, num_kv_heads=8, head_dim=128, page_size=16, dtype=dtype)
    assert copied_bytes_on_cpu(backend, layout, num_heads=16, num_threads=6) == num_bytes


def test_the_kernel_for_long_extends_has_the_memory_that_is_planned() -> None:
    kernels, layout = load_kernels(), PageLayout(1, 2, 64, 16, "bfloat16")
    if kernels is None or not kernels.has_long_attention:
        pytest.skip("torch computes long extends here")
    pool = KVPool(layout, 32)
    table = np.arange(32, dtype=np.int32)[None]
    batch = make_batch(RowArrays(np.array([448]), np.array([64]), table, 16), torch.device("cpu"))
    pieces = CpuAttention(pool, 4, (AttentionParams(),), kernels).prepare(batch).long_pieces
    pool.close()
    assert pieces is not None
    copied = copied_bytes_on_cpu("cpu", layout, num_heads=4, num_threads=torch.get_num_threads())
    assert pieces.scratch.nbytes == 512 * copied


def test_the_reference_agrees_with_attention_worked_out_by_hand() -> None:
    """One head of two numbers; scores (q . k) / sqrt(2) are 0 and ln 3, so the weights are 1/4 and 3/4."""
    pool = KVPool(PageLayout(1, 1, 2, 1, "float32"), 2)
    batch = make_batch(RowArrays(np.array([1]), np.array([1]), np.array([[1, 0]], np.int32), 1), torch.device("cpu"))
    keys, values, _, _ = pool.layer(0)
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


def hand_made_step(values: list[float], params: AttentionParams) -> float:
    """Attention of one decode row with one head of one number: all scores are 1, the values are given."""
    pool = KVPool(PageLayout(1, 1, 1, 1, "float32"), len(values))
    table = np.arange(len(values), dtype=np.int32)[None]
    batch = make_batch(RowArrays(np.array([len(values) - 1]), np.array([1]), table, 1), torch.device("cpu"))
    keys, cached, _, _ = pool.layer(0)
    keys.fill_(1.0)
    cached[:, 0, 0, 0] = torch.tensor(values)
    one, last = torch.ones(1, 1, 1), torch.full((1, 1, 1), values[-1])
    out = make_attention("reference", pool, 1, (params,)).prepare(batch).extend(0, one, one, last)
    pool.close()
    return out.item()


def test_a_window_counts_the_token_itself() -> None:
    assert hand_made_step([100.0, 2.0, 4.0], AttentionParams(window=2)) == pytest.approx(3.0)


def test_a_sink_takes_weight_and_has_no_value() -> None:
    """The score of the only token is 1, like the sink's: half of the weight is left."""
    assert hand_made_step([6.0], AttentionParams(sinks=torch.tensor([1.0]))) == pytest.approx(3.0)


def test_the_soft_cap_follows_the_scale_and_precedes_the_sink() -> None:
    """The score is 2 tanh(100 / 2) = 2; with a sink of 0 the weight is e^2 / (e^2 + 1)."""
    params = AttentionParams(scale=100.0, soft_cap=2.0, sinks=torch.zeros(1))
    assert hand_made_step([1.0], params) == pytest.approx(float(np.exp(2) / (np.exp(2) + 1)))


@pytest.mark.slow(sample=0.4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", FAST)
def test_a_backend_equals_the_reference_with_any_parameters(backend: str, dtype: str, device: str) -> None:
    """Small shapes, so that Triton's interpreter can compute them too."""
    is_interpreted = backend == "triton" and device == "cpu"
    if backend == "cpu" and device != "cpu":
        pytest.skip("a backend for CPUs")
    if is_interpreted and dtype == "bfloat16":
        pytest.skip("Triton's interpreter has no bfloat16 products")

    # On CUDA every new combination is compiled, which takes seconds.
    @settings(max_examples=examples(10 if backend == "triton" and device == "cuda" else 25), deadline=None)
    @given(
        rows=st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=3),
        page_size=st.sampled_from([1, 3, 16]),
        heads=heads_for(backend, [(2, 1, 16), (6, 2, 32), (6, 2, 24), (3, 3, 20)]),
        window=st.sampled_from([None, 1, 7, 30]),
        soft_cap=st.sampled_from([None, 1.5, 30.0]),
        scale=st.sampled_from([None, 0.4]),
        has_sinks=st.booleans(),
    )
    def check(
        rows: list[tuple[int, int]],
        page_size: int,
        heads: tuple[int, int, int],
        window: int | None,
        soft_cap: float | None,
        scale: float | None,
        has_sinks: bool,
    ) -> None:
        params = make_params(heads[0], device, has_sinks=has_sinks, window=window, soft_cap=soft_cap, scale=scale)
        compare(named(backend), device, dtype, rows, page_size, heads, params)

    check()


@pytest.mark.parametrize("fields", [{"window": 7}, {"soft_cap": 30.0}, {"has_sinks": True}, {}])
def test_the_cpu_kernels_compute_windows_soft_caps_and_sinks_themselves(fields: dict[str, Any]) -> None:
    if load_kernels() is None:
        pytest.skip("there is no compiler")
    pool = KVPool(PageLayout(1, 2, 32, 16, "bfloat16"), 1)
    for name in ("auto", "cpu"):
        assert type(make_attention(name, pool, 4, (make_params(4, **fields),))) is CpuAttention
    pool.close()


@pytest.mark.parametrize("head_dim", [20, 272])
def test_the_cpu_kernels_refuse_heads_of_other_sizes_by_name(head_dim: int, caplog: pytest.LogCaptureFixture) -> None:
    layout, device = PageLayout(1, 2, head_dim, 16, "bfloat16"), torch.device("cpu")
    with pytest.raises(ConfigError, match=rf"--attention-backend cpu: needs heads of .* 16 .* {head_dim}: give auto"):
        resolve_attention("cpu", device, layout)
    with caplog.at_level("INFO"):
        assert resolve_attention("auto", device, layout) == "torch"
        log_choice("torch", device, layout)
        assert not caplog.text
        log_choice("auto", device, layout)
    assert f"this model has {head_dim}" in caplog.text


def test_a_start_says_once_that_auto_is_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ModelConfig.load(str(make_model(tmp_path, "qwen3", head_dim=20)))
    with caplog.at_level("INFO"):
        for attention in ("torch", "auto"):
            load_executor(config, dtype="float32", num_slots=1, num_pages=1, page_size=16, attention=attention).close()
    assert [record.getMessage().partition(":")[0] for record in caplog.records if "auto" in record.getMessage()] == [
        "--attention-backend auto is torch here"
    ]


@pytest.mark.slow(sample=0.34)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(17, 1, 16), (40, 2, 32), (48, 1, 128)])
def test_more_than_16_query_heads_of_one_kv_head_are_computed_in_groups(
    heads: tuple[int, int, int], dtype: str
) -> None:
    if load_kernels() is None:
        pytest.skip("there is no compiler")
    pool = KVPool(PageLayout(1, heads[1], heads[2], 16, "bfloat16"), 1)
    assert type(make_attention("auto", pool, heads[0])) is CpuAttention
    pool.close()
    params = make_params(heads[0], "cpu", has_sinks=True, window=50)
    for how in (AttentionParams(), params):
        compare(named("cpu"), "cpu", dtype, [(0, 1), (37, 1), (250, 70), (5, 20), (0, 300)], 16, heads, how)


#: Fields of layouts that most models do not have, with the heads to try.
FORMATS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "short values": ({"value_dim": 16}, (4, 2, 24)),
    "long values": ({"value_dim": 40}, (3, 1, 16)),
    "latent": ({"value_dim": 32, "is_latent": True}, (4, 1, 40)),
    "latent of many heads": ({"value_dim": 512, "is_latent": True}, (32, 1, 520)),
    "fp8": ({"dtype": "fp8_e4m3"}, (4, 2, 16)),
    "fp8 short values": ({"dtype": "fp8_e4m3", "value_dim": 20}, (2, 2, 24)),
    "int8": ({"dtype": "int8"}, (4, 2, 16)),
    "int8 short values": ({"dtype": "int8", "value_dim": 20}, (2, 2, 24)),
    "fp8 latent": ({"dtype": "fp8_e4m3", "value_dim": 16, "is_latent": True}, (6, 1, 24)),
}


@pytest.mark.slow(sample=0.4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_backend_equals_the_reference_in_any_format_of_pages(
    name: str, backend: str, dtype: str, device: str
) -> None:
    """Decode rows, a prompt, and a prompt with a prefix, plain and with all parameters.

    Triton's interpreter, which is slow, computes two rows: plain in float16, with all parameters in float32.
    """
    if backend == "triton" and device == "cpu" and dtype == "bfloat16":
        pytest.skip("Triton's interpreter has no bfloat16 products")
    format, heads = FORMATS[name]
    if backend == "triton" and format.get("dtype") == "int8":
        pytest.skip("Triton refuses int8")
    if backend == "triton" and device == "cuda" and dtype == "float32" and "dtype" in format:
        pytest.skip("computes FP8 pages in 16 bits")
    everything = make_params(heads[0], device, has_sinks=True, window=9, soft_cap=5.0, scale=0.3)
    rows, cases = [(70, 1), (0, 9), (20, 5), (0, 1)], {16: AttentionParams(), 3: everything}
    if backend == "triton" and device == "cpu":
        rows, cases = rows[:2], {16: cases[16]} if dtype == "float16" else {3: everything}
    for page_size, params in cases.items():
        compare(named(backend), device, dtype, rows, page_size, heads, params, format=format)


@pytest.mark.parametrize(
    ("format", "words"),
    [
        ({"dtype": "fp8_e4m3"}, "cannot read KV pages in (FP8|fp8_e4m3)"),
        ({"value_dim": 64}, "needs keys and values of one size"),
        ({"is_latent": True}, "needs keys and values of one size"),
    ],
)
def test_the_cpu_kernels_and_flash_attn_refuse_other_formats_by_name(
    monkeypatch: pytest.MonkeyPatch, format: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("common.engine.attention.find_spec", lambda name: name)
    layout = PageLayout(1, 2, 128, 32, **{"dtype": "bfloat16", **format})
    for backend, device in (("cpu", "cpu"), ("flash-attn", "cuda")):
        with pytest.raises(ConfigError, match=rf"--attention-backend {backend}: {words}.*give .*(triton|torch)"):
            resolve_attention(backend, torch.device(device), layout)
    assert resolve_attention("auto", torch.device("cpu"), layout) == "torch"


@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
@pytest.mark.parametrize("head_dim", [16, 32])
def test_a_number_that_is_not_finite_looks_like_no_answer_in_pages_of_int8(backend: str, head_dim: int) -> None:
    for broken in (float("nan"), float("inf")):
        pool = KVPool(PageLayout(1, 1, head_dim, 4, "int8"), 1)
        batch = make_step([(0, 3)], 4, 1, "cpu", seed=0)
        q, k, v = torch.randn(3, 3, 1, head_dim)
        v[1] = broken
        out = make_attention(backend, pool, 1).prepare(batch).extend(0, q, k, v)
        pool.close()
        assert not out[1:].isfinite().any()


def test_a_backend_for_gpus_refuses_pages_of_int8_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.attention.find_spec", lambda name: name)
    layout = PageLayout(1, 2, 128, 32, "int8")
    for name, backend in (("auto", "triton"), ("triton", "triton"), ("flash-attn", "flash-attn")):
        with pytest.raises(ConfigError, match=f"--attention-backend {backend}: cannot read KV pages in int8: give"):
            resolve_attention(name, torch.device("cuda"), layout)
    assert resolve_attention("auto", torch.device("cpu"), layout) == "cpu"


def skip_if_not_served(backend: str, device: str) -> None:
    if backend == "cpu" and device != "cpu":
        pytest.skip("a backend for CPUs")
    if backend == "triton" and device == "cpu":
        pytest.skip("too large for Triton's interpreter")
