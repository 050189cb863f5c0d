"""Prediction of output lengths from outputs that have ended. Pure.

Outputs of one application resemble each other, and its prompts begin alike. Mean lengths are kept by tenant and prompt
prefix, by tenant, and over all requests; the narrowest group with enough outputs decides. A mean counts the last few
dozen outputs. An output that was cut at its limit would have been longer, so it counts as the mean if that is more.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

#: Tokens at the beginning of a prompt that identify an application.
PREFIX_TOKENS = 32
#: Outputs that a group needs before its mean is used.
MIN_OUTPUTS = 4
#: Outputs that count in a mean.
WINDOW = 64
#: Groups that are remembered.
MAX_GROUPS = 10_000

#: A tenant and the hash of a prompt prefix, or ANY_PREFIX.
Group = tuple[str, int]
ANY_PREFIX = -1
ALL_REQUESTS: Group = ("\0", ANY_PREFIX)  # "\0" is no tenant's name


@dataclass(slots=True, eq=False)
class _Mean:
    """The mean length of the last ``count`` outputs of a group."""

    count: int = 0
    length: float = 0.0


class OutputLengthPredictor:
    """Predicts output lengths for one model. Beyond ``MAX_GROUPS``, the least recently used groups are forgotten."""

    def __init__(self) -> None:
        self._means: OrderedDict[Group, _Mean] = OrderedDict()

    def expected(self, tenant: str, prompt: Sequence[int]) -> int:
        """The predicted number of output tokens; 0 without data."""
        for group in _groups(tenant, prompt):
            mean = self._means.get(group)
            if mean is not None and mean.count >= MIN_OUTPUTS:
                return max(1, math.ceil(mean.length))
        return 0

    def learn(self, tenant: str, prompt: Sequence[int], num_output: int, *, is_cut: bool) -> None:
        """Record an output that has ended, by itself or (``is_cut``) at its limit."""
        for group in _groups(tenant, prompt):
            mean = self._means.get(group)
            if mean is None:
                mean = self._means[group] = _Mean()
            else:
                self._means.move_to_end(group)
            if mean.count < WINDOW:
                mean.count += 1
            if not is_cut or num_output > mean.length:
                mean.length += (num_output - mean.length) / mean.count
        while len(self._means) > MAX_GROUPS:
            self._means.popitem(last=False)

    def __len__(self) -> int:
        return len(self._means)


def _groups(tenant: str, prompt: Sequence[int]) -> tuple[Group, Group, Group]:
    """The groups of a request, the narrowest first."""
    prefix = hash(tuple(prompt[:PREFIX_TOKENS]))  # of integers alone; never ANY_PREFIX, since no hash is -1
    return (tenant, prefix), (tenant, ANY_PREFIX), ALL_REQUESTS
