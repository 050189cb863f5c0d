"""Figures about transfers for operators: how many are at each stage, and for how long writes were under way. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from common.errors import ErrorCode

#: Stands for the transport of transfers whose connection has not been formed.
NO_TRANSPORT = "none"


def stage_gauges(
    stages: Sequence[str], transports: Iterable[str], transfers: Iterable[tuple[str, str]]
) -> dict[str, float]:
    """The number of transfers by stage and transport, as gauges of a heartbeat.

    Args:
        transports: those of the present connections, which are shown with 0 as well; an empty name is of one that is
            not attached.
        transfers: stage and transport of each.
    """
    names = {transport or NO_TRANSPORT: None for transport in transports} or {NO_TRANSPORT: None}
    counts = Counter({(stage, transport): 0 for transport in names for stage in stages})
    counts.update((stage, transport or NO_TRANSPORT) for stage, transport in transfers)
    return {f"transfers_by_{stage}_by_{transport}": float(count) for (stage, transport), count in counts.items()}


def failure_counter(code: ErrorCode) -> str:
    """The name of the total of transfers that have failed for this reason."""
    return f"transfers_failed_by_{code}"


def no_failures() -> dict[str, int]:
    """The totals of the usual reasons, which are shown before the first failure."""
    return {failure_counter(code): 0 for code in (ErrorCode.TRANSFER_FAILED, ErrorCode.NODE_LOST)}


def sums(*parts: Mapping[str, float]) -> dict[str, float]:
    """Figures of several parts of one node, added by name."""
    total: Counter[str] = Counter()
    for figures in parts:
        total.update(figures)  # it adds floats as well
    return dict(total)


class WriteTime:
    """Seconds in which at least one write was under way, by transport.

    The bytes that a transport has written, divided by these seconds, are its throughput while it works.
    """

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._since: dict[str, float] = {}  # up to when ``_totals`` counts
        self._num_writes: Counter[str] = Counter()

    def begin(self, transport: str, now: float) -> None:
        if not self._num_writes[transport]:
            self._since[transport] = now
            self._totals.setdefault(transport, 0.0)
        self._num_writes[transport] += 1

    def end(self, transport: str, now: float) -> None:
        self._num_writes[transport] -= 1
        self._totals[transport] += now - self._since[transport]
        self._since[transport] = now

    def counters(self) -> dict[str, float]:
        return {f"transfer_seconds_by_{transport}": seconds for transport, seconds in self._totals.items()}
