"""What things cost in virtual time: steps of the engine, messages, bytes on the wire."""

from dataclasses import dataclass
from typing import NamedTuple

from common.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds.

    Attributes:
        step_s: of any step, whatever is in it: launching it, and reading the weights once.
        prompt_token_s: on top, of each prompt token computed.
        row_s: on top, of each request that gets a token.
        context_token_s: on top, of each token of context that a decoding row looks back at.
        message_s: from the moment a message is sent until its receiver turns to it.
        wire_s: from the end of a page's last byte at the writer until the writer knows that it is in place.
        wire_bytes_per_s: what a node's data connection carries, each way.
    """

    step_s: float = 0.005
    prompt_token_s: float = 50e-6
    row_s: float = 20e-6
    context_token_s: float = 40e-9
    message_s: float = 100e-6
    wire_s: float = 20e-6
    wire_bytes_per_s: float = 25e9

    def seconds(self, work: "Work") -> float:
        """How long the engine takes over a step."""
        return (
            self.step_s
            + self.prompt_token_s * work.num_prompt
            + self.row_s * work.num_rows
            + self.context_token_s * work.num_context
        )


class Work(NamedTuple):
    """What a step consists of: prompt tokens, requests that decode a token, and the context that these look back at."""

    num_prompt: int
    num_rows: int
    num_context: int

    @classmethod
    def of(cls, plan: StepPlan) -> "Work":
        num_prompt = num_rows = num_context = 0
        for _, start, tokens, _, _, _ in plan.rows:
            if tokens is None:
                num_rows += 1
                num_context += start
            else:
                num_prompt += len(tokens)
        return cls(num_prompt, num_rows, num_context)
