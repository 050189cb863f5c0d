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
MAX_REQUESTS = 10_000_000  # of a plan: all of it is made before the clock starts, in a second or two
MIN_RATE, MAX_RATE = 1e-6, 1e6  # per second
MAX_SECONDS = 1e9


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
                if any(math.inf in step for step in steps):
                    raise ValueError
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
        if not all(MIN_RATE <= rate <= MAX_RATE for leg in legs for rate in (leg.first, leg.last) if rate):
            raise ConfigError(f"--rate: rates must be between {MIN_RATE:g} and {MAX_RATE:g} per second")
        if any(MAX_SECONDS < leg.seconds < math.inf for leg in legs):
            raise ConfigError(f"--rate: steps must be at most {MAX_SECONDS:g} s long")
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
    return np.cumsum(_gaps(arrival, count, rng, cv))


def _gaps(arrival: Arrival, count: int, rng: np.random.Generator, cv: float) -> Floats:
    if arrival == "poisson":
        return rng.standard_exponential(count)
    shape = 1 / cv**2
    return rng.standard_gamma(shape, count) / shape


def _until(end: float, arrival: Arrival, rng: np.random.Generator, cv: float, burst_size: int) -> Floats:
    """All arrivals before an instant of operational time, and some after it; or more than can be planned.

    Where gaps vary much, nearly all are tiny, and far more may arrive than the mean says.
    """
    if arrival in ("constant", "burst"):
        return unit_arrivals(arrival, int(end) + burst_size + 2, rng, burst_size=burst_size)
    gaps = _gaps(arrival, int(end + 10 * math.sqrt(end + 1)) + 20, rng, cv)
    while gaps.sum() < end and len(gaps) <= MAX_REQUESTS:
        gaps = np.concatenate([gaps, _gaps(arrival, len(gaps), rng, cv)])
    return np.cumsum(gaps)


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
    """All instants of a run in seconds from its start: ``num_requests`` of them, or those before ``duration_s``.

    Raises:
        ConfigError: they are more than can be planned.
    """
    if num_requests is not None:
        unit = unit_arrivals(arrival, num_requests, rng, cv=cv, burst_size=burst_size)
    else:
        assert duration_s is not None
        end = float(profile.to_operational(np.array([duration_s]))[0])
        unit = _until(min(end, MAX_REQUESTS + 1.0), arrival, rng, cv, burst_size)
        if np.count_nonzero(unit < end) > MAX_REQUESTS:
            raise ConfigError(f"--rate and --duration make more than {MAX_REQUESTS:,} requests, the most of a plan")
    at = profile.to_seconds(unit)
    return at if duration_s is None else at[at < duration_s]
