"""Finds requests whose deadlines have passed, in time proportional to their number. Pure."""

import heapq
from collections.abc import Mapping

from common.request import Request, RequestKey


class Deadlines:
    """Deadlines of a scheduler's current ``requests``; deadlines of other requests are ignored."""

    def __init__(self, requests: Mapping[RequestKey, Request]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, RequestKey]] = []

    def add(self, request: Request) -> None:
        """Add a request; does nothing if it has no deadline."""
        if request.deadline_at == float("inf"):
            return
        heapq.heappush(self._heap, (request.deadline_at, request.key))
        if len(self._heap) > 2 * len(self._requests) + 64:  # most requests end long before their deadlines
            self._heap = [entry for entry in self._heap if self._is_of(entry)]
            heapq.heapify(self._heap)

    @property
    def next_at(self) -> float:
        """No deadline of a present request is earlier."""
        return self._heap[0][0] if self._heap else float("inf")

    def expired(self, now: float) -> list[Request]:
        """Return the requests whose deadlines have passed, earliest first, each only once."""
        if not self._heap or self._heap[0][0] > now:
            return []
        found: dict[RequestKey, Request] = {}  # a request that was added again has two entries
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            if self._is_of(entry):
                found[entry[1]] = self._requests[entry[1]]
        return list(found.values())

    def _is_of(self, entry: tuple[float, RequestKey]) -> bool:
        deadline_at, key = entry
        return key in self._requests and self._requests[key].deadline_at == deadline_at
