"""All layers in one native call compute the bits that the same kernels compute when Python calls them one by one."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.attention_steps import make_params, make_step
from torch import Tensor

from common.config.shared import WeightDtype
from common.engine.attention.cpu import CpuAttention, CpuStep
from common.engine.attention.protocol import AttentionParams
from common.engine.cpu.kernels import load_kernels
from common.engine.kv_pool import TORCH_DTYPES, KVPool
from common.engine.models.config import ModelConfig
from common.engine.models.decoder import Decoder, allocate_weights
from scripts.benchmarks.engines.engine import model_shape

PAGE_SIZE = 16
NUM_PAGES = 40


class FromPython:
    """The attention of a ``CpuStep`` for a decoder that does not know how to run it natively."""

    def __init__(self, step: CpuStep) -> None:
        self.extend = step.extend


class Case:
    """A random model and pool on this machine's kernels."""

    def __init__(self, config: ModelConfig, dtype: str, weight_dtype: WeightDtype) -> None:
        kernels = load_kernels()
        assert kernels is not None
        torch.manual_seed(0)
        weights, tensors = allocate_weights(config, TORCH_DTYPES[dtype], torch.device("cpu"))
        for name, tensor in tensors.items():
            tensor.uniform_(0.5, 1.5) if "norm" in name else tensor.normal_(0, 0.3)
        weights.pack(weight_dtype)
        self.model = Decoder(config, weights)
        self.pool = KVPool(config.layout(PAGE_SIZE, dtype), NUM_PAGES)
        self.pool.pages.view(TORCH_DTYPES[dtype]).normal_()
        self._content = self.pool.pages.clone()
        special = make_params(config.num_heads, window=9, soft_cap=5.0, has_sinks=True)
        params = [AttentionParams(scale=0.2), *[special] * (config.num_layers - 1)]
        self._attention = CpuAttention(self.pool, config.num_heads, params, kernels)

    @property
    def is_native(self) -> bool:
        return self.model._native is not None

    def run(self, rows: Sequence[tuple[int, int]], keep: list[int] | None, *, natively: bool) -> tuple[Tensor, Tensor]:
        """Return the hidden states of a step and the pool's bytes after it."""
        batch = make_step(list(rows), PAGE_SIZE, NUM_PAGES, "cpu", seed=len(rows))
        self.pool.pages.copy_(self._content)
        tokens = torch.arange(batch.num_tokens) % self.model.config.vocab_size
        step = self._attention.prepare(batch)
        assert step.is_native
        kept = None if keep is None else torch.tensor(keep, dtype=torch.int64)
        with torch.inference_mode():
            hidden = self.model.hidden_states(tokens, batch.positions, step if natively else FromPython(step), kept)
        return hidden.clone(), self.pool.pages.clone()


def config_of(heads: tuple[int, int, int], has_biases: bool, has_norms: bool) -> ModelConfig:
    num_heads, num_kv_heads, head_dim = heads
    return replace(
        model_shape(3),
        hidden_size=96,
        intermediate_size=160,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=48,
        has_qk_norm=has_norms,
        has_qkv_bias=has_biases,
        has_o_bias=has_biases,
        has_mlp_bias=has_biases,
    )


#: The weights of a model for which our kernels have every product, and its dtype.
FORMATS: list[tuple[str, WeightDtype]] = [
    *(("bfloat16", each) for each in ("auto", "int8", "int4")),  # type: ignore[misc]
    ("float32", "auto"),
    ("float16", "auto"),
    ("float32", "int8"),
    ("float16", "int4"),
]


@pytest.mark.parametrize(("dtype", "weight_dtype"), FORMATS)
def test_a_native_call_has_the_bits_of_the_kernels_called_from_python(dtype: str, weight_dtype: WeightDtype) -> None:
    num_new = st.integers(1, 12)
    kernels = load_kernels()
    if dtype == "bfloat16" and kernels is not None and kernels.has_long_attention:  # else torch computes long rows
        num_new = st.one_of(num_new, st.integers(32, 40))

    @settings(max_examples=15, deadline=None)
    @given(
        rows=st.lists(st.tuples(st.integers(0, 60), num_new), min_size=1, max_size=5),
        heads=st.sampled_from([(4, 2, 32), (8, 1, 64), (3, 3, 32)]),
        has_biases=st.booleans(),
        has_norms=st.booleans(),
        data=st.data(),
    )
    def check(
        rows: list[tuple[int, int]], heads: tuple[int, int, int], has_biases: bool, has_norms: bool, data: st.DataObject
    ) -> None:
        num_tokens = sum(new for _, new in rows)
        keep = data.draw(st.none() | st.lists(st.integers(0, num_tokens - 1), max_size=num_tokens))
        case = Case(config_of(heads, has_biases, has_norms), dtype, weight_dtype)
        if not case.is_native:
            pytest.skip("this processor has not all of our kernels")
        found, written = case.run(rows, keep, natively=True)
        expected, expected_written = case.run(rows, keep, natively=False)
        case.pool.close()
        assert found.shape == (num_tokens if keep is None else len(keep), 96)
        assert torch.equal(found, expected)
        assert torch.equal(written, expected_written), "different KV was written"

    check()


def test_a_product_of_whole_tiles_keeps_to_its_memory() -> None:
    """31 rows are no whole tile, so each product copies them first. Memory for rounded rows follows, unused here."""
    kernels = load_kernels()
    if kernels is None or not kernels.has_amx:
        pytest.skip("no tiles")
    case = Case(config_of((4, 2, 32), False, True), "bfloat16", "auto")
    rows, keep = [(0, 31)], list(range(31))
    case.run(rows, keep, natively=True)
    assert case.model._native is not None
    memory = case.model._native._memory
    with torch.inference_mode():
        memory.fill_(90)
    case.run(rows, keep, natively=True)
    case.pool.close()
    assert (memory[-32 * 160 :] == 90).all()


def test_layers_with_a_product_that_is_not_ours_are_computed_from_python() -> None:
    """No kernel multiplies weights whose outputs are no multiple of 16."""
    config = config_of((4, 2, 32), False, True)
    for dtype in ("float32", "bfloat16"):
        assert not Case(replace(config, hidden_size=104), dtype, "auto").is_native
