"""Chunk sizes: where a prompt may be cut, and how many of its tokens fit into a step. Pure.

A prompt that is longer than what is left of a step is cut at a multiple of the page size and of
``--truncation-align-size``. If only tokens are counted, steps get slower as a prompt goes on, because each token
attends to all tokens before it. ``--enable-dynamic-chunking`` counts work instead: ``n`` tokens behind ``p`` others
cost

    work(p, n) = n * crossover + n * p + n * n / 2

in units of one token attending to another, where ``crossover`` is the context length at which attention costs as much
as the rest of the model. A step holds the work of one full chunk at the start of a prompt, ``work(0, chunk)``, so
``n = sqrt((crossover + p)^2 + 2 * work) - (crossover + p)`` tokens fit behind ``p``. Nothing is measured, so equal
inputs give equal plans.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkAlignment:
    """Where prompts may be cut.

    Attributes:
        align_tokens: chunks end at multiples of this and of the page size.
        crossover_tokens: of the model; None counts tokens instead of work.
    """

    align_tokens: int = 1
    crossover_tokens: float | None = None

    def unit(self, page_size: int) -> int:
        """A prompt may be cut at multiples of this many tokens."""
        return math.lcm(page_size, self.align_tokens)

    def most_at_once(self, chunk_tokens: int | None, page_size: int) -> int | None:
        """The most tokens of one prompt in a step, which may exceed a chunk by less than a unit; None: any number."""
        unit = self.unit(page_size)
        return None if chunk_tokens is None else max(chunk_tokens, unit) + unit - 1


def prefill_work(crossover: float, start: int, num_tokens: int) -> float:
    """The work of computing ``num_tokens`` tokens behind ``start`` others, in attended tokens."""
    return num_tokens * (crossover + start + num_tokens / 2)


def tokens_within(crossover: float, start: int, work_left: float) -> int:
    """The largest number of tokens behind ``start`` others whose work is at most ``work_left``."""
    linear = crossover + start
    return int(math.sqrt(linear * linear + 2 * max(work_left, 0.0)) - linear)
