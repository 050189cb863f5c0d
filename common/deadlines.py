"""Whose deadline passes next: a heap, so that asking costs what has expired and not what waits. Pure."""

import heapq
from collections.abc import Mapping

from common.request import Request, RequestKey


class Deadlines:
    """Args:
    requests: those that are there, by key; whoever is not in it any more is passed over.
    """

    def __init__(self, requests: Mapping[RequestKey, Request]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, RequestKey]] = []

    def add(self, request: Request) -> None:
        """A request that is there from now on. One without a deadline costs nothing."""
        if request.deadline_at == float("inf"):
            return
        heapq.heappush(self._heap, (request.deadline_at, request.key))
        if len(self._heap) > 2 * len(self._requests) + 64:  # most have ended long before their deadlines
            self._heap = [entry for entry in self._heap if self._is_of(entry)]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> list[Request]:
        """Those whose deadline has passed, earliest first; each is told once."""
        found: dict[RequestKey, Request] = {}  # a key that came again has two entries
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            if self._is_of(entry):
                found[entry[1]] = self._requests[entry[1]]
        return list(found.values())

    def _is_of(self, entry: tuple[float, RequestKey]) -> bool:
        deadline_at, key = entry
        return key in self._requests and self._requests[key].deadline_at == deadline_at
