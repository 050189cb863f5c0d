"""The Triton kernels draw exactly the tokens that the CPU draws, in as many launches for any number of rows."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.devices import DEVICES
from support.engine.recorded_launches import record_launches

from common.engine.sampling import sampler
from common.engine.sampling.constraints import StepMasks
from common.engine.sampling.penalties import TokenHistory
from common.engine.sampling.sampler import SamplingRow, sample, uniforms
from common.engine.sampling.token_masks import TokenMask
from common.sampling_params import SamplingParams

if not find_spec("triton"):
    pytest.skip("needs triton", allow_module_level=True)

import support.engine.triton_interpreter  # noqa: F401  (makes the interpreter faster)

from common.engine.triton_kernels import has_interpreter
from common.engine.triton_kernels import sampling as kernels
from common.engine.triton_kernels.tiles import SamplingTile

GREEDY = SamplingParams(temperature=0.0)
TOP_P = SamplingParams(top_p=0.9, seed=2)
BOTH = SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=3)


def draw(logits: torch.Tensor, rows: list[SamplingRow], device: str, tile: SamplingTile | None = None) -> list[int]:
    seeds = np.array([row.params.seed for row in rows], np.uint64)
    random = uniforms(seeds, np.array([row.position for row in rows], np.uint64))
    inputs = torch.from_numpy(kernels.row_inputs([row.params for row in rows], random, logits.shape[1]))
    return kernels.draw_tokens(logits.to(device), inputs.to(device), tile).tolist()


def assert_same_draws(
    logits: torch.Tensor, rows: list[SamplingRow], device: str, tile: SamplingTile | None = None
) -> None:
    expected, _ = sample(logits.clone(), rows)
    assert draw(logits, rows, device, tile) == expected.tolist()


params_strategy = st.builds(
    lambda **fields: SamplingParams(**fields),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 60, 10_000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**64 - 1),
)


@pytest.mark.slow(sample=0.34)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 7, 701])
def test_every_row_gets_the_token_that_the_cpu_draws(vocab: int, device: str) -> None:
    """Blocks and gathered tokens are few, so that rows have several blocks and often more tokens than there is room."""

    @settings(max_examples=200 if device == "cuda" else 6, deadline=None)
    @given(
        params=st.lists(params_strategy, min_size=1, max_size=4),
        seed=st.integers(0, 1000),
        spread=st.sampled_from([0.0, 1e-4, 0.5, 2.0, 8.0]),
        is_on_grid=st.booleans(),
    )
    def check(params: list[SamplingParams], seed: int, spread: float, is_on_grid: bool) -> None:
        random = np.random.default_rng(seed)
        logits = random.normal(0, spread, (len(params), vocab))
        logits = np.round(logits * 32) / 32 if is_on_grid else logits  # a grid gives many exact ties
        logits[:, 1::7] = -np.inf  # as after a mask
        rows = [SamplingRow(one, int(random.integers(0, 50)), 0) for one in params]
        tensor = torch.from_numpy(logits.astype(np.float32))
        assert_same_draws(tensor, rows, device, SamplingTile(256, 256))

    check()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_vocabulary_of_real_size_gives_the_same_draws(device: str) -> None:
    """A peaked row whose best tokens tie, one whose kept tokens are too many to be gathered, and one that keeps all."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (3, 151_936)).astype(np.float32))
    logits[0] = logits[0].round()
    logits[1] *= 1e-3
    rows = [SamplingRow(params, 7, 0) for params in (BOTH, TOP_P, SamplingParams(seed=4))]
    assert_same_draws(logits, rows, device)


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", [1, 64, 256])
def test_full_batches_give_the_same_draws(num_rows: int) -> None:
    random = np.random.default_rng(num_rows)
    kinds = (GREEDY, SamplingParams(), TOP_P, BOTH, SamplingParams(min_p=0.05), SamplingParams(top_k=500))
    for scale in (0.01, 1.0, 5.0):
        logits = torch.from_numpy(random.normal(0, scale, (num_rows, 151_936)).astype(np.float32))
        rows = [SamplingRow(kinds[row % len(kinds)]._replace(seed=row), row, 0) for row in range(num_rows)]
        assert_same_draws(logits, rows, "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_rows_in_which_every_token_is_blocked_end_with_any_token(device: str) -> None:
    rows = [SamplingRow(params, 0, 0) for params in (GREEDY, SamplingParams(), BOTH)]
    assert all(0 <= token < 300 for token in draw(torch.full((3, 300), -torch.inf), rows, device))


@pytest.mark.parametrize("device", DEVICES)
def test_the_logits_stay_as_they_are(device: str) -> None:
    logits = torch.arange(300.0).repeat(2, 1).to(device)
    before = logits.clone()
    assert draw(logits, [SamplingRow(GREEDY, 0, 0), SamplingRow(GREEDY, 1, 0)], device) == [299, 299]
    assert torch.equal(logits, before)


@pytest.mark.skipif(not has_interpreter(), reason="needs Triton's interpreter")
def test_penalties_masks_and_log_probabilities_work_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, the sampler changes the logits and the kernels draw from them."""
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 2, (4, 300)).astype(np.float32))
    best = int(logits[0].argmax())
    penalties = GREEDY._replace(repetition_penalty=50.0, presence_penalty=9.0, logprobs=2)
    allowed = BOTH._replace(allowed_token_ids=(7, 8, 9))
    rows = [
        SamplingRow(penalties, 3, 1, history=TokenHistory([1, best, best], 1)),
        SamplingRow(allowed, 3, 1, mask=TokenMask(allowed, (), prompt_len=1, vocab_size=300)),
        SamplingRow(TOP_P._replace(min_tokens=9, logit_bias=((5, 30.0),)), 3, 1, end_ids=(5,)),
        SamplingRow(BOTH, 3, 1),
    ]
    masks = StepMasks((3,), torch.full((1, 300), -torch.inf).index_fill_(1, torch.tensor([40, 41]), 0.0), {})
    expected, expected_logprobs = sample(logits.clone(), rows, masks)
    monkeypatch.setattr(sampler, "_has_kernels", lambda _: True)
    monkeypatch.setattr(sampler, "_draw", None)
    tokens, logprobs = sample(logits.clone(), rows, masks)
    assert tokens.tolist() == expected.tolist()
    assert tokens[0] != best and tokens[1] in (7, 8, 9) and tokens[2] != 5 and tokens[3] in (40, 41)
    assert logprobs is not None and expected_logprobs is not None
    assert logprobs.read() == expected_logprobs.read()


def test_a_step_has_four_launches_and_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's ``meta`` device, which has no data, every read of a value fails."""
    launches = record_launches(monkeypatch, kernels, ("find_maxima", "weigh_blocks", "gather_likely", "draw"))
    for num_rows in (1, 256):
        launches.clear()
        meta = torch.device("meta")
        inputs = torch.empty(5, num_rows, dtype=torch.float64, device=meta)
        tokens = kernels.draw_tokens(torch.empty(num_rows, 151_936, device=meta), inputs)
        assert tokens.shape == (num_rows,)
        grids = {"find_maxima": 2, "weigh_blocks": 2, "gather_likely": 2, "draw": 1}
        assert launches == [(name, (num_rows, 75)[:dims]) for name, dims in grids.items()]
