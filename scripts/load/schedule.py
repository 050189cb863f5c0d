"""When requests arrive: all instants of a run, drawn from one seed before its clock starts.

Arrivals are made in *operational time*, in which exactly one request arrives per unit on average: evenly spaced,
Poisson (exponential gaps), gamma (a chosen coefficient of variation) or in bursts. A ``RateProfile`` then maps
operational time onto seconds: constant rate, steps, or a linear ramp. Going back through the same map is how a report
checks that what was sent still has the distribution that was asked for (Cinlar's time change of a Poisson process).
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError

Floats = NDArray[np.float64]
Arrival = Literal["constant", "poisson", "gamma", "burst"]


@dataclass(frozen=True, slots=True)
class Leg:
    """A stretch of time in which the rate goes linearly from one value to another.

    Attributes:
        seconds: its length; infinite for the last leg of a profile.
        first, last: requests per second at its ends.
    """

    seconds: float
    first: float
    last: float

    @property
    def arrivals(self) -> float:
        """How many arrive in it on average."""
        return self.seconds * (self.first + self.last) / 2

    def arrivals_by(self, seconds: Floats) -> Floats:
        slope = 0.0 if math.isinf(self.seconds) else (self.last - self.first) / self.seconds
        return self.first * seconds + slope * seconds * seconds / 2

    def seconds_until(self, arrivals: Floats) -> Floats:
        slope = 0.0 if math.isinf(self.seconds) else (self.last - self.first) / self.seconds
        root = np.sqrt(np.maximum(self.first**2 + 2 * slope * arrivals, 0.0))
        below = self.first + root
        return np.divide(2 * arrivals, below, out=np.zeros_like(arrivals), where=below > 0)


@dataclass(frozen=True, slots=True)
class RateProfile:
    """Requests per second over time, as legs; after the last finite one its final rate goes on."""

    legs: tuple[Leg, ...]

    @classmethod
    def parse(cls, text: str, duration_s: float | None = None) -> "RateProfile":
        """``4`` (constant), ``1..10`` (a ramp over ``duration_s``), ``1x30,2x30,8x10`` (rate x seconds, in steps).

        Raises:
            ConfigError: none of these, or a ramp without a duration.
        """
        ramp = re.fullmatch(r"([\d.]+)\.\.([\d.]+)", text)
        try:
            if ramp:
                return cls._ramp(float(ramp.group(1)), float(ramp.group(2)), duration_s)
            if "x" in text:
                steps = [tuple(map(float, step.split("x"))) for step in text.split(",")]
                return cls._of([Leg(seconds, rate, rate) for rate, seconds in steps])
            return cls._of([Leg(math.inf, float(text), float(text))])
        except ValueError:
            raise ConfigError(
                f"--rate must be a number, a ramp such as 1..10 or steps such as 1x30,2x30, not {text!r}"
            ) from None

    @classmethod
    def _ramp(cls, first: float, last: float, duration_s: float | None) -> "RateProfile":
        if duration_s is None:
            raise ConfigError("--rate with a ramp needs --duration, the time that the ramp takes")
        return cls._of([Leg(duration_s, first, last)])

    @classmethod
    def _of(cls, legs: list[Leg]) -> "RateProfile":
        if any(not (leg.seconds > 0 and leg.first >= 0 and leg.last >= 0) for leg in legs) or legs[-1].last <= 0:
            raise ConfigError("--rate: rates must be positive (only before the end may they be 0), and so must lengths")
        if any(not math.isfinite(rate) for leg in legs for rate in (leg.first, leg.last)):
            raise ConfigError("--rate must be finite")
        if math.isfinite(legs[-1].seconds):
            legs = [*legs, Leg(math.inf, legs[-1].last, legs[-1].last)]
        return cls(tuple(legs))

    @property
    def seconds(self) -> float:
        """Length of the finite legs: how long the steps or the ramp take; 0 for a constant rate."""
        return sum(leg.seconds for leg in self.legs[:-1])

    def to_seconds(self, operational: Floats) -> Floats:
        """Instants in seconds of instants in operational time, both from the start."""
        out = np.empty_like(operational)
        at, count = 0.0, 0.0
        for leg in self.legs:
            here = (operational >= count) & (operational < count + leg.arrivals)
            out[here] = at + leg.seconds_until(operational[here] - count)
            at, count = at + leg.seconds, count + leg.arrivals
        return out

    def to_operational(self, seconds: Floats) -> Floats:
        """The inverse of ``to_seconds``."""
        out = np.zeros_like(seconds)
        at, count = 0.0, 0.0
        for leg in self.legs:
            here = (seconds >= at) & (seconds < at + leg.seconds)
            out[here] = count + leg.arrivals_by(seconds[here] - at)
            at, count = at + leg.seconds, count + leg.arrivals
        return out


def unit_arrivals(
    arrival: Arrival, count: int, rng: np.random.Generator, *, cv: float = 1.0, burst_size: int = 1
) -> Floats:
    """``count`` arrivals in operational time, rising.

    Args:
        cv: of ``gamma``: standard deviation of the gaps over their mean; 1 is Poisson, more is burstier.
        burst_size: of ``burst``: requests that arrive at one instant; the bursts are evenly spaced.
    """
    if arrival == "constant":
        return np.arange(count, dtype=np.float64)
    if arrival == "burst":
        return (np.arange(count) // burst_size * burst_size).astype(np.float64)
    if arrival == "poisson":
        return np.cumsum(rng.standard_exponential(count))
    shape = 1 / cv**2
    return np.cumsum(rng.standard_gamma(shape, count) / shape)


def arrivals(
    profile: RateProfile,
    arrival: Arrival,
    rng: np.random.Generator,
    *,
    num_requests: int | None,
    duration_s: float | None,
    cv: float = 1.0,
    burst_size: int = 1,
) -> Floats:
    """All instants of a run in seconds from its start: ``num_requests`` of them, or those before ``duration_s``."""
    assert num_requests is not None or duration_s is not None
    count = num_requests
    if duration_s is not None:
        mean = float(profile.to_operational(np.array([duration_s]))[0])
        enough = int(mean + 10 * max(cv, 1.0) * math.sqrt(mean + 1) + 10 * burst_size + 20)
        count = enough if num_requests is None else min(num_requests, enough)
    assert count is not None
    at = profile.to_seconds(unit_arrivals(arrival, count, rng, cv=cv, burst_size=burst_size))
    return at if duration_s is None else at[at < duration_s]
