"""Where a prompt is computed: on a prefill node, or on the decode node itself. Pure.

Each place has a cost: the seconds by which this prompt delays first and later tokens, its own and those of others. On a
prefill node these are the prompts before it, the prompt itself, and the transfer of its pages. On a decode node they
are the prompts before it and itself, and each of its tokens delays the next token of every output there as well.

A first token from a prefill node needs no room on a decode node: while that is full, the pages are kept on the prefill
node. A prompt that is computed on the decode node would have to wait, so a full decode node computes none.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: What a second counts by which outputs are delayed, against one of the prompt's own wait. More than 1, since further
#: requests come while the prompt is computed, and are delayed as well.
DELAY_WEIGHT = 2.0

#: One number, or one for each of several nodes.
Numbers = NDArray[Any] | float


class PrefillPlace(NamedTuple):
    """A prefill node as a place for one prompt.

    Attributes:
        wait_s: what it still takes for other prompts.
        num_to_compute: tokens of this prompt that it has not cached.
        token_s: what a prompt token takes there.
        num_to_send, send_s: tokens whose pages the decode node lacks, and what the transfer of one takes.
    """

    wait_s: float
    num_to_compute: int
    token_s: float
    num_to_send: int
    send_s: float

    @property
    def cost_s(self) -> float:
        return self.wait_s + self.num_to_compute * self.token_s + self.num_to_send * self.send_s


class DecodePlace(NamedTuple):
    """A decode node as a place for one prompt, or several of them, with an array for what differs among them.

    Attributes:
        own_s: what it takes for the prompts before this one, for a step, whose end the first chunk waits for, and for
            this prompt.
        prompt_s: what it takes for this prompt alone.
        num_outputs: outputs that it computes.
        num_coming: outputs that it will compute once prefill nodes have computed their prompts.
        coming_s: within this time, at an even pace.
    """

    own_s: Numbers
    prompt_s: Numbers
    num_outputs: Numbers
    num_coming: Numbers
    coming_s: float

    @property
    def cost_s(self) -> NDArray[np.float64]:
        return np.asarray(self.own_s + DELAY_WEIGHT * self._others_s())

    def _others_s(self) -> Numbers:
        """By how much outputs are delayed, taken together, while the prompt is computed."""
        seconds = self.prompt_s
        coming_s = seconds - self.coming_s / 2
        if self.coming_s:
            coming_s = np.where(seconds < self.coming_s, seconds * seconds / (2 * self.coming_s), coming_s)
        return self.num_outputs * seconds + self.num_coming * coming_s
