"""Lengths of prompts and outputs: a fixed number of tokens, a distribution, or a file of numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError

Ints = NDArray[np.int32]
MAX_LENGTH = 10_000_000  # tokens; more is a mistake and would not fit into memory
MAX_TURNS = 1_000
MAX_EXPONENT = 100.0  # larger than the logarithm of any length
FORMS = "N, uniform:LOW:HIGH, normal:MEAN:SD, lognormal:MEDIAN:SIGMA or file:PATH"


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of token counts, all at least 1.

    Attributes:
        draw: draws lengths from ``(rng, count)``.
    """

    text: str
    draw: Callable[[np.random.Generator, int], Ints]

    @property
    def mean(self) -> float:
        """Estimate from a fixed sample, to choose the number of client processes."""
        return float(self.draw(np.random.default_rng(0), 1000).mean())


def parse_lengths(text: str, flag: str, most: int = MAX_LENGTH) -> LengthDistribution:
    """Parse ``128``, ``uniform:100:500``, ``normal:200:50``, ``lognormal:200:0.8`` (median, sigma) or ``file:PATH``.

    A trailing ``:max=N`` limits lengths, as ``most`` always does. A file has one number per line; lengths are drawn
    from it with replacement.

    Raises ConfigError: names the flag.
    """
    body, bounded, limit = text.partition(":max=")
    kind, *words = body.split(":")
    try:
        top = int(limit) if bounded else most
        if not 1 <= top <= most:
            raise ValueError
        if kind == "file":
            numbers = _numbers(Path(":".join(words)))
            return _bounded(text, top, lambda rng, count: rng.choice(numbers, count))
        values = [float(word) for word in ([kind] if kind[:1].isdigit() else words)]
        if not all(0 <= value <= most for value in values):
            raise ValueError
        if kind[:1].isdigit() and not words:
            (fixed,) = values
            if fixed < 1 or fixed != int(fixed):
                raise ValueError
            length = min(int(fixed), top)
            return LengthDistribution(text, lambda rng, count: np.full(count, length, dtype=np.int32))
        low, high = values
        draws: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
            "uniform": lambda rng, count: rng.integers(int(low), int(high), count, endpoint=True).astype(np.float64),
            "normal": lambda rng, count: rng.normal(low, high, count),
            "lognormal": lambda rng, count: low * np.exp(np.minimum(high * rng.standard_normal(count), MAX_EXPONENT)),
        }
        if (kind == "uniform" and not (1 <= low <= high and low % 1 == high % 1 == 0)) or low < 1:
            raise ValueError
        return _bounded(text, top, draws[kind])
    except (ValueError, KeyError, OSError) as error:
        because = f" ({error})" if isinstance(error, OSError) else ""
        form = f"{FORMS}, perhaps followed by :max=N, and at most {most:,}"
        raise ConfigError(f"{flag} must be {form}, not {text!r}{because}") from None


def _numbers(path: Path) -> NDArray[np.float64]:
    """Read a file of lengths; OSError says what is wrong with it."""
    try:
        numbers = np.array(path.read_text(encoding="utf-8").split(), dtype=np.float64)
    except ValueError:  # not numbers, or not text
        raise OSError("it has something else than numbers") from None
    if not len(numbers) or not (np.isfinite(numbers) & (numbers >= 1)).all():
        raise OSError("it has no lengths, or lengths below 1")
    return numbers


def _bounded(text: str, top: int, draw: Callable[[np.random.Generator, int], NDArray[np.number]]) -> LengthDistribution:
    def bounded(rng: np.random.Generator, count: int) -> Ints:
        drawn: Ints = np.clip(np.rint(draw(rng, count)), 1, top).astype(np.int32)
        return drawn

    return LengthDistribution(text, bounded)
