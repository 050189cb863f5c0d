"""Weights of 8 and 4 bits: how they are rounded, and that the kernel multiplies with them as torch does."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.engine_driver import Driver
from support.examples import examples
from torch import Tensor

from common.config.shared import SMALL_MODEL, WeightDtype
from common.engine.cpu.huge_pages import HugePages
from common.engine.cpu.kernels import Kernels
from common.engine.factory import load_executor
from common.engine.models import linear as linear_module
from common.engine.models.config import ModelConfig
from common.engine.models.linear import Linear, quantized_product
from common.engine.models.quantization import QuantizedWeight, TorchQuantizedProduct, quantize_weight
from common.errors import ConfigError
from common.sampling_params import SamplingParams
from scripts.benchmarks.engines.quantization import measure_errors


def dequantized(weight: QuantizedWeight) -> Tensor:
    """The weight that a quantized one stands for, ``[out, in]`` float32."""
    zeros, scales = (each.repeat_interleave(weight.group_size, dim=1) for each in (weight.zeros, weight.scales))
    return (weight.values.float() - zeros) * scales


def test_int8_rounds_each_output_to_127_steps_on_both_sides_of_zero() -> None:
    weight = torch.tensor([[127.0, -63.6, 0.4, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found = quantize_weight(weight, "int8")
    assert found.values.tolist() == [[255, 64, 128, 128], [128] * 4]
    assert found.scales.tolist() == [[1.0], [0.0]]
    assert dequantized(found).tolist() == [[127.0, -64.0, 0.0, 0.0], [0.0] * 4]


def test_int4_has_sixteen_steps_from_the_least_to_the_largest_of_each_group() -> None:
    weight = torch.zeros(1, 64)
    weight[0, :3] = torch.tensor([-5.0, 10.0, 2.4])  # the range of the first group of 64 is 15: steps of 1
    found = quantize_weight(weight, "int4")
    assert found.group_size == 64
    assert found.zeros.tolist() == [[5]]
    assert dequantized(found)[0, :4].tolist() == [-5.0, 10.0, 2.0, 0.0]


@pytest.mark.parametrize(("inputs", "size"), [(1024, 128), (192, 64), (96, 32)])
def test_int4_takes_the_largest_group_that_divides_the_inputs(inputs: int, size: int) -> None:
    assert quantize_weight(torch.ones(1, inputs), "int4").group_size == size


def test_int4_refuses_a_width_that_no_group_divides() -> None:
    with pytest.raises(ConfigError, match=r"--weight-dtype int4.*48 inputs.*--weight-dtype int8"):
        quantize_weight(torch.ones(1, 48), "int4")


@settings(max_examples=examples(30), deadline=None)
@given(dtype=st.sampled_from(["int8", "int4"]), seed=st.integers(0, 99), spread=st.sampled_from([1e-6, 0.02, 50.0]))
def test_no_weight_moves_by_more_than_a_step(dtype: WeightDtype, seed: int, spread: float) -> None:
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(seed)) * spread
    found = quantize_weight(weight, dtype)
    steps = found.scales.repeat_interleave(found.group_size, dim=1)
    assert ((dequantized(found) - weight).abs() <= steps * 1.001).all()


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.one_of(st.integers(1, 19), st.integers(31, 50)),
    widths=st.sampled_from([(16, 32), (48, 128), (64, 256), (208, 96)]),
    bits=st.sampled_from([8, 4]),
    group=st.sampled_from([32, 96, 128, 1024]),
    has_bias=st.booleans(),
    dtypes=st.sampled_from(
        [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32"), ("float16",) * 2]
    ),
)
def test_the_kernel_equals_torch_and_no_row_depends_on_the_others(
    compiled: Kernels,
    rows: int,
    widths: tuple[int, int],
    bits: int,
    group: int,
    has_bias: bool,
    dtypes: tuple[str, str],
) -> None:
    """Any values, scales and zero points, as a checkpoint may have them; inputs that need no rounding, and others."""
    torch.manual_seed(rows)
    num_out, num_in = widths
    group = group if num_in % group == 0 else num_in
    taken, given = (getattr(torch, name) for name in dtypes)
    weight = QuantizedWeight(
        values=torch.randint(0, 2**bits, widths, dtype=torch.uint8),
        scales=torch.rand(num_out, num_in // group) * 0.01,
        zeros=torch.randint(2 ** (bits - 1) - 3, 2 ** (bits - 1) + 3, (num_out, num_in // group), dtype=torch.uint8),
        bits=bits,
    )
    bias = torch.randn(num_out).to(taken) if has_bias else None
    with patch.object(linear_module, "load_kernels", lambda: compiled):
        product = quantized_product(weight, bias, HugePages())
    whole = torch.randint(-127, 128, (rows, num_in))
    whole[:, ::group] = 127
    tolerance = 1e-4 if given == torch.float32 else 1e-2
    torch.testing.assert_close(
        product(whole.to(taken), given),
        TorchQuantizedProduct(weight, bias)(whole.to(taken), given),
        atol=tolerance,
        rtol=tolerance,
    )
    x = torch.randn(rows, num_in).to(taken)
    found = product(x, given)
    exact = x.double() @ dequantized(weight).double().T + (0 if bias is None else bias.double())
    assert (found.double() - exact).norm() <= 0.02 * exact.norm() + 0.1, "more than the rounding of the inputs"
    assert torch.equal(found, torch.cat([product(row, given) for row in x.split(1)]))


def test_inputs_that_are_zero_or_not_finite() -> None:
    linear = Linear(torch.randn(16, 32).bfloat16())
    linear.pack("int8")
    x = torch.ones(4, 32, dtype=torch.bfloat16)
    x[0], x[1, 7], x[2, 5] = 0.0, float("nan"), float("inf")
    y = linear(x)
    assert (y[0] == 0).all()
    assert not y[1:3].isfinite().any(), "a broken input looks like an answer"
    assert y[3].isfinite().all()


def test_a_packed_weight_is_not_kept_twice() -> None:
    weight = torch.randn(16, 32).bfloat16()
    tied, other = Linear(weight), Linear(weight)
    tied.pack("int8", keep_weight=True)
    other.pack("int8")
    assert tied.weight is weight
    assert other.weight is None


def test_the_small_model_hardly_changes() -> None:
    """``bench quantization`` prints these figures; float32 has a perplexity of 35.5 on this verse."""
    errors = measure_errors(Path(SMALL_MODEL))
    assert errors["bfloat16"].divergence < 0.001
    assert errors["int8"].divergence < 0.003
    assert errors["int4"].divergence < 0.05
    assert errors["int8"].perplexity == pytest.approx(errors["bfloat16"].perplexity, rel=0.01)
    assert errors["int4"].perplexity == pytest.approx(errors["bfloat16"].perplexity, rel=0.04)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_tokens_and_logprobs_do_not_depend_on_the_rows_beside_them(dtype: WeightDtype) -> None:
    params = SamplingParams(temperature=0.0, logprobs=2)
    prompts = [tuple(range(5, 5 + length)) for length in (3, 40, 17)]
    found: dict[int, list[object]] = {}
    for rows in ([0, 1, 2], [2], [1, 0]):
        executor = load_executor(
            ModelConfig.load(SMALL_MODEL), num_slots=3, num_pages=30, page_size=16, weight_dtype=dtype
        )
        driver = Driver(executor)
        texts = {row: driver.start(row, prompts[row], params) for row in rows}
        driver.finish([*texts.values()], max_new=8)
        for row, text in texts.items():
            found.setdefault(row, []).append((text.output, text.logprobs))
        executor.close()
    assert all(each == same[0] for same in found.values() for each in same)
