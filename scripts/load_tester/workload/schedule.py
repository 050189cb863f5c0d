"""Arrival instants of a run, all drawn from one seed before its clock starts.

Arrivals are drawn in *operational time*, with one request per unit on average: evenly spaced, Poisson (exponential
gaps), gamma (a chosen coefficient of variation) or in bursts. A ``RateProfile`` maps operational time onto seconds:
constant rate, steps, or a linear ramp. The inverse map lets a report check that the requests sent have the intended
distribution (Cinlar's time change of a Poisson process).
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
MAX_REQUESTS = 10_000_000  # of a plan, which is made before the clock starts, in a second or two
MIN_RATE, MAX_RATE = 1e-6, 1e6  # per second
MAX_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class RatePhase:
    """A phase in which the rate changes linearly.

    Attributes:
        seconds: length; infinite for the last phase of a profile.
        first, last: requests per second at its ends.
    """

    seconds: float
    first: float
    last: float

    @property
    def arrivals(self) -> float:
        """Mean number of arrivals."""
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
    """Requests per second over time; after the last finite phase its final rate continues."""

    phases: tuple[RatePhase, ...]

    @classmethod
    def parse(cls, text: str, duration_s: float | None = None) -> "RateProfile":
        """Parse ``4`` (constant), ``1..10`` (ramp over ``duration_s``) or ``1x30,2x30,8x10`` (steps, rate x seconds).

        Raises ConfigError: the text is none of these, or a ramp without a duration.
        """
        ramp = re.fullmatch(r"([\d.]+)\.\.([\d.]+)", text)
        try:
            if ramp:
                return cls._ramp(float(ramp.group(1)), float(ramp.group(2)), duration_s)
            if "x" in text:
                steps = [tuple(map(float, step.split("x"))) for step in text.split(",")]
                if any(math.inf in step for step in steps):
                    raise ValueError
                return cls._of([RatePhase(seconds, rate, rate) for rate, seconds in steps])
            return cls._of([RatePhase(math.inf, float(text), float(text))])
        except ValueError:
            raise ConfigError(
                f"--rate must be a number, a ramp such as 1..10 or steps such as 1x30,2x30, not {text!r}"
            ) from None

    @classmethod
    def _ramp(cls, first: float, last: float, duration_s: float | None) -> "RateProfile":
        if duration_s is None:
            raise ConfigError("--rate with a ramp needs --duration, the length of the ramp")
        return cls._of([RatePhase(duration_s, first, last)])

    @classmethod
    def _of(cls, phases: list[RatePhase]) -> "RateProfile":
        if (
            any(not (phase.seconds > 0 and phase.first >= 0 and phase.last >= 0) for phase in phases)
            or phases[-1].last <= 0
        ):
            raise ConfigError("--rate: lengths must be above 0, rates 0 or more, and the last rate above 0")
        if not all(MIN_RATE <= rate <= MAX_RATE for phase in phases for rate in (phase.first, phase.last) if rate):
            raise ConfigError(f"--rate: rates must be between {MIN_RATE:g} and {MAX_RATE:g} per second")
        if any(MAX_SECONDS < phase.seconds < math.inf for phase in phases):
            raise ConfigError(f"--rate: steps must be at most {MAX_SECONDS:g} s long")
        if math.isfinite(phases[-1].seconds):
            phases = [*phases, RatePhase(math.inf, phases[-1].last, phases[-1].last)]
        return cls(tuple(phases))

    @property
    def seconds(self) -> float:
        """Length of the steps or the ramp; 0 for a constant rate."""
        return sum(phase.seconds for phase in self.phases[:-1])

    def to_seconds(self, operational: Floats) -> Floats:
        """Map operational time to seconds, both from the start."""
        out = np.empty_like(operational)
        at, count = 0.0, 0.0
        for phase in self.phases:
            here = (operational >= count) & (operational < count + phase.arrivals)
            out[here] = at + phase.seconds_until(operational[here] - count)
            at, count = at + phase.seconds, count + phase.arrivals
        return out

    def to_operational(self, seconds: Floats) -> Floats:
        """Inverse of ``to_seconds``."""
        out = np.zeros_like(seconds)
        at, count = 0.0, 0.0
        for phase in self.phases:
            here = (seconds >= at) & (seconds < at + phase.seconds)
            out[here] = count + phase.arrivals_by(seconds[here] - at)
            at, count = at + phase.seconds, count + phase.arrivals
        return out


def unit_arrivals(
    arrival: Arrival, count: int, rng: np.random.Generator, *, cv: float = 1.0, burst_size: int = 1
) -> Floats:
    """Draw ``count`` arrivals in operational time, in ascending order.

    Args:
        cv: for ``gamma``: standard deviation of the gaps over their mean; 1 is Poisson, more is burstier.
        burst_size: for ``burst``: requests that arrive at one instant; bursts are evenly spaced.
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
    """All arrivals before an instant of operational time, and some after it; or more than ``MAX_REQUESTS``.

    Where gaps vary much, nearly all are tiny, and many more requests than the mean may arrive.
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
    """Arrival instants in seconds from the start: ``num_requests`` of them, or those before ``duration_s``.

    Raises ConfigError: there are more than ``MAX_REQUESTS``.
    """
    if num_requests is not None:
        unit = unit_arrivals(arrival, num_requests, rng, cv=cv, burst_size=burst_size)
    else:
        assert duration_s is not None
        end = float(profile.to_operational(np.array([duration_s]))[0])
        unit = _until(min(end, MAX_REQUESTS + 1.0), arrival, rng, cv, burst_size)
        if np.count_nonzero(unit < end) > MAX_REQUESTS:
            raise ConfigError(f"--rate and --duration make more than {MAX_REQUESTS:,} requests: lower them")
    at = profile.to_seconds(unit)
    return at if duration_s is None else at[at < duration_s]
