"""In which order waiting requests are tried. One protocol, one table; choosing a policy is a lookup."""

from collections.abc import Callable, Sequence
from typing import Protocol

from common.errors import ConfigError
from common.request import Request


class Policy(Protocol):
    """Orders the waiting queue before each step."""

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        """The waiting requests, first in line first.

        Args:
            waiting: in order of arrival; those retracted or paused stand at its front.
            now: seconds of the node's clock.
        """
        ...


class FirstComeFirstServed:
    """Order of arrival, which is that of the queue."""

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        return waiting


_POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FirstComeFirstServed}
_NOT_YET = ("lpm", "dfs-weight", "lof", "random", "short-first", "hrrn", "edf", "fair", "adaptive")


def policy_named(name: str) -> Policy:
    """The policy of this ``--schedule-policy``. Raises ConfigError for a name that is unknown or does not work yet."""
    if name in _POLICIES:
        return _POLICIES[name]()
    known = ", ".join(_POLICIES)
    if name in _NOT_YET:
        raise ConfigError(f"--schedule-policy {name} is not available yet; use one of: {known}")
    raise ConfigError(f"--schedule-policy {name} is unknown; use one of: {known}")
