"""What a decode step on a GPU launches, copies and waits for in the steady state, counted on the ``meta`` device."""

from importlib.util import find_spec

import pytest
import torch

from common.sampling_params import SamplingParams
from common.step_plan import Admit, PageDelta, Row, StepPlan
from scripts.benchmarks.engines.engine import model_shape
from scripts.benchmarks.engines.launches import (
    META,
    Comparison,
    LaunchCounter,
    compare,
    counting_kernels,
    make_executor,
)

if not find_spec("triton"):
    pytest.skip("needs triton", allow_module_level=True)


def steps(num_layers: int) -> dict[tuple[int, str], Comparison]:
    found = compare([1, 3, 8], context=64, num_layers=num_layers, dtype="bfloat16")
    return {(one.batch, one.kind): one for one in found}


@pytest.fixture(scope="module")
def shallow() -> dict[tuple[int, str], Comparison]:
    return steps(1)


@pytest.fixture(scope="module")
def deep() -> dict[tuple[int, str], Comparison]:
    return steps(3)


def test_the_host_waits_for_nothing(shallow: dict[tuple[int, str], Comparison]) -> None:
    for one in shallow.values():
        assert (one.eager.num_syncs, one.with_graph.num_syncs) == (0, 0)


def test_a_step_with_a_graph_launches_as_much_for_every_depth_of_the_model(
    shallow: dict[tuple[int, str], Comparison], deep: dict[tuple[int, str], Comparison]
) -> None:
    for key, one in shallow.items():
        assert one.with_graph.launches == deep[key].with_graph.launches
        assert one.with_graph.launches["graph"] == 1
        assert one.with_graph.num_launches < one.eager.num_launches < deep[key].eager.num_launches


def test_a_step_launches_as_much_for_every_batch_and_kind_of_sampling(
    shallow: dict[tuple[int, str], Comparison],
) -> None:
    launches = {one.with_graph.num_launches for one in shallow.values()}
    assert len(launches) == 1
    assert max(launches) <= 9, "the graph, four kernels that sample, and the copies and writes around them"


def test_a_step_copies_eighty_bytes_for_each_row(shallow: dict[tuple[int, str], Comparison]) -> None:
    """Slot, position, page, place; five sampling parameters; and once more the slot, in which the token is kept."""
    for (batch, _), one in shallow.items():
        assert one.with_graph.copied_bytes == 80 * batch


def test_a_step_moves_little_more_than_weights_and_context(deep: dict[tuple[int, str], Comparison]) -> None:
    for one in deep.values():
        assert 1.0 <= one.with_graph.moved_bytes / one.least_bytes < 1.1


def test_the_host_waits_for_nothing_when_requests_begin_and_whatever_fields_they_have() -> None:
    fields = SamplingParams(
        temperature=0.8, top_k=5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5, logit_bias=((3, 1.0),),
        min_tokens=4, stop_token_ids=(2,), allowed_token_ids=(1, 2, 3), bad_words=((1,), (4, 5)), logprobs=3,
    )  # fmt: skip
    prompt = tuple(range(40))
    admits = (Admit(0, fields, 40, 7, history=prompt), Admit(1, fields, 40, None, history=prompt))
    pages = tuple(PageDelta(slot, 0, (3 * slot, 3 * slot + 1, 3 * slot + 2)) for slot in range(2))
    rows = (Row(0, 40, None, True), Row(1, 0, prompt, True, targets=prompt[1:]))
    with counting_kernels() as counter:
        executor = make_executor(model_shape(1), 2, counter, context=64, dtype="bfloat16")
        with counter:
            executor.launch(StepPlan(0, admits, pages, rows))
        counts = counter.begin()
        executor.close()
    assert counts.num_launches > 40
    assert counts.num_syncs == 0


def test_the_counter_notices_what_the_host_waits_for() -> None:
    with LaunchCounter() as counter:
        torch.tensor([1, 0]).nonzero()
        torch.tensor(3).item()
        torch.zeros(4).to(META)
        on_device = torch.zeros(4).to(META, non_blocking=True)
        on_device[2] = 1.0
        on_device[on_device.long()] = 1.0
        on_device[1:] = 1.0
    assert counter.counts.num_syncs == 5
    assert counter.counts.copied_bytes == 32
