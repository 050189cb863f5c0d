"""Log-probabilities of sampled tokens and of prompt tokens, against values computed by hand and a reference."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine.devices import DEVICES
from support.engine.reference_models import load_reference, make_model
from support.engine.reference_models import prompt_logprobs as reference_logprobs

from common.engine.factory import load_executor
from common.engine.models.config import ModelConfig
from common.engine.sampling.logprobs import ROWS_AT_ONCE, prompt_logprobs, token_logprobs
from common.sampling_params import SamplingParams
from common.step_plan import Admit, PageDelta, Row, StepPlan

GREEDY = SamplingParams(temperature=0.0)
TOP_2 = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs_from=1)


def test_each_row_gets_its_token_and_the_requested_number_of_alternatives() -> None:
    """The probabilities are 1/8, 2/8 and 5/8; adding a constant to a row's logits changes nothing."""
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log().expand(3, -1) + torch.tensor([[0.0], [3.0], [-50.0]])
    found = token_logprobs(logits, torch.tensor([0, 2, 1]), [2, 0, 9]).read()
    assert np.allclose([row.token for row in found], np.log([1 / 8, 5 / 8, 2 / 8]), atol=1e-5)
    assert [[token for token, _ in row.top] for row in found] == [[2, 1], [], [2, 1, 0]]
    assert np.allclose([value for _, value in found[0].top], np.log([5 / 8, 2 / 8]))


def test_logits_of_a_long_prompt_are_computed_in_pieces() -> None:
    """Row i of 150 has a logit of i at token 1, and 0 at token 0."""
    sizes = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return torch.cat([torch.zeros_like(hidden), hidden], dim=1)

    parts = prompt_logprobs(torch.arange(150.0)[:, None], logits, [0, 1] * 75, [1] * 150)
    found = [row for part in parts for row in part.read()]
    assert sizes == [ROWS_AT_ONCE, ROWS_AT_ONCE, 22]
    for row, logprobs in enumerate(found):
        assert math.isclose(logprobs.token, (row if row % 2 else 0) - math.log(1 + math.exp(row)), abs_tol=1e-4)
        assert logprobs.top[0][0] == (1 if row else 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=8)


@pytest.mark.parametrize("device", DEVICES)
def test_prompt_logprobs_are_returned_by_row_beside_other_rows(folder: Path, device: str) -> None:
    """The first and last of four rows have targets; the second and last sample."""
    config = ModelConfig.load(str(folder))
    executor = load_executor(config, device=device, dtype="float32", num_slots=4, num_pages=40, page_size=16)
    random = np.random.default_rng(0)
    first, other, last = (tuple(random.integers(0, 211, length).tolist()) for length in (90, 20, 30))
    admits = [
        Admit(slot, params, len(prompt), None)
        for slot, prompt, params in ((0, first, TOP_2), (1, other, GREEDY), (2, other, GREEDY), (3, last, TOP_2))
    ]
    pages = [PageDelta(slot, 0, tuple(range(slot * 8, slot * 8 + 7))) for slot in range(4)]
    executor.run(StepPlan(1, tuple(admits), tuple(pages), (Row(0, 0, first[:10], False),)))
    rows = (
        Row(0, 10, first[10:89], False, targets=first[15:90], first_target=4),
        Row(1, 0, other, True),
        Row(2, 0, other[:5], False),
        Row(3, 0, last, True, targets=last[1:]),
    )
    result = executor.run(StepPlan(2, (), (), rows))
    reference = load_reference(folder)
    assert len(result.tokens) == 2
    assert [len(found) for found in result.prompt_logprobs] == [75, 29]
    for found, prompt, start in zip(result.prompt_logprobs, (first, last), (15, 1), strict=True):
        expected = reference_logprobs(reference, prompt)
        for position, logprobs in enumerate(found, start):
            assert abs(logprobs.token - expected[position - 1, prompt[position]].item()) < 1e-4
            assert [token for token, _ in logprobs.top] == expected[position - 1].topk(2).indices.tolist()
    assert result.logprobs[0] is None
    assert result.logprobs[1] is not None
    executor.close()


@pytest.mark.parametrize("row", [Row(0, 0, (1, 2), True, (3, 4, 5)), Row(0, 0, (1, 2), True, (3,), 2)])
def test_a_target_past_the_rows_last_token_fails_an_assertion(folder: Path, row: Row) -> None:
    config = ModelConfig.load(str(folder))
    executor = load_executor(config, dtype="float32", num_slots=1, num_pages=4, page_size=16)
    with pytest.raises(AssertionError, match="a target that follows no token"):
        executor.run(StepPlan(1, (Admit(0, TOP_2, 2, None),), (PageDelta(0, 0, (1,)),), (row,)))
    executor.close()
