"""The executor: the request table it keeps between steps, and the rules for plans."""

from pathlib import Path

import pytest
from support.engine.engine_driver import GREEDY, Driver
from support.engine.reference_models import draw_prompts, make_model

from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.models.config import ModelConfig
from common.sampling_params import SamplingParams
from common.step_plan import Admit, PageDelta, Row, StepPlan

PAGES = PageDelta(0, 0, (3, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=3, eos_token_id=7)


@pytest.fixture
def executor(folder: Path) -> TorchExecutor:
    return load_executor(
        ModelConfig.load(str(folder)), dtype="float32", num_slots=4, num_pages=40, page_size=16, num_threads=1
    )


def plan(*rows: Row, admits: tuple[Admit, ...] = (), pages: tuple[PageDelta, ...] = ()) -> StepPlan:
    return StepPlan(1, admits, pages, rows)


def admitted(executor: TorchExecutor) -> TorchExecutor:
    executor.run(plan(admits=(Admit(0, GREEDY, 20, None),), pages=(PAGES,)))
    return executor


def test_a_plan_without_rows_only_fills_the_table(executor: TorchExecutor) -> None:
    result = executor.run(plan(admits=(Admit(0, GREEDY, 20, None),), pages=(PAGES,)))
    assert (result.step, result.tokens, result.logprobs) == (1, (), ())
    executor.close()


def test_only_rows_that_sample_give_tokens_in_row_order(executor: TorchExecutor) -> None:
    """Two of three rows sample, and each samples the same token as alone."""
    prompts = [tuple(range(1, 12)), tuple(range(30, 70)), tuple(range(99, 90, -1))]
    admits = tuple(Admit(slot, GREEDY, len(prompt), None) for slot, prompt in enumerate(prompts))
    pages = (PageDelta(0, 0, (5,)), PageDelta(1, 0, (9, 2, 7)), PageDelta(2, 0, (0,)))
    rows = [Row(slot, 0, prompt, slot != 1) for slot, prompt in enumerate(prompts)]
    together = executor.run(plan(*rows, admits=admits, pages=pages)).tokens
    alone = [executor.run(plan(row, admits=(admits[row.slot],), pages=(pages[row.slot],))).tokens for row in rows]
    assert together == (alone[0][0], alone[2][0])
    assert alone[1] == ()
    executor.close()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (plan(Row(1, 0, (1,), True)), "slot 1, which is free"),
        (plan(Row(0, 0, (1,) * 33, True)), "no page for its last token"),
        (plan(Row(0, 32, None, True)), "no page for its last token"),
        (plan(Row(0, 0, (1,), True), Row(0, 1, (1,), True)), "two rows"),
        (plan(Row(0, 0, (211,), True)), "outside the vocabulary"),
        (plan(Row(0, 0, (-1,), True)), "outside the vocabulary"),
        (plan(pages=(PageDelta(0, 2, (40,)),)), "outside the pool"),
        (plan(pages=(PageDelta(0, 3, (4,)),)), "a gap in the page table"),
        (plan(pages=(PageDelta(0, 2, tuple(range(40)) * 2),)), "beyond the context"),
        (plan(pages=(PageDelta(2, 0, (4,)),)), "slot 2, which is free"),
        (plan(admits=(Admit(4, GREEDY, 1, None),)), "slot 4 of 4"),
    ],
)
def test_an_invalid_plan_fails_an_assertion(executor: TorchExecutor, bad: StepPlan, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        admitted(executor).run(bad)
    executor.close()


def test_a_new_admission_clears_its_slot(executor: TorchExecutor) -> None:
    admitted(executor)
    executor.run(plan(admits=(Admit(0, GREEDY, 5, None),)))
    with pytest.raises(AssertionError, match="no page"):
        executor.run(plan(Row(0, 0, (1,), True)))
    executor.close()


def test_a_replaced_page_table_entry_is_the_one_read(executor: TorchExecutor) -> None:
    """Page 1 of the table moves to a copy of its page; the next token stays the same."""
    first = admitted(executor).run(plan(Row(0, 0, tuple(range(20)), True))).tokens
    executor.pool.pages[30] = executor.pool.pages[1]
    executor.pool.pages[1] = 0
    moved = executor.run(plan(Row(0, 19, (19,), True), pages=(PageDelta(0, 1, (30,)),))).tokens
    assert moved == first
    executor.close()


def test_min_tokens_alone_suppresses_end_tokens(folder: Path) -> None:
    """The third token of the reference is declared an end token."""
    ((prompt, expected),) = draw_prompts(folder, [30], 4, seed=1)
    third = expected[2]
    assert third not in expected[:2]
    outputs = {}
    for min_tokens in (0, 2, 3):
        executor = load_executor(ModelConfig.load(str(folder)), dtype="float32", num_slots=1, num_pages=9, page_size=16)
        driver = Driver(executor)
        params = SamplingParams(temperature=0.0, stop_token_ids=(third,), min_tokens=min_tokens)
        text = driver.start(0, prompt, params)
        driver.finish([text], 4)
        outputs[min_tokens] = tuple(text.output)
        executor.close()
    assert outputs[0] == outputs[2] == expected
    assert outputs[3][:2] == expected[:2]
    assert outputs[3][2] != third


def test_seeded_tokens_do_not_depend_on_the_rest_of_the_batch(folder: Path) -> None:
    executor = load_executor(ModelConfig.load(str(folder)), dtype="float32", num_slots=4, num_pages=40, page_size=16)
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=1234, logprobs=2)
    alone = Driver(executor).start(0, range(40), params)
    alone._driver.finish([alone], 12)
    driver = Driver(executor)
    others = [driver.start(slot, range(slot * 7, 90), SamplingParams(seed=slot)) for slot in (1, 2)]
    again = driver.start(3, range(40), params)
    driver.finish([others[0], again, others[1]], 12, chunk=16)
    assert again.output == alone.output
    assert all(found is not None and len(found.top) == 2 for found in again.logprobs)
    assert others[0].logprobs == [None] * 12
    executor.close()


def test_warm_up_leaves_the_request_table_empty(executor: TorchExecutor) -> None:
    executor.warm_up()
    with pytest.raises(AssertionError, match="slot 0, which is free"):
        executor.run(plan(Row(0, 0, (1,), True)))
    executor.close()


def test_a_pool_of_one_page_of_one_token_still_warms_up(folder: Path) -> None:
    executor = load_executor(ModelConfig.load(str(folder)), dtype="float32", num_slots=1, num_pages=1, page_size=1)
    executor.warm_up()
    executor.close()
