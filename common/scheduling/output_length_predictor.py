"""How long an output will probably be, learned from those that have ended. Pure.

Outputs of one application resemble each other, and so do their prompts' beginnings: lengths are remembered by tenant
and prompt prefix, by tenant, and over all, and the narrowest of these that has seen enough answers. Each is a mean in
which the last few dozen outputs count. An output that was cut at its limit says only that it would have been longer:
it counts as the mean, if that is more. Without history there is no answer, and nodes use their ratio
(``common/scheduling/new_token_ratio.py``).
"""

import math
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

#: Tokens at the beginning of a prompt that tell one application from another.
PREFIX_TOKENS = 32
#: Outputs that must have been seen before their mean is believed, and over how many it is taken.
ENOUGH, WINDOW = 4, 64

Group = tuple[str, int]  # a tenant, and the hash of a prefix; -1 for any
ANY_PREFIX = -1
OVER_ALL: Group = ("\0", ANY_PREFIX)  # no tenant's name


class Predictor:
    """Of one model.

    Args:
        max_groups: how many tenants and prefixes are remembered; those not met for longest are forgotten first.
    """

    def __init__(self, max_groups: int = 10_000) -> None:
        self._max_groups = max_groups
        self._means: OrderedDict[Group, tuple[int, float]] = OrderedDict()  # outputs seen, and their mean length

    def expected(self, tenant: str, prompt: Sequence[int]) -> int:
        """Output tokens that there will probably be; 0 if nothing is known."""
        for group in _groups(tenant, prompt):
            count, mean = self._means.get(group, (0, 0.0))
            if count >= ENOUGH:
                return max(1, math.ceil(mean))
        return 0

    def learn(self, tenant: str, prompt: Sequence[int], num_output: int, *, is_cut: bool) -> None:
        """An output has ended.

        Args:
            num_output: its tokens.
            is_cut: at its limit, not by itself.
        """
        for group in _groups(tenant, prompt):
            count, mean = self._means.get(group, (0, 0.0))
            length = max(num_output, mean) if is_cut else num_output
            count = min(count + 1, WINDOW)
            self._means[group] = (count, mean + (length - mean) / count)
            self._means.move_to_end(group)
        while len(self._means) > self._max_groups:
            self._means.popitem(last=False)

    def __len__(self) -> int:
        return len(self._means)


def _groups(tenant: str, prompt: Sequence[int]) -> tuple[Group, Group, Group]:
    """From the narrowest on."""
    prefix = zlib.crc32(array("q", prompt[:PREFIX_TOKENS]).tobytes())
    return (tenant, prefix), (tenant, ANY_PREFIX), OVER_ALL
