"""The queue of requests that wait in the gateway until the nodes have room for them. Pure.

Each model has one. Nodes are sent what they run at once and a few requests more. All others wait here, where a more
urgent request can still pass them. A request whose attempt was ended by the loss of a node comes back here.
"""

from collections.abc import Mapping, Sequence

from common.request import Request, RequestKey
from common.scheduling.ordering import RequestOrdering
from common.scheduling.waiting_queue import WaitingQueue


class RequestQueue:
    """The waiting requests of one model.

    Args:
        recovery_timeout_s: how long requests wait for nodes to come back.
    """

    def __init__(self, order: RequestOrdering, *, recovery_timeout_s: float) -> None:
        self.order = order
        self._recovery_timeout_s = recovery_timeout_s
        self._waiting = WaitingQueue(order)
        self._recovered: dict[RequestKey, Request] = {}
        self._stranded: dict[RequestKey, float] = {}  # no registered pool can hold these, since when
        self._stranded_before: dict[RequestKey, float] = {}  # for how long those that are tried again were
        self._unroutable_since: float | None = None
        self._looked_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._recovered)

    @property
    def is_idle(self) -> bool:
        """No request waits for its turn: the next to arrive may be sent at once."""
        return len(self._waiting) + len(self._recovered) == len(self._stranded)

    @property
    def policy(self) -> str:
        """Name of the policy that orders the queue."""
        return self.order.policy.name

    @property
    def class_names(self) -> list[str]:
        """Names of the priority classes; one empty name without classes."""
        return list(self.order.rules.class_weights) or [""]

    def requests(self) -> list[Request]:
        return [*self._recovered.values(), *self._waiting.values()]

    # ---- in and out -----------------------------------------------------------------------------------------------

    def push(self, request: Request) -> None:
        self._waiting[request.key] = request

    def put_back(self, request: Request) -> None:
        """Take a request again whose attempt has ended. It comes before all that have not been sent yet.

        These wait longer for it, but each request is put back only so often (``gateway.requests.attempts.recovery``).
        """
        assert request.key not in self._waiting, f"{request.key} is already in the queue"
        self._recovered[request.key] = request

    def remove(self, request: Request) -> None:
        """Remove a request that was sent or has ended."""
        if self._recovered.pop(request.key, None) is None:
            del self._waiting[request.key]
        self._stranded.pop(request.key, None)
        self._stranded_before.pop(request.key, None)

    def reprioritize(self, request: Request, priority: int, priority_class: str) -> None:
        """Change the urgency of a request; it keeps its arrival order among equals."""
        self._waiting.reprioritize(request, priority, priority_class)

    def first(self, count: int, now: float) -> Sequence[Request]:
        """The next ``count`` requests in order. They stay in the queue until they are removed."""
        recovered = self.order.by_priority(self._able(self._recovered))
        if len(recovered) >= count:
            return recovered[:count]
        return [*recovered, *self.order.sort(self._able(self._waiting), now)[: count - len(recovered)]]

    def num_ahead(self, request: Request, now: float, *, last: float) -> int:
        """How many waiting requests will probably be sent before a new one; 0 if the policy does not tell.

        Args:
            last: the last instant at which the new request can be sent in time.
        """
        policy = self.order.policy
        if policy.forecast == "none":
            return 0
        waiting = self._able(self._waiting)
        ordered = policy.order([*waiting, request], now if policy.forecast == "arrival" else last)
        place = next(i for i, other in enumerate(self.order.by_priority(ordered)) if other is request)
        return len(self._able(self._recovered)) + place

    def _able(self, requests: Mapping[RequestKey, Request]) -> list[Request]:
        """Requests that a registered pool can hold."""
        return [request for request in requests.values() if request.key not in self._stranded]

    # ---- eviction ---------------------------------------------------------------------------------------------------

    def eviction_candidates(self, request: Request, count: int, *, sent: Sequence[Request] = ()) -> list[Request]:
        """``count`` requests of the same class to evict for a more urgent one if the queue is full, or none.

        Those that were put back are never evicted: their clients may have seen a part of the output.
        The least urgent comes first, the newest first among equals. Without priority scheduling there are none.

        Args:
            sent: requests at nodes without a first token yet; they are evicted after all that wait here.
        """
        if not self.order.rules.is_enabled:
            return []
        lower = [*self._lower(request, list(self._waiting.values())), *self._lower(request, sent)]
        return lower[:count] if len(lower) >= count else []

    def _lower(self, request: Request, others: Sequence[Request]) -> list[Request]:
        """Less urgent requests of the same class, least urgent first, newest first among equals."""
        priority_of = self.order.effective_priority
        bound = priority_of(request)
        lower = [o for o in reversed(others) if o.priority_class == request.priority_class and priority_of(o) < bound]
        return sorted(lower, key=priority_of)

    # ---- missing nodes ----------------------------------------------------------------------------------------------

    def strand(self, request: Request, now: float) -> None:
        """Set aside a request that no registered pool could hold; others may pass it until a node registers."""
        self._stranded[request.key] = now - self._stranded_before.pop(request.key, 0.0)

    def is_stranded(self, request: Request) -> bool:
        """Whether a request was set aside."""
        return request.key in self._stranded

    def retry_stranded(self, now: float) -> None:
        """Take requests back that were set aside. The time until one is set aside again does not count."""
        self._stranded_before |= {key: now - since for key, since in self._stranded.items()}
        self._stranded.clear()

    def expired(self, now: float, *, is_routable: bool, has_reserved: bool = False) -> list[Request]:
        """Requests that have waited too long for nodes to come back, those that were put back left out.

        Args:
            has_reserved: a suspect request has nodes for itself. The time does not count for requests that were set
                aside.
        """
        since_last_s, self._looked_at = now - self._looked_at, now
        if has_reserved:
            self._stranded = {key: min(since + since_last_s, now) for key, since in self._stranded.items()}
        if is_routable:
            self._unroutable_since = None
            overdue = [key for key, since in self._stranded.items() if now - since > self._recovery_timeout_s]
            return [self._waiting[key] for key in overdue if key in self._waiting]
        if self._unroutable_since is None:
            self._unroutable_since = now
        return list(self._waiting.values()) if now - self._unroutable_since > self._recovery_timeout_s else []
