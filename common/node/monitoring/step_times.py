"""How long the steps of an engine take at present, and what a prompt token adds to one. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

#: Steps after which a step counts half. They are enough for a mean, and take no more than seconds.
HALF_LIFE = 64
DECAY = 0.5 ** (1 / HALF_LIFE)


class _Sums(NamedTuple):
    """Sums over steps, the later ones with more weight."""

    weight: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0

    def plus(self, seconds: float, num_tokens: int) -> "_Sums":
        return _Sums(self.weight * DECAY + 1.0, self.seconds * DECAY + seconds, self.tokens * DECAY + num_tokens)


class StepTimes:
    """Measures the steps of one engine. One thread may add steps while others read."""

    def __init__(self) -> None:
        self._decode = _Sums()
        self._prompt = _Sums()

    def add(self, seconds: float, num_prompt_tokens: int) -> None:
        """Count a step that computed ``num_prompt_tokens`` tokens of prompts."""
        if num_prompt_tokens:
            self._prompt = self._prompt.plus(seconds, num_prompt_tokens)
        else:
            self._decode = self._decode.plus(seconds, 0)

    def add_decode_steps(self, durations: Sequence[float]) -> None:
        """Count steps without prompts, by their durations in seconds."""
        weight, total, tokens = self._decode
        for seconds in durations:
            weight, total, tokens = weight * DECAY + 1.0, total * DECAY + seconds, tokens * DECAY
        self._decode = _Sums(weight, total, tokens)

    @property
    def step_s(self) -> float:
        """Mean of the latest steps without prompts; 0 if there was none."""
        return self._decode.seconds / self._decode.weight if self._decode.weight else 0.0

    @property
    def prompt_token_s(self) -> float:
        """Seconds by which a prompt token makes a step longer; 0 if there was none.

        On a node without decode steps, each token has its share of the fixed part of a step.
        """
        prompt = self._prompt
        if not prompt.tokens:
            return 0.0
        return max(prompt.seconds - prompt.weight * self.step_s, 0.0) / prompt.tokens
