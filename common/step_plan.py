"""The one step type: what a scheduler asks of the executor, and what comes back.

A plan is integers only. It may travel to other ranks as it is. Prefill chunks, cached prefixes, resumed requests and
decode rows are all the same thing, a ``Row``: *extend slot s by these tokens, starting at position p*. A decode row is
an extend of one token, the token sampled last, which the executor still has.
"""

from dataclasses import dataclass
from typing import NamedTuple

from common.sampling_params import SamplingParams, TokenLogprobs


class Admit(NamedTuple):
    """A request takes a slot (row of the executor's request table). Sent once, before the slot's first row."""

    slot: int
    sampling: SamplingParams
    prompt_len: int  # tokens of the original prompt: output number i sits at position prompt_len + i
    last_token: int | None  # sampled elsewhere, its KV still to be computed; None while the prompt is extended
    history: tuple[int, ...] = ()  # all tokens so far, prompt and output; only if ``sampling.has_penalties``


class PageDelta(NamedTuple):
    """Pages appended to (or replaced in) a slot's page table: entries ``first .. first + len(pages)``."""

    slot: int
    first: int
    pages: tuple[int, ...]


class Row(NamedTuple):
    """Extend one slot. KV of positions ``0 .. start`` is already in its pages."""

    slot: int
    start: int
    tokens: tuple[int, ...] | None  # None: one token, the one sampled (or admitted) last for this slot
    sample: bool  # sample a token from the logits of the row's last position
    targets: tuple[int, ...] = ()  # prompt tokens to be judged: targets[i] follows tokens[first_target + i]
    first_target: int = 0

    @property
    def num_tokens(self) -> int:
        return 1 if self.tokens is None else len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine. Applied in this order: admits, page deltas, rows."""

    step: int
    admits: tuple[Admit, ...]
    pages: tuple[PageDelta, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced.

    Attributes:
        step: number of the plan that was run.
        tokens: one sampled token id for each row with ``sample``, in row order.
        logprobs: aligned with ``tokens``; None for rows that did not ask. Empty when no row asked.
        prompt_logprobs: for each row with ``targets``, in row order, one per target.
    """

    step: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
