"""Drives an executor step by step without a scheduler; pages are scattered over the pool."""

from collections.abc import Sequence

from common.engine.executor import TorchExecutor
from common.sampling_params import SamplingParams, TokenLogprobs
from common.step_plan import Admit, PageDelta, Row, StepPlan

GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """Runs requests on one executor step by step.

    Attributes:
        errors: of the rows that sampled in the last step.
    """

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self.page_size = executor.pool.layout.page_size
        # Even pages come after odd ones, so that consecutive tokens are not on consecutive pages.
        pages = range(executor.num_pages)
        self.free = [*pages[::2], *pages[1::2]]
        self.steps = 0
        self.errors: list[str] = []

    def start(
        self,
        slot: int,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        shared: int = 0,
        adapter: str = "",
    ) -> "DrivenRequest":
        """Return a request; its first ``shared`` tokens are not computed, and the test sets their pages.

        Waits for the request's grammar.
        """
        if params.grammar:
            self.executor.compile_grammar(params.grammar).result()
        text = DrivenRequest(self, slot, list(prompt), params, adapter)
        text.num_computed = shared
        return text

    def step(self, *extends: tuple["DrivenRequest", int]) -> None:
        """Run one step that extends each request by a number of tokens; 0 means all known tokens."""
        admits, deltas, rows, sampling = [], [], [], []
        for text, count in extends:
            admits += text.take_admit()
            row = text.next_row(count)
            deltas += text.take_pages(row.start + row.num_tokens)
            rows.append(row)
            if row.sample:
                sampling.append(text)
        self.steps += 1
        result = self.executor.run(StepPlan(self.steps, tuple(admits), tuple(deltas), tuple(rows)))
        assert result.step == self.steps
        assert len(result.tokens) == len(sampling)
        self.errors = list(result.errors) or [""] * len(sampling)
        logprobs = result.logprobs or (None,) * len(sampling)
        for text, token, logprob in zip(sampling, result.tokens, logprobs, strict=True):
            text.output.append(token)
            text.logprobs.append(logprob)

    def finish(self, texts: Sequence["DrivenRequest"], max_new: int, chunk: int = 0) -> list[tuple[int, ...]]:
        """Run steps until every request has ``max_new`` output tokens, prompts in chunks; return the outputs."""
        while waiting := [text for text in texts if len(text.output) < max_new]:
            self.step(*((text, chunk) for text in waiting))
        return [tuple(text.output) for text in texts]


class DrivenRequest:
    """A request with its tokens, its pages and the number of computed tokens."""

    def __init__(self, driver: Driver, slot: int, prompt: list[int], params: SamplingParams, adapter: str = "") -> None:
        self.slot = slot
        self.prompt = prompt
        self.output: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.pages: list[int] = []
        self.num_computed = 0
        self._driver = driver
        self.params = params
        self.adapter = adapter
        self._is_admitted = False
        self._num_reported_pages = 0

    def take_admit(self) -> list[Admit]:
        if self._is_admitted:
            return []
        self._is_admitted = True
        history = tuple(self.prompt + self.output) if self.params.needs_history else ()
        return [Admit(self.slot, self.params, len(self.prompt), None, history, self.adapter)]

    def next_row(self, count: int) -> Row:
        known = self.prompt + self.output
        start = self.num_computed
        if self.output and start == len(known) - 1:
            self.num_computed += 1
            return Row(self.slot, start, None, True)
        end = min(len(known), start + count) if count else len(known)
        self.num_computed = end
        return Row(self.slot, start, tuple(known[start:end]), end == len(known))

    def take_pages(self, num_tokens: int) -> list[PageDelta]:
        while len(self.pages) * self._driver.page_size < num_tokens:
            self.pages.append(self._driver.free.pop())
        fresh = self.pages[self._num_reported_pages :]
        first, self._num_reported_pages = self._num_reported_pages, len(self.pages)
        return [PageDelta(self.slot, first, tuple(fresh))] if fresh else []


def check_tokens(
    executor: TorchExecutor, cases: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], max_new: int
) -> None:
    """Assert that prompts give their tokens cold, chunked beside decode rows, cached and retracted.

    Args:
        cases: prompts of different lengths, the last one longer than four pages, and their ``max_new`` tokens.
    """
    expected = [tokens for _, tokens in cases]
    cold = Driver(executor)
    whole = [cold.start(slot, prompt) for slot, (prompt, _) in enumerate(cases)]
    assert cold.finish(whole, max_new) == expected, "whole prompts in one step"

    prompt, tokens = cases[-1]
    cached = cold.start(len(cases), prompt, shared=4 * cold.page_size)
    cached.pages = whole[-1].pages[:4]
    assert cold.finish([cached], max_new, chunk=24) == [tokens], "a cached prefix, and chunks after it"

    chunked = Driver(executor)
    texts = [chunked.start(slot, prompt) for slot, (prompt, _) in enumerate(cases)]
    for num_started in range(1, len(texts)):
        active = [text for text in texts[:num_started] if len(text.output) < max_new // 2]
        chunked.step(*((text, 24) for text in active))
    chunked.finish(texts, max_new // 2, chunk=24)
    again = [chunked.start(slot, prompt) for slot, (prompt, _) in enumerate(cases)]
    for text, earlier in zip(again, texts, strict=True):
        text.output, text.pages = list(earlier.output), earlier.pages
    assert chunked.finish(again, max_new, chunk=40) == expected, "chunks beside decode rows, and a retraction"
