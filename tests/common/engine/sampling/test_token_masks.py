"""Allowed tokens, bad words and masked ends: cases by hand, a slow definition, and the executor after retraction."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.devices import DEVICES
from support.engine.engine_driver import Driver
from support.engine.reference_models import draw_prompts, make_model

from common.engine.factory import load_executor
from common.engine.models.config import ModelConfig
from common.engine.sampling.sampler import SamplingRow, sample
from common.engine.sampling.token_masks import TokenMask, apply_token_masks
from common.sampling_params import SamplingParams
from common.step_plan import Admit, PageDelta, Row, StepPlan

VOCAB = 8


def mask_of(params: SamplingParams, output: tuple[int, ...] = (), prompt: tuple[int, ...] = ()) -> TokenMask:
    return TokenMask(params, prompt + output, prompt_len=len(prompt), vocab_size=VOCAB)


def remaining(mask: TokenMask | None, end_ids: tuple[int, ...] = ()) -> set[int]:
    """Tokens of a row that keep their logits."""
    logits = torch.arange(VOCAB, dtype=torch.float32)[None].clone()
    apply_token_masks(logits, [(mask, end_ids)])
    kept = {token for token in range(VOCAB) if logits[0, token] != -math.inf}
    assert all(logits[0, token] == token for token in kept)
    return kept


def test_only_allowed_tokens_remain_and_an_end_token_must_be_among_them() -> None:
    assert remaining(mask_of(SamplingParams(allowed_token_ids=(5, 2, 5)))) == {2, 5}


def test_ids_beyond_the_vocabulary_are_ignored() -> None:
    assert remaining(mask_of(SamplingParams(allowed_token_ids=(2, VOCAB), bad_words=((VOCAB,), (1, VOCAB))))) == {2}


def test_the_last_token_of_a_bad_word_is_masked_while_the_output_ends_with_the_others() -> None:
    params = SamplingParams(bad_words=((1, 2, 3), (2, 4), (6,)))
    everything = set(range(VOCAB))
    assert remaining(mask_of(params)) == everything - {6}
    assert remaining(mask_of(params, (1, 2))) == everything - {3, 4, 6}
    assert remaining(mask_of(params, (2,))) == everything - {4, 6}
    assert remaining(mask_of(params, (1, 2, 5))) == everything - {6}


def test_the_prompt_does_not_begin_a_bad_word() -> None:
    params = SamplingParams(bad_words=((1, 2),))
    assert remaining(mask_of(params, prompt=(7, 1))) == set(range(VOCAB))
    assert remaining(mask_of(params, (1,), prompt=(7,))) == set(range(VOCAB)) - {2}


def test_bad_words_hold_among_allowed_tokens() -> None:
    assert remaining(mask_of(SamplingParams(allowed_token_ids=(1, 2), bad_words=((2,),)))) == {1}


def test_bad_words_and_then_min_tokens_give_way_where_no_token_would_remain() -> None:
    params = SamplingParams(allowed_token_ids=(1, 2), bad_words=((1,),))
    assert remaining(mask_of(params), end_ids=(2,)) == {1}
    assert remaining(mask_of(SamplingParams(allowed_token_ids=(2,))), end_ids=(2,)) == {2}
    all_bad = SamplingParams(bad_words=tuple((token,) for token in range(VOCAB)))
    assert remaining(mask_of(all_bad)) == set(range(VOCAB))
    assert remaining(None, end_ids=tuple(range(VOCAB))) == set(range(VOCAB))


def test_a_bias_does_not_bring_back_a_masked_token() -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=(4,), logit_bias=((3, 100.0),), repetition_penalty=0.5)
    row = SamplingRow(SamplingParams(temperature=0.0, logit_bias=((3, 100.0),)), 5, 5, mask=mask_of(params))
    assert sample(torch.zeros(1, VOCAB), [row])[0].tolist() == [4]


def test_reported_log_probabilities_are_those_before_the_masks() -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=(2,), logprobs=1)
    (token,), logprobs = sample(
        torch.tensor([[0.1, 0.6, 0.3]]).log(), [SamplingRow(params, 1, 1, mask=mask_of(params))]
    )
    assert token == 2
    assert logprobs is not None
    [found] = logprobs.read()
    assert math.isclose(found.token, math.log(0.3), rel_tol=1e-5)
    assert found.top[0][0] == 1


tokens = st.integers(0, VOCAB - 1)
params_strategy = st.builds(
    lambda **fields: SamplingParams(**fields),  # named alone, it would get random values for all other fields
    allowed_token_ids=st.lists(tokens, max_size=4).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple),
)
rows_strategy = st.lists(
    st.tuples(
        st.none() | params_strategy,
        st.lists(tokens, max_size=3).map(tuple),
        st.lists(tokens, max_size=8).map(tuple),
        st.lists(tokens, max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=5,
)


def defined(params: SamplingParams, output: tuple[int, ...], end_ids: tuple[int, ...]) -> set[int]:
    """The tokens that remain, by looking at the whole output once for each token of the vocabulary."""
    allowed = {token for token in range(VOCAB) if not params.allowed_token_ids or token in params.allowed_token_ids}
    not_ended = allowed - set(end_ids)
    good = {
        token
        for token in not_ended
        if not any((*output, token)[-len(word) :] == word for word in params.bad_words if len(word) <= len(output) + 1)
    }
    return good or not_ended or allowed


@pytest.mark.parametrize("device", DEVICES)
def test_any_batch_is_masked_as_the_definition_says_row_by_row(device: str) -> None:
    @given(rows=rows_strategy)
    def check(rows: list[tuple[SamplingParams | None, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]) -> None:
        before = torch.arange(len(rows) * VOCAB, dtype=torch.float32).view(len(rows), VOCAB)
        masks = []
        for params, prompt, output, end_ids in rows:
            mask = None if params is None else mask_of(params, (), prompt)
            for token in output:
                if mask is not None:
                    mask.append(token)
            masks.append((mask, end_ids))
        after = before.clone().to(device)
        apply_token_masks(after, masks)
        for index, (params, prompt, output, end_ids) in enumerate(rows):
            kept = defined(params or SamplingParams(), output, end_ids)
            expected = [before[index, token].item() if token in kept else -math.inf for token in range(VOCAB)]
            assert after[index].tolist() == expected
            if params is not None:  # as after a retraction, or on another node
                assert remaining(mask_of(params, output, prompt), end_ids) == kept

    check()


@given(params=params_strategy, seed=st.integers(0, 2**32))
def test_an_output_never_contains_a_bad_word_that_could_be_avoided(params: SamplingParams, seed: int) -> None:
    sampling = SamplingParams(seed=seed, allowed_token_ids=params.allowed_token_ids, bad_words=params.bad_words)
    mask = mask_of(sampling)
    output: tuple[int, ...] = ()
    for position in range(12):
        (token,) = sample(torch.zeros(1, VOCAB), [SamplingRow(sampling, position, 0, mask=mask)])[0].tolist()
        assert token in defined(sampling, output, ())
        mask.append(token)
        output += (token,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=4)


@pytest.mark.parametrize("device", DEVICES)
def test_masked_tokens_are_the_same_alone_in_a_batch_after_a_retraction_and_on_a_decode_node(
    folder: Path, device: str
) -> None:
    """Words of the unconstrained output are banned, so that the masks change what is sampled."""
    ((prompt, plain),) = draw_prompts(folder, [17], 12, seed=2)
    params = SamplingParams(temperature=0.0, bad_words=(plain[1:3], plain[4:5], plain[6:9]))
    config = ModelConfig.load(str(folder))
    executor = load_executor(config, device=device, dtype="float32", num_slots=4, num_pages=40, page_size=16)
    driver = Driver(executor)
    whole = driver.start(0, prompt, params)
    driver.finish([whole], 12)
    output = tuple(whole.output)
    assert output != plain
    for word in params.bad_words:
        assert not any(output[start : start + len(word)] == word for start in range(12))

    other = driver.start(1, prompt)
    again = driver.start(2, prompt, params)
    again.output = list(output[:5])
    driver.step((again, 0))
    driver.finish([other, again], 12)
    assert (tuple(again.output), tuple(other.output)) == (output, plain)

    first = driver.start(3, prompt, params)
    driver.finish([first], 1)
    admit = Admit(3, params, len(prompt), output[0], (*prompt, output[0]))
    continued = list(first.output)
    for step in range(11):
        admits, pages = ((admit,), (PageDelta(3, 0, (*first.pages, driver.free.pop())),)) if step == 0 else ((), ())
        continued += executor.run(StepPlan(step, admits, pages, (Row(3, len(prompt) + step, None, True),))).tokens
    assert tuple(continued) == output
    executor.close()


def test_a_request_with_bad_words_must_be_admitted_with_its_tokens(folder: Path) -> None:
    executor = load_executor(ModelConfig.load(str(folder)), dtype="float32", num_slots=2, num_pages=9, page_size=16)
    with pytest.raises(AssertionError, match="bad words came without its tokens"):
        executor.run(StepPlan(1, (Admit(0, SamplingParams(bad_words=((1,),)), 5, None),), (), ()))
    executor.close()
