"""Launching a step makes the host wait for nothing: neither for the device, nor for a copy to it.

The model is on torch's ``meta`` device, which has shapes and no data: every read of a value by the host fails there.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.devices import DEVICES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.cache.page_layout import PageLayout
from common.config.shared import SMALL_MODEL
from common.engine.attention.protocol import AttentionBackend, AttentionParams
from common.engine.attention.torch_sdpa import TorchAttention
from common.engine.batch import RowArrays, StepBatch, make_batch
from common.engine.device_copies import HostCopies
from common.engine.executor import TorchExecutor
from common.engine.factory import load_executor
from common.engine.models.config import ModelConfig
from common.engine.models.decoder import Decoder, allocate_weights
from common.engine.pending_step import PendingStep
from common.sampling_params import SamplingParams, Thinking
from common.step_plan import Admit, PageDelta, Row, StepPlan

META = torch.device("meta")
PLAIN = (AttentionParams(),)
#: Parameters under which no token depends on what the host knows of earlier ones.
INDEPENDENT = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.3, seed=5),
    "truncated": SamplingParams(top_k=20, top_p=0.9, min_p=0.01, seed=6),
    "logprobs": SamplingParams(logprobs=3),
    "allowed": SamplingParams(allowed_token_ids=(1, 2, 3)),
    "ends": SamplingParams(min_tokens=9, stop_token_ids=(3, 4), logit_bias=((5, 1.0),)),
}
DEPENDENT = {
    "penalties": SamplingParams(presence_penalty=0.5, repetition_penalty=1.2),
    "bad words": SamplingParams(bad_words=((1, 2),), allowed_token_ids=(1, 2, 3)),
    "budget": SamplingParams(thinking=Thinking(None, 4, budget=1)),
}
PROMPT = tuple(range(10, 20))


class NoData:
    """A KV pool on the ``meta`` device, and the attention over it, which returns the queries."""

    device = META
    groups = None
    num_pages = num_full_pages = 8

    def __init__(self, layout: PageLayout) -> None:
        self.layout = layout
        self.pages = torch.empty(self.num_pages, layout.page_bytes, device=META)

    def prepare(self, batch: StepBatch) -> "NoData":
        return self

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.empty_like(q)


class NoWaiting(TorchDispatchMode):
    """Fails at a copy to the device for which the host waits."""

    num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        if "non_blocking" in names and args[0].device.type == "cpu" and found.device == META:
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            assert given.get("non_blocking"), "the host waits for this copy"
            self.num_copies += 1
        return found


@pytest.fixture(scope="module")
def executor() -> TorchExecutor:
    config = ModelConfig.load(SMALL_MODEL)
    weights, _ = allocate_weights(config, torch.float32, META)
    data: Any = NoData(config.layout(16, "float32"))
    attention: AttentionBackend = data
    return TorchExecutor(Decoder(config, weights), data, attention, num_slots=8)


def begin(params: SamplingParams) -> StepPlan:
    row = Row(0, 0, PROMPT, True, targets=PROMPT[1:], first_target=0)
    history = PROMPT if params.needs_history else ()
    return StepPlan(1, (Admit(0, params, len(PROMPT), None, history),), (PageDelta(0, 0, (5, 6)),), (row,))


def go_on(step: int) -> StepPlan:
    return StepPlan(step, (), (), (Row(0, len(PROMPT) + step - 2, None, True),))


def cannot_read(step: Callable[[], object]) -> bool:
    try:
        step()
    except (RuntimeError, NotImplementedError):
        return True
    return False


@pytest.mark.parametrize("params", INDEPENDENT.values(), ids=INDEPENDENT)
def test_steps_are_launched_one_behind_the_other(executor: TorchExecutor, params: SamplingParams) -> None:
    with NoWaiting() as watch:
        steps = [executor.launch(begin(params)), *(executor.launch(go_on(step)) for step in range(2, 5))]
    assert watch.num_copies > 0, "nothing was watched"
    assert all(isinstance(step, PendingStep) and cannot_read(step.result) for step in steps)


def test_rows_of_all_kinds_are_launched_together(executor: TorchExecutor) -> None:
    admits = tuple(Admit(slot, params, 10, 3) for slot, params in enumerate(INDEPENDENT.values()))
    pages = tuple(PageDelta(slot, 0, (slot,)) for slot in range(len(admits)))
    rows = tuple(Row(slot, 10, None, True) for slot in range(len(admits)))
    with NoWaiting():
        executor.launch(StepPlan(1, admits, pages, rows))
        executor.launch(StepPlan(2, (), (), tuple(row._replace(start=11) for row in rows)))


@pytest.mark.parametrize("params", DEPENDENT.values(), ids=DEPENDENT)
def test_a_row_that_depends_on_its_tokens_waits_for_them_alone(executor: TorchExecutor, params: SamplingParams) -> None:
    """Its first step is launched without waiting; the second one reads the token of the first."""
    with NoWaiting():
        executor.launch(begin(params))
        assert cannot_read(lambda: executor.launch(go_on(2)))
    executor._unread.clear()


BACKENDS: dict[str, Callable[[Any], AttentionBackend]] = {
    "torch": lambda pool: TorchAttention(pool, PLAIN),
}
if find_spec("triton"):
    from common.engine.attention.flash_attn_backend import FlashAttention
    from common.engine.attention.triton_backend import TritonAttention

    BACKENDS["triton"] = lambda pool: TritonAttention(pool, 4, PLAIN)
    BACKENDS["flash-attn"] = lambda pool: FlashAttention(pool, 16, PLAIN, torch.empty, min_scores=0)


@pytest.mark.parametrize("build", BACKENDS.values(), ids=BACKENDS)
def test_attention_is_prepared_without_waiting(build: Callable[[Any], AttentionBackend]) -> None:
    pool = NoData(PageLayout(1, 2, 16, 16, "float32"))
    table = np.arange(8, dtype=np.int32).reshape(2, 4)
    with NoWaiting() as watch:
        batch = make_batch(RowArrays(np.array([20, 3]), np.array([1, 40]), table, 16), META)
        num_copies = watch.num_copies
        build(pool).prepare(batch)
    assert watch.num_copies > num_copies, "nothing was watched"


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "device"), [*product([*INDEPENDENT, *DEPENDENT], ["cuda"]), ("random", "cuda:1")])
def test_steps_launched_together_give_a_gpu_the_same_results(name: str, device: str) -> None:
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    params = {**INDEPENDENT, **DEPENDENT}[name]
    config = ModelConfig.load(SMALL_MODEL)
    executor = load_executor(config, device=device, dtype="float32", num_slots=1, num_pages=8, page_size=16)
    plans = [begin(params), *map(go_on, range(2, 8))]
    expected = [executor.run(plan) for plan in plans]
    launched = [executor.launch(plan) for plan in plans]
    assert [step.result().tokens for step in launched] == [result.tokens for result in expected]
    executor.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_forces_tokens_in_its_own_row_alone(device: str) -> None:
    """The steps are launched without waiting; a forced row waits for its own token before it is sampled again."""
    config = ModelConfig.load(SMALL_MODEL)
    executor = load_executor(config, device=device, dtype="float32", num_slots=2, num_pages=8, page_size=16)
    greedy = SamplingParams(temperature=0.0)

    def tokens(*params: SamplingParams) -> list[tuple[int, ...]]:
        slots = range(len(params))
        admits = tuple(Admit(slot, params[slot], len(PROMPT), None, PROMPT) for slot in slots)
        pages = tuple(PageDelta(slot, 0, (slot,)) for slot in slots)
        rows = [tuple(Row(slot, 0, PROMPT, True) for slot in slots)]
        rows += [tuple(Row(slot, len(PROMPT) + step, None, True) for slot in slots) for step in range(4)]
        launched = [executor.launch(StepPlan(1, admits, pages, rows[0]))]
        launched += [executor.launch(StepPlan(2 + step, (), (), each)) for step, each in enumerate(rows[1:])]
        return list(zip(*(step.result().tokens for step in launched), strict=True))

    forced = greedy._replace(thinking=Thinking(None, 3, budget=1))
    [alone] = tokens(greedy)
    first, second = tokens(greedy, forced)
    assert first == alone
    assert second[:2] == (alone[0], 3)
    executor.close()


#: Prints whether the first GPU is in use after steps, a mask and copies of pages on the second one.
ON_THE_SECOND_GPU = """if True:
    import threading
    import torch
    from common.config.shared import SMALL_MODEL
    from common.engine.factory import load_executor
    from common.engine.models.config import ModelConfig
    from common.sampling_params import SamplingParams, Thinking
    from common.step_plan import Admit, PageDelta, Row, StepPlan

    config = ModelConfig.load(SMALL_MODEL)
    executor = load_executor(config, device="cuda:1", dtype="float32", num_slots=1, num_pages=8, page_size=16)
    params = SamplingParams(thinking=Thinking(None, 3, budget=0))  # forces a token, by a mask
    admit = Admit(0, params, 2, None, (1, 2))
    step = executor.launch(StepPlan(1, (admit,), (PageDelta(0, 0, (5,)),), (Row(0, 0, (1, 2), True),)))
    results = []
    waiter = threading.Thread(target=lambda: results.append(step.result()))
    waiter.start()
    waiter.join()
    assert results[0].tokens == (3,)
    executor.pool.export_page(5, memoryview(bytearray(executor.pool.layout.page_bytes)))
    executor.pool.landed([6])
    print(torch._C._cuda_hasPrimaryContext(0), torch._C._cuda_hasPrimaryContext(1))
"""


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_executor_on_the_second_gpu_takes_no_memory_of_the_first() -> None:
    """In a process of its own, since other tests use the first GPU."""
    ended = subprocess.run(
        [sys.executable, "-c", ON_THE_SECOND_GPU], capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stdout.split() == ["False", "True"]


def test_a_thread_waits_for_a_step_with_the_gpu_of_the_step_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = [torch.device("cuda", 0)]

    @contextmanager
    def exchange(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            self.waited_on: list[torch.device] = []

        def synchronize(self) -> None:
            self.waited_on.append(current[-1])

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", exchange)
    copies: Any = HostCopies(torch.device("cuda", 1))
    copies.wait()
    assert copies._event.waited_on == [torch.device("cuda", 1)]
