"""Biases and penalties: formulas worked out by hand, random texts and batches, and comparison with transformers."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.devices import DEVICES
from support.engine.engine_driver import Driver
from support.engine.reference_models import draw_prompts, make_model
from support.examples import examples

from common.engine.factory import load_executor
from common.engine.models.config import ModelConfig
from common.engine.sampling.penalties import TokenHistory, apply_penalties
from common.engine.sampling.sampler import SamplingRow, sample
from common.engine.sampling.token_masks import TokenMask
from common.sampling_params import SamplingParams
from common.step_plan import Admit, PageDelta, Row, StepPlan

ALL = SamplingParams(
    temperature=0.0,
    repetition_penalty=1.4,
    presence_penalty=0.7,
    frequency_penalty=0.5,
    logit_bias=((3, 2.0), (17, -100.0)),
)
REPETITION = SamplingParams(temperature=0.0, repetition_penalty=1.3)


def adjusted(
    logits: list[float], params: SamplingParams, tokens: tuple[int, ...] = (), prompt_len: int = 0
) -> list[float]:
    row = torch.tensor([logits])
    apply_penalties(row, [(params, TokenHistory(tokens, prompt_len))])
    found: list[float] = row[0].tolist()
    return found


def test_repetition_divides_positive_logits_and_multiplies_others_once_per_token() -> None:
    """Token 0 is in the prompt, 1 in prompt and output, 2 twice in the output, 3 in neither."""
    params = SamplingParams(repetition_penalty=2.0)
    assert adjusted([4.0, -1.0, 3.0, 5.0], params, (0, 1, 1, 2, 2), prompt_len=2) == [2.0, -2.0, 1.5, 5.0]


def test_the_smallest_repetition_penalty_leaves_numbers_and_every_mask_holds() -> None:
    params = SamplingParams(repetition_penalty=1e-300, allowed_token_ids=(1, 3))
    assert all(map(math.isfinite, adjusted([4.0, -1.0, 3.0, 5.0], params, (0, 1, 2, 3))))
    mask = TokenMask(params, (), prompt_len=0, vocab_size=4)
    row = SamplingRow(params, 4, 4, (), TokenHistory((0, 1, 2, 3), 4), mask)
    assert sample(torch.tensor([[4.0, -1.0, 3.0, 5.0]]), [row])[0].tolist() == [3]


def test_presence_and_frequency_count_only_the_output() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted([1.0, 1.0, 1.0, 1.0], params, (0, 1, 1, 2, 2), prompt_len=2) == [1.0, 0.25, 0.0, 1.0]


def test_a_bias_comes_before_the_penalties() -> None:
    """Token 0: (1 + 3) / 2 - 0.5 = 1.5. Any other order gives another value."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, logit_bias=((0, 3.0), (2, -1.0)))
    assert adjusted([1.0, 1.0, 1.0], params, (0,)) == [1.5, 1.0, 0.0]


def test_negative_penalties_encourage() -> None:
    assert adjusted([1.0, 1.0], SamplingParams(presence_penalty=-1.0, frequency_penalty=-0.5), (1, 1)) == [1.0, 3.0]


def test_a_bias_does_not_lift_min_tokens() -> None:
    draw = SamplingRow(SamplingParams(temperature=0.0, min_tokens=1, logit_bias=((1, 100.0),)), 5, 5, end_ids=(1,))
    assert sample(torch.zeros(1, 3), [draw])[0].item() != 1


def test_reported_log_probabilities_exclude_penalties() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=5.0, logit_bias=((0, 100.0),), logprobs=1)
    logits = torch.tensor([[0.1, 0.6, 0.3]]).log()
    tokens, logprobs = sample(logits, [SamplingRow(params, 3, 2, history=TokenHistory((1, 1, 1), 2))])
    assert tokens.tolist() == [0]
    assert logprobs is not None
    [found] = logprobs.read()
    assert np.isclose(found.token, np.log(0.1))
    assert found.top[0][0] == 1


tokens_strategy = st.lists(st.integers(0, 40), max_size=80).map(tuple)
params_strategy = st.builds(
    lambda **fields: SamplingParams(**fields),  # named alone, it would get random values for all other fields
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 9),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.3, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.2, -0.4]),
    logit_bias=st.sampled_from([(), ((0, 9.0),), ((5, -3.0), (40, 1.0))]),
)


def naive(logits: list[float], params: SamplingParams, tokens: tuple[int, ...], prompt_len: int) -> list[float]:
    """The definition, applied to each token of the vocabulary in turn."""
    found = []
    for token, logit in enumerate(logits):
        logit += dict(params.logit_bias).get(token, 0.0)
        if token in tokens:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        count = tokens[prompt_len:].count(token)
        found.append(logit - params.frequency_penalty * count - (params.presence_penalty if count else 0.0))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_any_batch_is_adjusted_as_the_definition_says_row_by_row(device: str) -> None:
    @settings(max_examples=examples(60), deadline=None)
    @given(rows=st.lists(st.tuples(params_strategy, tokens_strategy, tokens_strategy), min_size=1, max_size=5))
    def check(rows: list[tuple[SamplingParams, tuple[int, ...], tuple[int, ...]]]) -> None:
        logits = torch.from_numpy(np.random.default_rng(len(rows)).normal(0, 3, (len(rows), 41)).astype(np.float32))
        draws = []
        for params, prompt, output in rows:
            history = TokenHistory(prompt, len(prompt))
            for token in output:
                history.append(token)
            draws.append(SamplingRow(params, len(prompt + output), len(prompt), history=history))
        together = logits.clone().to(device)
        apply_penalties(together, [(draw.params, draw.history) for draw in draws])
        for row, (_, (params, prompt, output)) in enumerate(zip(draws, rows, strict=True)):
            alone = logits[row : row + 1].clone().to(device)
            rebuilt = TokenHistory(prompt + output, len(prompt))  # as after a retraction, or on another node
            apply_penalties(alone, [(params, rebuilt)])
            assert torch.equal(alone[0], together[row])
            expected = naive(logits[row].tolist(), params, prompt + output, len(prompt))
            assert np.allclose(alone[0].tolist(), expected, atol=1e-5)

    check()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", [REPETITION, ALL])
def test_penalised_tokens_equal_transformers_alone_in_a_batch_and_after_a_retraction(
    folder: Path, params: SamplingParams, device: str
) -> None:
    cases = draw_prompts(folder, [1, 17, 60], 20, seed=2, params=params)
    plain = draw_prompts(folder, [40], 20, seed=3)[0]
    config = ModelConfig.load(str(folder))
    executor = load_executor(config, device=device, dtype="float32", num_slots=9, num_pages=90, page_size=16)
    driver = Driver(executor)
    texts = [driver.start(slot, prompt, params) for slot, (prompt, _) in enumerate(cases)]
    other = driver.start(5, plain[0])
    driver.finish([texts[0]], 20)
    driver.finish([texts[1]], 7)
    again = driver.start(6, cases[1][0], params)  # retracted after seven tokens
    again.output = list(texts[1].output)
    driver.step((again, 0))
    driver.finish([other, again, texts[2]], 20, chunk=16)
    assert [tuple(text.output) for text in (texts[0], again, texts[2])] == [expected for _, expected in cases]
    assert tuple(other.output) == plain[1]
    executor.close()


def test_a_decode_node_counts_the_first_token_that_was_sampled_elsewhere(folder: Path) -> None:
    """The history of the admission holds ``last_token``, so that it is counted once."""
    ((prompt, expected),) = draw_prompts(folder, [30], 12, seed=6, params=ALL)
    config = ModelConfig.load(str(folder))
    executor = load_executor(config, dtype="float32", num_slots=2, num_pages=9, page_size=16)
    text = Driver(executor).start(0, prompt, ALL)
    text._driver.finish([text], 1)
    admit = Admit(1, ALL, len(prompt), expected[0], (*prompt, expected[0]))
    output = [text.output[0]]
    for step in range(11):
        admits, pages = (
            ((admit,), (PageDelta(1, 0, (*text.pages, text._driver.free.pop())),)) if step == 0 else ((), ())
        )
        output += executor.run(StepPlan(step, admits, pages, (Row(1, len(prompt) + step, None, True),))).tokens
    assert tuple(output) == expected
    executor.close()


def test_a_request_with_penalties_must_be_admitted_with_its_tokens(folder: Path) -> None:
    config = ModelConfig.load(str(folder))
    executor = load_executor(config, dtype="float32", num_slots=2, num_pages=9, page_size=16)
    with pytest.raises(AssertionError, match="without its tokens"):
        executor.run(StepPlan(1, (Admit(0, ALL, 5, None),), (), ()))
    executor.close()
