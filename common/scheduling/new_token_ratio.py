"""The share of its allowed output that a running request is expected to produce, if nothing else is known. Pure.

Requests rarely use all of ``max_new_tokens``. Reserving all of it leaves memory idle; reserving too little causes
retractions. The ratio starts high, falls with each step without a retraction, and rises after a retraction to what the
remaining batch has needed so far. The rule and the constants are those of SGLang's scheduler.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.cache.kv_window import KVWindow
from common.errors import ConfigError
from common.request import Request

#: The most output tokens that one request is expected to produce (SGLang's ``CLIP_MAX_NEW_TOKENS``).
CLIP_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class RatioConstants:
    """Constants of the rule.

    Attributes:
        initial: the ratio at the start.
        lowest_factor: the lowest ratio as a share of the first.
        decay_steps: decode steps in which the ratio falls from the first to the lowest.
        retract_steps: tokens of each request for which a retraction makes room.
        clip: the most output tokens that one request is expected to produce.
    """

    initial: float = 0.7
    lowest_factor: float = 0.14
    decay_steps: int = 600
    retract_steps: int = 20
    clip: int = CLIP_TOKENS


def ratio_constants_from_environ(environ: Mapping[str, str]) -> RatioConstants:
    """The defaults, overridden by ``BATON_*`` variables. Raises ConfigError for an invalid value."""
    default = RatioConstants()
    return RatioConstants(
        initial=_share_from_environ(environ, "BATON_INIT_NEW_TOKEN_RATIO", default.initial),
        lowest_factor=_share_from_environ(environ, "BATON_MIN_NEW_TOKEN_RATIO_FACTOR", default.lowest_factor),
        decay_steps=count_from_environ(environ, "BATON_NEW_TOKEN_RATIO_DECAY_STEPS", default.decay_steps, 1),
        retract_steps=count_from_environ(environ, "BATON_RETRACT_DECODE_STEPS", default.retract_steps, 0),
        clip=count_from_environ(environ, "BATON_CLIP_MAX_NEW_TOKENS_ESTIMATION", default.clip, 1),
    )


class NewTokenRatio:
    """The ratio of one node, updated with each step."""

    def __init__(self, constants: RatioConstants) -> None:
        self._constants = constants
        self._highest = constants.initial
        self._lowest = self._highest * constants.lowest_factor
        self._decay = (self._highest - self._lowest) / constants.decay_steps
        self.value = self._highest

    def decoded(self, num_steps: int = 1) -> None:
        """Lower the ratio after decode steps without a retraction."""
        value, lowest, decay = self.value, self._lowest, self._decay
        while num_steps and value > lowest:
            value -= decay
            num_steps -= 1
        self.value = max(value, lowest)

    def retracted(self, running: Sequence[Request]) -> None:
        """Raise the ratio after a retraction; ``running`` are the requests that stay."""
        num_decoded = sum(len(request.output) for request in running)
        num_allowed = sum(request.sampling.max_new_tokens for request in running)
        room = self._constants.retract_steps * len(running)
        self.value = min(1.0, (num_decoded + room) / (num_allowed + 1))

    def reset(self) -> None:
        """Return to the first value. An idle node calls this: the last batch says nothing about the next."""
        self.value = self._highest


def expected_left(request: Request, ratio: float, clip: int) -> float:
    """Output tokens that a request is still expected to produce, at most ``clip``.

    With ``ignore_eos`` these are all that it may produce. Otherwise they are the rest of its predicted length or,
    without a prediction or past it, ``ratio`` of what it may still produce.
    """
    num_left = min(request.num_left, clip)
    if request.sampling.ignore_eos:
        return num_left
    num_predicted = request.expected_output - len(request.output)
    return min(num_left, num_predicted) if num_predicted > 0 else num_left * ratio


def expected_room(request: Request, ratio: float, clip: int, kv_window: KVWindow) -> float:
    """Tokens of room that a request is still expected to need for its output."""
    num_left = expected_left(request, ratio, clip)
    return min(num_left, kv_window.room_left(request)) if kv_window.is_bounded else num_left


def expected_tokens(requests: Iterable[Request], ratio: float, clip: int, kv_window: KVWindow) -> int:
    """Tokens of room that all these requests together are still expected to need, rounded up."""
    return math.ceil(sum(expected_room(request, ratio, clip, kv_window) for request in requests))


def _share_from_environ(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(environ.get(name, default))
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={environ[name]} must be a number from 0 to 1")
    return value


def count_from_environ(environ: Mapping[str, str], name: str, default: int, low: int) -> int:
    """An integer of at least ``low`` from the environment. Raises ConfigError naming the variable."""
    text = environ.get(name, str(default)).strip()
    if not text.isascii() or not text.isdigit() or int(text) < low:
        raise ConfigError(f"{name}={text} must be a whole number of at least {low}")
    return int(text)
