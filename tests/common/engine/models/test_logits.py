"""Logits are sums in float32 that no product rounds to 16 bits, so that their order is that of the exact sums."""

from typing import Any

import pytest
import torch
from support.engine.native_targets import USABLE
from torch.utils._python_dispatch import TorchDispatchMode

from common.engine.cpu.compile_native import BuildError
from common.engine.cpu.kernels import open_kernels
from common.engine.cpu.targets import Target
from common.engine.models import linear
from common.engine.models.linear import Linear

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(
    params=[*USABLE, "cpu", pytest.param("cuda", marks=pytest.mark.cuda)],
    ids=lambda place: place.name if isinstance(place, Target) else place,
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where linear layers multiply: on the CPU with the kernels of a target or, as on a GPU, with torch."""
    place: Target | str = request.param
    try:
        found = open_kernels(place) if isinstance(place, Target) else None
    except BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(linear, "load_kernels", lambda: found)
    return "cpu" if isinstance(place, Target) else place


def logits_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, device: str) -> torch.Tensor:
    head = Linear(weight.to(device), None if bias is None else bias.to(device))
    head.pack(in_float32=True)
    logits, out = head(x.to(device), torch.float32), torch.empty(len(x), len(weight), device=device)
    assert head(x.to(device), torch.float32, out) is out
    assert torch.equal(out, logits)
    assert logits.dtype == torch.float32
    return logits.cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_words", [48, 41])
def test_two_logits_that_would_round_to_one_number_stay_apart(dtype: torch.dtype, num_words: int, device: str) -> None:
    """The sums are 4,032.5 and 4,032.75: numbers near them are 16 apart in bfloat16, and 2 in float16."""
    weight = torch.zeros(num_words, 65, dtype=dtype)[:, :64]
    weight[7], weight[9] = 1.0, 1.0
    weight[9, 0] = 1.5
    x = torch.full((3, 64), 64.0, dtype=dtype)
    x[:, 0] = 0.5
    logits = logits_of(x, weight, None, device)
    assert logits[:, 7].tolist() == [4032.5] * 3
    assert logits[:, 9].tolist() == [4032.75] * 3
    assert logits.argmax(dim=1).tolist() == [9] * 3
    assert logits[:, 7].to(dtype).tolist() == logits[:, 9].to(dtype).tolist(), "the example shows nothing"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_words", [2000, 2001])
def test_random_logits_are_those_of_float32(dtype: torch.dtype, has_bias: bool, num_words: int, device: str) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(num_words, 600).to(dtype), torch.randn(5, 600).to(dtype)  # torch widens it in three parts
    bias = torch.randn(num_words).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    found = logits_of(x, weight, bias, device)
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-5)


class ResultDtypes(TorchDispatchMode):
    """Notes the dtypes of the tensors that torch's operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            self.found.add(result.dtype)
        return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_no_operation_of_a_device_returns_16_bits(dtype: torch.dtype, has_bias: bool) -> None:
    """On the device ``meta``, on which torch takes the operations of a GPU, without data."""
    with torch.device("meta"):
        weight, x, out = torch.empty(48, 64, dtype=dtype), torch.empty(3, 64, dtype=dtype), torch.empty(3, 48)
        head = Linear(weight, torch.empty(48, dtype=dtype) if has_bias else None)
    head.pack(in_float32=True)
    with ResultDtypes() as dtypes:
        assert head(x, torch.float32).shape == (3, 48)
        assert head(x, torch.float32, out) is out
    assert dtypes.found == {torch.float32}
