"""KV pages in FP8 and int8: the formats by hand, and tokens that depend on no chunk, batch, transfer or retraction."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.engine_driver import Driver
from support.service.client import prompt_of
from support.service.service import SMALL_MODEL

from common.cache.page_layout import PageLayout, layout_conflict
from common.engine.attention.scaled_formats import dequantize, quantize
from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.kv_pool import KVPool
from common.engine.models.config import ModelConfig

MAX_NEW = 12


# ---- the format ------------------------------------------------------------------------------------------------------


def test_the_scale_is_the_least_power_of_two_with_which_a_row_fits() -> None:
    """Bytes of scales are exponents biased by 127; bytes of numbers are sign, 4 bits of exponent, 3 of mantissa."""
    rows = torch.tensor([[448.0, -1.0], [448.01, 2.0], [0.0, 0.0], [0.875, -0.0625], [3.5, 3.3]])
    numbers, scales = quantize(rows, torch.float8_e4m3fn)
    assert scales.tolist() == [127, 128, 1, 118, 120]
    assert numbers.view(torch.uint8).tolist() == [[0x7E, 0xB8], [0x76, 0x38], [0, 0], [0x7E, 0xE0], [0x7E, 0x7D]]
    expected = [[448.0, -1.0], [448.0, 2.0], [0.0, 0.0], [0.875, -0.0625], [3.5, 3.25]]
    assert dequantize(numbers, scales).tolist() == expected


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=40),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_number_changes_by_more_than_a_sixteenth_or_by_a_step_of_the_smallest(
    row: list[float], dtype: torch.dtype
) -> None:
    x = torch.tensor(row).to(dtype).float()
    found = dequantize(*quantize(x, torch.float8_e4m3fn)).double()
    # Below 2**-6 times the scale numbers are multiples of 2**-9 times the scale; the scale is at most max / 224.
    step = x.abs().max().double() / 224 * 2**-9
    assert ((found - x.double()).abs() <= torch.maximum(x.abs().double() / 16, step / 2 + 2**-130)).all()
    assert torch.equal(found.float(), dequantize(*quantize(found.float(), torch.float8_e4m3fn))), (
        "what was read is written as it was"
    )
    assert torch.equal(found.float().bfloat16().float(), found.float()), "bfloat16 holds every number exactly"


def test_the_scale_of_int8_is_the_least_power_of_two_with_which_no_number_is_rounded_beyond_127() -> None:
    rows = torch.tensor([[127.4, -1.5], [127.5, 2.0], [0.0, 0.0], [0.5, -0.01], [-64.0, 0.75]])
    numbers, scales = quantize(rows, torch.int8)
    assert scales.tolist() == [127, 128, 1, 120, 127]
    assert numbers.tolist() == [[127, -2], [64, 1], [0, 0], [64, -1], [-64, 1]]
    assert dequantize(numbers, scales).tolist() == [[127, -2], [128, 2], [0, 0], [0.5, -0.0078125], [-64, 1]]


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=40),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_number_of_int8_changes_by_more_than_half_a_step_of_its_row(row: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(row).to(dtype).float()
    found = dequantize(*quantize(x, torch.int8))
    step = max(x.abs().max().double().item() / 63.75, 2.0**-126)
    assert ((found.double() - x.double()).abs() <= step / 2).all()
    assert torch.equal(found, dequantize(*quantize(found, torch.int8))), "what was read is written as it was"
    assert torch.equal(found.bfloat16().float(), found), "bfloat16 holds every number exactly"


def test_scales_lie_behind_the_numbers_of_their_head() -> None:
    """A page of one layer, 2 heads, 4 tokens and 8 numbers: 32 bytes of numbers and 4 of scales for each head."""
    layout = PageLayout(1, 2, 8, 4, "fp8_e4m3")
    assert (layout.page_bytes, layout.bytes_per_token) == (2 * 2 * (32 + 4), 2 * 2 * 9)
    pool = KVPool(layout, 2)
    kv = pool.layer(0)
    assert kv.key_scales is not None and kv.value_scales is not None
    kv.keys.view(torch.uint8)[1, 1, 2, 3] = 7
    kv.key_scales[1, 1, 2] = 8
    kv.values.view(torch.uint8)[1, 0, 3, 7] = 9
    kv.value_scales[1, 0, 3] = 10
    places = {36 + 2 * 8 + 3: 7, 36 + 32 + 2: 8, 72 + 3 * 8 + 7: 9, 72 + 32 + 3: 10}
    page = pool.memory[layout.page_bytes :]
    assert {at: number for at, number in enumerate(page) if number} == places
    pool.close()


def test_pages_in_fp8_go_to_no_node_with_other_pages() -> None:
    ours = PageLayout(2, 2, 16, 16, "fp8_e4m3")
    theirs = PageLayout(2, 2, 16, 16, "bfloat16")
    assert layout_conflict(ours, theirs) == (
        "KV dtype fp8_e4m3 and bfloat16 must be equal: give both nodes the same --dtype and --kv-cache-dtype"
    )
    assert layout_conflict(ours, ours) == ""


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Steps of this size gain nothing from several threads, which wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["fp8_e4m3", "int8"])
def page_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(page_size: int, kv_cache_dtype: str, attention: str = "auto") -> TorchExecutor:
    return load_executor(
        ModelConfig.load(str(SMALL_MODEL)),
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        num_slots=8,
        num_pages=1_500 // page_size,
        page_size=page_size,
        attention=attention,
    )


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    return [tuple(prompt_of(num_tokens, seed=3)) for num_tokens in (5, 64, 203)]


def outputs(executor: TorchExecutor, prompts: Sequence[Sequence[int]], chunk: int = 0) -> list[list[int]]:
    """Greedy tokens of prompts that are computed in one batch."""
    driver = Driver(executor)
    texts = [driver.start(slot, prompt) for slot, prompt in enumerate(prompts)]
    driver.finish(texts, MAX_NEW, chunk)
    return [text.output for text in texts]


@pytest.fixture(scope="module")
def expected(prompts: list[tuple[int, ...]], page_dtype: str) -> list[list[int]]:
    """The greedy tokens of each prompt, computed alone and whole."""
    executor = load(16, page_dtype)
    found = [outputs(executor, [prompt])[0] for prompt in prompts]
    executor.close()
    return found


@pytest.mark.parametrize(("page_size", "chunk"), [(16, 0), (16, 7), (1, 48), (64, 100)])
def test_tokens_depend_on_no_chunk_batch_or_page_size(
    prompts: list[tuple[int, ...]], page_dtype: str, expected: list[list[int]], page_size: int, chunk: int
) -> None:
    executor = load(page_size, page_dtype)
    assert executor.pool.layout.dtype == page_dtype
    assert outputs(executor, prompts, chunk) == expected
    executor.close()


def test_a_retracted_request_continues_with_the_same_tokens(
    prompts: list[tuple[int, ...]], page_dtype: str, expected: list[list[int]]
) -> None:
    """Prompt and output are computed again in one extend, in other pages."""
    driver = Driver(load(16, page_dtype))
    text = driver.start(0, prompts[1])
    driver.finish([text], 5)
    again = driver.start(3, prompts[1])
    again.output = list(text.output)
    driver.step((again, 0))
    driver.finish([again], MAX_NEW)
    assert again.output == expected[1]
    driver.executor.close()


def test_the_same_tokens_in_other_chunks_make_the_same_bytes(prompts: list[tuple[int, ...]], page_dtype: str) -> None:
    """In the first layer, whose keys and values no attention precedes."""
    found = []
    for chunk in (0, 5):
        driver = Driver(load(64, page_dtype))
        driver.finish([text := driver.start(0, prompts[1])], 1, chunk)
        layout = driver.executor.pool.layout
        found.append(driver.executor.pool.pages[text.pages[0], : layout.layer_bytes].clone())
        driver.executor.close()
    differing = (found[0] != found[1]).sum().item()
    assert differing <= 2, f"{differing} bytes differ; a rare number may be rounded the other way"


def test_logits_stay_near_those_of_float32_pages(prompts: list[tuple[int, ...]], page_dtype: str) -> None:
    """Every token has the log-probability that float32 pages give it, but for a bounded error."""
    from common.sampling_params import SamplingParams

    forced = prompts[2][:120]
    chosen = []
    for kv_cache_dtype in ("auto", page_dtype):
        executor = load(16, kv_cache_dtype)
        driver = Driver(executor)
        text = driver.start(0, forced, SamplingParams(temperature=0.0, logprobs=5))
        driver.finish([text], 1)
        assert text.logprobs[0] is not None
        chosen.append(dict(text.logprobs[0].top))
        executor.close()
    exact, rounded = chosen
    common = exact.keys() & rounded.keys()
    assert len(common) >= 3
    assert max(abs(exact[token] - rounded[token]) for token in common) < 0.3
