"""Those who wait, class by class in order of standing, kept sorted as they come and go. Pure.

Who is next and who would give way are then found at the ends, however many wait; a standing needs no clock, so nothing
has to be sorted anew as time passes.
"""

from bisect import bisect_left, insort
from collections.abc import Container
from itertools import islice

from common.request import Request
from common.scheduling.ordering import RequestOrdering

Key = tuple[str, int]
#: Standing, number of arrival (negative, so that of equals the last that came is the lowest), and who it is.
Entry = tuple[float, int, Request]


class Ranks:
    """Args:
    order: whose standings count.
    """

    def __init__(self, order: RequestOrdering) -> None:
        self._order = order
        self._by_class: dict[str, list[Entry]] = {}  # lowest first
        self._entries: dict[Key, Entry] = {}
        self._num_added = 0

    def add(self, request: Request, number: int | None = None) -> None:
        """A request waits from now on.

        Args:
            number: of its arrival, if it came before: what ``remove`` has returned.
        """
        self._num_added += 1
        entry = (self._order.standing(request), -self._num_added if number is None else number, request)
        self._entries[request.key] = entry
        insort(self._by_class.setdefault(request.priority_class, []), entry)

    def remove(self, request: Request) -> int:
        """It waits no longer, or changes: call this before, and ``add`` after."""
        entry = self._entries.pop(request.key)
        line = self._by_class[request.priority_class]
        del line[bisect_left(line, entry)]
        if not line:
            del self._by_class[request.priority_class]
        return entry[1]

    def first(self, count: int, but: Container[Key] = ()) -> list[Request]:
        """The next ``count``, if nothing but class, standing and arrival decides.

        Args:
            but: these are passed over.
        """
        best: list[Entry] = []
        for line in self._by_class.values():
            best += islice((entry for entry in reversed(line) if entry[2].key not in but), count)
        best.sort(reverse=True)
        return list(self._order.in_turn([request for _, _, request in best])[:count])

    def lowest(self, priority_class: str, standing: float, count: int) -> list[Request]:
        """At most ``count`` of a class that stand lower than this, lowest first, among equals the last that came."""
        line = self._by_class.get(priority_class, [])
        return [request for rank, _, request in line[:count] if rank < standing]
