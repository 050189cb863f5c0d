"""The reasoning of one output: where it begins and ends, and when its budget forces its end. Pure.

The state is a function of the output tokens so far, so a node that takes an output over rebuilds it from them.
"""

from enum import Enum, auto

from common.sampling_params import Thinking


class Phase(Enum):
    START = auto()  # the first output token that is not blank decides whether there is reasoning
    REASONING = auto()
    ANSWER = auto()


class ReasoningState:
    """Follows one output through its reasoning into its answer."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._num_tokens = 0  # of reasoning, without the token that begins it
        self.phase = Phase.REASONING if thinking.start_id is None else Phase.START

    def append(self, token: int) -> bool:
        """Count one more output token; return whether it belongs to the reasoning, its start and its end included."""
        if self.phase is Phase.START:
            if token not in self._thinking.blank_ids:
                self.phase = Phase.REASONING if token == self._thinking.start_id else Phase.ANSWER
            return self.phase is Phase.REASONING
        if self.phase is Phase.ANSWER:
            return False
        self._num_tokens += 1
        if token == self._thinking.end_id:
            self.phase = Phase.ANSWER
        return True

    @property
    def start_id(self) -> int | None:
        """The token that may begin the reasoning now; None if it cannot begin any more."""
        return self._thinking.start_id if self.phase is Phase.START else None

    @property
    def forced(self) -> int | None:
        """The only token that may follow, because the budget is used up; None if it is not."""
        budget = self._thinking.budget
        is_used_up = budget is not None and self._num_tokens >= budget
        return self._thinking.end_id if self.phase is Phase.REASONING and is_used_up else None
