"""An engine without a model: it knows every answer by heart and says the next token of it.

Which answer, the request's seed says; which token, the position. So tokens are a pure function of seed and position,
as those of a real engine are one of logits, parameters, seed and position: retraction and migration change nothing.
Page contents are not kept, for speed; ``tests/support/fake_engine.py`` has an engine whose tokens betray wrong pages.
"""

from collections.abc import Callable, Sequence

from common.cache.page_layout import PageLayout
from common.step_plan import StepPlan, StepResult

#: What the engine says where an answer is over.
END_TOKEN = 0


class BlankStore:
    """A ``PageStore`` without contents: pages are numbers."""

    fd = -1
    is_mapped = is_in_place = True
    device_pages = None

    def __init__(self, geometry: PageLayout, num_pages: int) -> None:
        self.geometry = geometry
        self.num_pages = num_pages
        self.memory = bytearray(0)

    def export_page(self, page: int, into: memoryview) -> None:
        pass

    def landed(self, pages: Sequence[int]) -> None:
        pass


def blank_geometry(kv_bytes_per_token: int, page_size: int) -> PageLayout:
    """Of pages with so many bytes for each token, a multiple of 256."""
    return PageLayout(
        num_layers=1, num_kv_heads=kv_bytes_per_token // 256, head_dim=64, page_size=page_size, dtype="bfloat16"
    )


class RecitingEngine:
    """An executor over a ``BlankStore``.

    Args:
        answers: the answer to a request's seed; of two calls with one seed, both give the same.
        num_slots: rows of the request table.
    """

    def __init__(self, pool: BlankStore, answers: Callable[[int], Sequence[int]], num_slots: int) -> None:
        self.pool = pool
        self._answers = answers
        self._said: list[tuple[int, Sequence[int]]] = [(0, ())] * num_slots  # by slot: prompt tokens, answer

    def run(self, plan: StepPlan) -> StepResult:
        said = self._said
        for admit in plan.admits:
            said[admit.slot] = (admit.prompt_len, self._answers(admit.sampling.seed))
        tokens = []
        for slot, start, extend, is_sampled, _, _ in plan.rows:
            if is_sampled:
                num_prompt, answer = said[slot]
                index = start + (1 if extend is None else len(extend)) - num_prompt
                tokens.append(answer[index] if index < len(answer) else END_TOKEN)
        return StepResult(plan.step, tuple(tokens))

    def close(self) -> None:
        pass
