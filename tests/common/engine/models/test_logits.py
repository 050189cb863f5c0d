"""Logits are sums in float32 that no product rounds to 16 bits, so that their order is that of the exact sums."""

import pytest
import torch
from support.engine.native_targets import USABLE

from common.engine.cpu.compile_native import BuildError
from common.engine.cpu.kernels import Kernels, open_kernels
from common.engine.cpu.targets import Target
from common.engine.models import linear
from common.engine.models.linear import Linear

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[*USABLE, None], ids=lambda target: "torch" if target is None else target.name)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels | None:
    """The kernels that linear layers use; None: torch computes."""
    target: Target | None = request.param
    try:
        found = None if target is None else open_kernels(target)
    except BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(linear, "load_kernels", lambda: found)
    return found


def packed_head(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    head = Linear(weight, bias)
    head.pack(in_float32=True)
    return head


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_words", [48, 41])
@pytest.mark.usefixtures("kernels")
def test_two_logits_that_would_round_to_one_number_stay_apart(dtype: torch.dtype, num_words: int) -> None:
    """The sums are 4,032.5 and 4,032.75: numbers near them are 16 apart in bfloat16, and 2 in float16."""
    weight = torch.zeros(num_words, 65, dtype=dtype)[:, :64]
    weight[7], weight[9] = 1.0, 1.0
    weight[9, 0] = 1.5
    x = torch.full((3, 64), 64.0, dtype=dtype)
    x[:, 0] = 0.5
    logits = packed_head(weight)(x, torch.float32)
    assert logits.dtype == torch.float32
    assert logits[:, 7].tolist() == [4032.5] * 3
    assert logits[:, 9].tolist() == [4032.75] * 3
    assert logits.argmax(dim=1).tolist() == [9] * 3
    assert logits[:, 7].to(dtype).tolist() == logits[:, 9].to(dtype).tolist(), "the example shows nothing"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_words", [2000, 2001])
@pytest.mark.usefixtures("kernels")
def test_random_logits_are_those_of_float32(dtype: torch.dtype, has_bias: bool, num_words: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(num_words, 600).to(dtype), torch.randn(5, 600).to(dtype)  # torch widens it in three parts
    bias = torch.randn(num_words).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    found = packed_head(weight, bias)(x, torch.float32)
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-5)
