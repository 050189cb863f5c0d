"""The cost model: how long engine steps, messages and page transfers take in virtual time."""

from dataclasses import dataclass
from typing import NamedTuple

from common.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Costs:
    """Parameters of the cost model.

    Attributes:
        step_s: fixed part of a step: launching it and reading the weights once.
        prompt_token_s: added per prompt token computed.
        row_s: added per decoding request.
        context_token_s: added per token of context that a decoding request attends to.
        message_s: from sending a message until its receiver handles it.
        wire_s: latency of a transfer, beyond its transmission time.
        wire_bytes_per_s: bandwidth of a node's data connection, in each direction.
        grammar_s: from the arrival of a request with a new grammar until the grammar is compiled.
    """

    step_s: float = 0.005
    prompt_token_s: float = 50e-6
    row_s: float = 20e-6
    context_token_s: float = 40e-9
    message_s: float = 100e-6
    wire_s: float = 20e-6
    wire_bytes_per_s: float = 25e9
    grammar_s: float = 0.005

    def seconds(self, work: "StepWork") -> float:
        return (
            self.step_s
            + self.prompt_token_s * work.num_prompt
            + self.row_s * work.num_rows
            + self.context_token_s * work.num_context
        )


class StepWork(NamedTuple):
    """The work in a step: prompt tokens, decoding requests, and the total context that these attend to."""

    num_prompt: int
    num_rows: int
    num_context: int

    @classmethod
    def of(cls, plan: StepPlan) -> "StepWork":
        num_prompt = num_rows = num_context = 0
        for _, start, tokens, _, _, _ in plan.rows:
            if tokens is None:
                num_rows += 1
                num_context += start
            else:
                num_prompt += len(tokens)
        return cls(num_prompt, num_rows, num_context)
