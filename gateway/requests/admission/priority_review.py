"""Asks a priority function again about requests that still wait for their first token.

The function learns how long each has waited and how much else there is. Its answers change priorities in the gateway's
queue and on the nodes, as ``POST /v1/requests/ID/priority`` does, so no plan of a node ever calls it.
"""

from itertools import islice

from gateway.requests.admission.priority import PriorityResolver
from gateway.requests.dispatcher import Dispatcher

#: Seconds between two questions about one request, and the most questions at once.
INTERVAL_S, MAX_CALLS = 1.0, 256


class PriorityReview:
    """The periodic questions of one gateway; the requests take turns."""

    def __init__(self, priorities: PriorityResolver, dispatcher: Dispatcher) -> None:
        self._priorities = priorities
        self._dispatcher = dispatcher
        self._asked_at: dict[str, float] = {}  # by rid, the next to be asked first

    def tick(self, now: float) -> None:
        """Ask about the requests that arrived, or were asked about, longest ago."""
        if not self._priorities.has_function:
            return
        waiting = {stream.request.rid: stream for stream in self._dispatcher.streams() if not stream.ids}
        known = {rid: at for rid, at in self._asked_at.items() if rid in waiting}
        new = {rid: stream.started_at for rid, stream in waiting.items() if rid not in known}
        self._asked_at = known | new
        due = [rid for rid, at in self._asked_at.items() if now - at >= INTERVAL_S]
        num_in_flight = self._dispatcher.num_in_flight
        for rid in islice(due, MAX_CALLS):
            del self._asked_at[rid]
            self._asked_at[rid] = now
            stream = waiting[rid]
            priority = self._priorities.again(
                stream.request,
                waited_s=now - stream.started_at,
                num_waiting=len(waiting),
                num_in_flight=num_in_flight,
            )
            if priority is not None and priority != stream.request.priority:
                self._dispatcher.change_priority(rid, priority)
