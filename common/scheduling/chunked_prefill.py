"""Where a prompt is cut into chunks, and how chunks shrink so that every step takes about as long. Pure.

A prompt that is longer than what is left of the step is cut at a multiple of the page (and of
``--truncation-align-size``). Counting tokens alone, steps get slower as a prompt goes on, since every token attends to
all before it. With ``--enable-dynamic-chunking`` a step is filled by work instead: ``n`` tokens behind ``p`` others are

    work(p, n) = n * crossover + n * p + n * n / 2

in units of one token attending to one other, where ``crossover`` is the context at which attention costs a token as
much as everything else. A step may hold the work of one full chunk at the beginning of a prompt, ``work(0, chunk)``; so
``n = sqrt((crossover + p)^2 + 2 * work) - (crossover + p)`` tokens fit behind ``p``. Nothing is measured, so that equal
inputs give equal plans.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkAlignment:
    """Attributes:
    align_tokens: chunks end at multiples of it, and of the page.
    crossover_tokens: of the model; None counts tokens and not work.
    """

    align_tokens: int = 1
    crossover_tokens: float | None = None

    def unit(self, page_size: int) -> int:
        """Tokens at whose multiples a prompt may be cut."""
        return math.lcm(page_size, self.align_tokens)


def work(crossover: float, start: int, num_tokens: int) -> float:
    """Of computing so many tokens behind ``start`` others, in attended tokens."""
    return num_tokens * (crossover + start + num_tokens / 2)


def most_tokens(crossover: float, start: int, work_left: float) -> int:
    """How many tokens behind ``start`` others that much work is enough for."""
    linear = crossover + start
    return int(math.sqrt(linear * linear + 2 * max(work_left, 0.0)) - linear)
