"""An engine without a model, which returns the next token of a known answer.

The request's seed selects the answer and the position selects the token. So, as in the real engine, tokens do not
depend on retractions or moves. Pages have no contents, for speed; the engine in
``tests/support/cluster/fake_engine.py`` does check contents.
"""

from collections.abc import Callable, Sequence

from common.cache.page_layout import PageLayout
from common.step_plan import StepPlan, StepResult

#: Token after the last token of an answer.
END_TOKEN = 0


class EmptyPageStore:
    """A ``PageStore`` whose pages have no contents."""

    fd = -1
    is_mapped = is_in_place = True
    device_pages = None

    def __init__(self, layout: PageLayout, num_pages: int) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.memory = bytearray(0)

    def export_page(self, page: int, into: memoryview) -> None:
        pass

    def landed(self, pages: Sequence[int]) -> None:
        pass


def simulated_layout(kv_bytes_per_token: int, page_size: int) -> PageLayout:
    """A page layout with this many bytes per token, a multiple of 256."""
    return PageLayout(
        num_layers=1, num_kv_heads=kv_bytes_per_token // 256, head_dim=64, page_size=page_size, dtype="bfloat16"
    )


class ScriptedEngine:
    """An executor over an ``EmptyPageStore``.

    Args:
        answers: returns the answer for a request's seed, always the same for one seed.
    """

    def __init__(self, pool: EmptyPageStore, answers: Callable[[int], Sequence[int]], num_slots: int) -> None:
        self.pool = pool
        self._answers = answers
        self._answer_of_slot: list[tuple[int, Sequence[int]]] = [(0, ())] * num_slots  # prompt length, answer

    def run(self, plan: StepPlan) -> StepResult:
        answers = self._answer_of_slot
        for admit in plan.admits:
            answers[admit.slot] = (admit.prompt_len, self._answers(admit.sampling.seed))
        tokens = []
        for slot, start, extend, is_sampled, _, _ in plan.rows:
            if is_sampled:
                num_prompt, answer = answers[slot]
                index = start + (1 if extend is None else len(extend)) - num_prompt
                tokens.append(answer[index] if index < len(answer) else END_TOKEN)
        return StepResult(plan.step, tuple(tokens))

    def upcoming(self, slot: int, start: int, most: int) -> list[int]:
        """The next tokens that decode rows of an admitted slot sample from position ``start`` on, at most to the end
        token."""
        num_prompt, answer = self._answer_of_slot[slot]
        first = start + 1 - num_prompt
        found = list(answer[first : first + most])
        return found if len(found) == most else [*found, END_TOKEN]

    def close(self) -> None:
        pass
