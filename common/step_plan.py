"""The plan of a step, which a scheduler gives to the executor, and its result.

A plan holds plain values and no tensors, so that it can be recorded. Prefill chunks, requests with cached prefixes,
resumed requests and decode rows are all a ``Row``, which extends a slot by tokens from a position on. A decode row
extends by one token, the token sampled last, which the executor has kept.
"""

from dataclasses import dataclass
from typing import NamedTuple

from common.sampling_params import SamplingParams, TokenLogprobs


class Admit(NamedTuple):
    """Assigns a slot of the executor's request table to a request. Sent before its first row in that slot."""

    slot: int
    sampling: SamplingParams
    prompt_len: int  # tokens of the original prompt: output token i has position prompt_len + i
    last_token: int | None  # sampled on another node, its KV not computed yet; None: the prompt is not computed yet
    history: tuple[int, ...] = ()  # all tokens so far, prompt and output; only if ``sampling.needs_history``
    adapter: str = ""  # id of the LoRA adapter; empty: the model itself


class PageDelta(NamedTuple):
    """Sets entries ``first .. first + len(pages) - 1`` of a slot's page table."""

    slot: int
    first: int
    pages: tuple[int, ...]


class Row(NamedTuple):
    """Extends one slot. The KV of positions ``0 .. start - 1`` is already in its pages."""

    slot: int
    start: int
    tokens: tuple[int, ...] | None  # None: one token, the one sampled (or admitted) last for this slot
    sample: bool  # sample a token from the logits of the row's last position
    targets: tuple[int, ...] = ()  # targets[i], a prompt token, follows tokens[first_target + i]
    first_target: int = 0

    @property
    def num_tokens(self) -> int:
        return 1 if self.tokens is None else len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    admits: tuple[Admit, ...]
    pages: tuple[PageDelta, ...]
    rows: tuple[Row, ...]
    windows: tuple[PageDelta, ...] = ()  # of the page tables of window layers, where these have pages of their own

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the step computes."""
        return len(self.rows) + sum([len(row.tokens) - 1 for row in self.rows if row.tokens is not None])

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prefill chunks, whose ids are in the plan; decode rows do not count."""
        return sum([len(row.tokens) for row in self.rows if row.tokens is not None])


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step.

    Attributes:
        tokens: one sampled token id for each row with ``sample``, in row order.
        logprobs: aligned with ``tokens``; None for rows that did not ask. Empty if no row asked.
        prompt_logprobs: one tuple for each row with ``targets``, in row order, with one entry per target.
        errors: aligned with ``tokens``: why a row has no valid token, which ends its request; empty for rows that have
            one. Empty if every row has one.
    """

    step: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    errors: tuple[str, ...] = ()
