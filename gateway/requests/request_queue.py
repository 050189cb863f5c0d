"""Requests that wait in the gateway until the nodes have room for them: who is next, who gives way, who waits in vain.

Pure. One backlog for each model. Nodes are sent what they run at once and a little more; whatever else comes waits
here, where a more urgent request can still pass it, and a node that goes takes nothing along.
"""

from collections.abc import Sequence

from common.request import Request, RequestKey
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.adaptive import Adaptive
from common.scheduling.waiting_queue import WaitingQueue


class RequestQueue:
    """The queue.

    Args:
        order: of those who wait.
        patience_s: how long they wait for nodes that are not there.
    """

    def __init__(self, order: RequestOrdering, *, patience_s: float) -> None:
        self.order = order
        self._patience_s = patience_s
        self._waiting = WaitingQueue(order)
        self._stranded: dict[RequestKey, None] = {}  # those whom no pool that is there could hold
        self._stranded_at: dict[RequestKey, float] = {}  # when that was found first
        self._unroutable_since: float | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Nobody waits for a turn: whoever comes now may go out at once."""
        return len(self._waiting) == len(self._stranded)

    @property
    def policy(self) -> str:
        """By which the queue is ordered now."""
        policy = self.order.policy
        return policy.choice if isinstance(policy, Adaptive) else policy.name

    def requests(self) -> list[Request]:
        """All who wait, in order of arrival."""
        return list(self._waiting.values())

    # ---- in and out -----------------------------------------------------------------------------------------------

    def push(self, request: Request) -> None:
        """A request waits from now on."""
        self._waiting[request.key] = request

    def remove(self, request: Request) -> None:
        """It waits no longer: it was sent out, or has ended."""
        del self._waiting[request.key]
        self._stranded.pop(request.key, None)
        self._stranded_at.pop(request.key, None)

    def change(self, request: Request, priority: int, priority_class: str) -> None:
        """It counts otherwise from now on; if it waits, it keeps its place among those that are equal then."""
        self._waiting.reprioritize(request, priority, priority_class)

    def first(self, count: int, now: float) -> Sequence[Request]:
        """The ``count`` who are next, first in line first. They stay until they are removed."""
        line = self._waiting.sorted(now)
        if self._stranded:
            line = [request for request in line if request.key not in self._stranded]
        return line[:count]

    # ---- who gives way --------------------------------------------------------------------------------------------

    def outranked(self, request: Request, count: int, *, sent: Sequence[Request] = ()) -> list[Request]:
        """Who would give way to a newcomer if the queue is full: ``count`` of its class that stand lower, or nobody.

        Lowest standing first, among equals the one that came last. Nobody does with priorities off.

        Args:
            sent: who is asked after all who wait here: those at nodes of whom nothing has come yet.
        """
        if not self.order.rules.is_enabled:
            return []
        lower = [*self._lower(request, self.requests()), *self._lower(request, sent)]
        return lower[:count] if len(lower) >= count else []

    def _lower(self, request: Request, others: Sequence[Request]) -> list[Request]:
        """Requests of the same class with a lower standing, lowest first, the newest first among equals."""
        standing = self.order.effective_priority
        bound = standing(request)
        lower = [o for o in reversed(others) if o.priority_class == request.priority_class and standing(o) < bound]
        return sorted(lower, key=standing)

    # ---- nodes that are not there ---------------------------------------------------------------------------------

    def strand(self, request: Request, now: float) -> None:
        """No node that is there could hold this one; others may pass it until nodes come."""
        self._stranded[request.key] = None
        self._stranded_at.setdefault(request.key, now)

    def nodes_came(self) -> None:
        """Everybody may try again."""
        self._stranded.clear()

    def hopeless(self, now: float, *, is_routable: bool) -> list[Request]:
        """Those who have waited long enough for nodes that did not come.

        Args:
            is_routable: whether anything could be served now.
        """
        if is_routable:
            self._unroutable_since = None
            vain = [key for key, since in self._stranded_at.items() if now - since > self._patience_s]
            return [self._waiting[key] for key in vain]
        if self._unroutable_since is None:
            self._unroutable_since = now
        return self.requests() if now - self._unroutable_since > self._patience_s else []
