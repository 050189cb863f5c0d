"""The cost model: how long engine steps, messages and page transfers take in virtual time."""

from dataclasses import dataclass
from typing import NamedTuple

from common.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Costs:
    """Parameters of the cost model.

    Attributes:
        step_s: fixed part of a step: launching it, and reading the weights once if ``weights_s`` is 0.
        prompt_token_s: matrix products of a prompt token.
        row_s: matrix products of a decoding request.
        context_token_s: added per token of context that a decoding request attends to.
        message_s: from sending a message until its receiver handles it.
        wire_s: latency of a transfer, beyond its transmission time.
        wire_bytes_per_s: bandwidth of a node's data connection, in each direction.
        grammar_s: from the arrival of a request with a new grammar until the grammar is compiled.
        weights_s: reading the weights once; matrix products take at least this long.
        token_s: added per token, of a prompt or sampled, beside its matrix products: all-reduce.
        prompt_pair_s: added per pair of a prompt token and a token that it attends to, itself included.
        prompt_step_s: added to a step with prompt tokens.
    """

    step_s: float = 0.005
    prompt_token_s: float = 50e-6
    row_s: float = 20e-6
    context_token_s: float = 40e-9
    message_s: float = 100e-6
    wire_s: float = 20e-6
    wire_bytes_per_s: float = 25e9
    grammar_s: float = 0.005
    weights_s: float = 0.0
    token_s: float = 0.0
    prompt_pair_s: float = 0.0
    prompt_step_s: float = 0.0

    def seconds(self, work: "StepWork") -> float:
        products = self.prompt_token_s * work.num_prompt + self.row_s * work.num_rows
        return (
            self.step_s
            + max(self.weights_s, products)
            + self.token_s * (work.num_prompt + work.num_rows)
            + self.prompt_pair_s * work.num_pairs
            + (self.prompt_step_s if work.num_prompt else 0.0)
            + self.context_token_s * work.num_context
        )


class StepWork(NamedTuple):
    """The work in a step.

    Attributes:
        num_prompt: prompt tokens.
        num_rows: decoding requests.
        num_context: tokens that decoding requests attend to, together.
        num_pairs: pairs of a prompt token and a token that it attends to.
    """

    num_prompt: int
    num_rows: int
    num_context: int
    num_pairs: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> "StepWork":
        num_prompt = num_rows = num_context = num_pairs = 0
        for _, start, tokens, _, _, _ in plan.rows:
            if tokens is None:
                num_rows += 1
                num_context += start
            else:
                length = len(tokens)
                num_prompt += length
                num_pairs += length * start + length * (length + 1) // 2
        return cls(num_prompt, num_rows, num_context, num_pairs)
