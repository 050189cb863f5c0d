"""A queue of waiting requests: its order is told of all who enter and leave, and the cache of all who wait. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, MutableMapping, Sequence, ValuesView

from common.cache.prefix_watch import PrefixWatch
from common.cache.radix_cache import RadixCache
from common.cache.request_kv import packed_tokens
from common.errors import invariant
from common.request import LOWEST_PRIORITY, Request, RequestKey
from common.scheduling.ordering import RequestOrdering
from common.scheduling.sorted_line import SortedLine


class WaitingQueue(MutableMapping[RequestKey, Request]):
    """Requests by key, in order of arrival; used like the dictionary that it is.

    Args:
        order: in which they are served.
        cache: of this node; each request is watched there while it waits. None in the gateway.
    """

    def __init__(self, order: RequestOrdering, cache: RadixCache | None = None) -> None:
        self._order = order
        self._cache = cache
        self._requests: dict[RequestKey, Request] = {}
        self._watched: dict[PrefixWatch, Request] = {}
        self._num_by_priority: Counter[int] = Counter()
        self._line: SortedLine | None = None  # from when it is wanted first
        self._last_number = self._first_number = 0
        self._now = 0.0  # when the line was wanted last

    def in_order(self, now: float) -> Sequence[Request]:
        """First in line first."""
        return self._order.sort(list(self._requests.values()), now)

    def line(self, begun: Sequence[Request], now: float, among: Collection[Request] | None = None) -> Iterable[Request]:
        """As ``RequestOrdering.merge`` of ``begun`` and those that wait, which is sorted only if the policy cannot
        do without. For queues where nobody who waits is lent a priority.

        Args:
            among: only these of the waiting are wanted; others may be there as well.
        """
        if not self._order.is_ranked:
            return self._order.merge(begun, list(self._requests.values()), now)
        self._now = now
        if self._line is None:
            self._line = SortedLine(self._order)
            for number, request in enumerate(self._requests.values()):
                self._line.add(request, number)
            self._first_number, self._last_number = 0, len(self._requests) - 1
        if self._order.policy.ranks_by_cache and self._cache is not None:
            for watch in self._cache.take_moved():
                self._refile(self._watched[watch])
        return self._line.line(begun, now, among)

    def _refile(self, request: Request) -> None:
        assert self._line is not None
        self._line.add(request, self._line.remove(request))

    @property
    def highest_priority(self) -> int:
        """Of those that wait."""
        return max(self._num_by_priority, default=LOWEST_PRIORITY)

    def num_above(self, priority: int) -> int:
        """How many are of a higher one."""
        return sum(count for other, count in self._num_by_priority.items() if other > priority)

    def watched_by(self, watch: PrefixWatch) -> Request:
        """Whose watch this is."""
        return self._watched[watch]

    def put_first(self, request: Request) -> None:
        """Back to the front: it has waited before."""
        self[request.key] = request
        self._requests = {request.key: request, **self._requests}
        if self._line is not None:
            self._line.remove(request)
            self._first_number -= 1
            self._line.add(request, self._first_number)

    def change(self, request: Request, priority: int, priority_class: str | None) -> None:
        """A request counts otherwise from now on. One that waits keeps its place among those that are equal then.

        Args:
            request: in this queue, or past it.
            priority_class: None for the one it has.
        """
        is_here = self._requests.get(request.key) is request
        number = 0
        if is_here:
            self._order.left(request)
            self._count(request, -1)
            number = 0 if self._line is None else self._line.remove(request)
        request.priority = priority
        if priority_class is not None:
            request.priority_class = priority_class
        if is_here:
            self._order.arrived(request)
            self._count(request, 1)
            if self._line is not None:
                self._line.add(request, number)

    def _count(self, request: Request, change: int) -> None:
        self._num_by_priority[request.priority] += change
        if not self._num_by_priority[request.priority]:
            del self._num_by_priority[request.priority]

    def check(self) -> None:
        """The sorted line is in the very order that sorting would give, and priorities are counted right."""
        invariant(
            self._num_by_priority == Counter(request.priority for request in self._requests.values()),
            "waiting requests are miscounted by priority",
        )
        if self._line is not None:
            line = list(self.line([], self._now))
            invariant(
                line == list(self._order.merge([], list(self._requests.values()), self._now)), "the line is not sorted"
            )

    def __getitem__(self, key: RequestKey) -> Request:
        return self._requests[key]

    def __setitem__(self, key: RequestKey, request: Request) -> None:
        assert key not in self._requests, f"{key} waits already"
        self._requests[key] = request
        if self._cache is not None:
            request.watch = self._cache.watch(packed_tokens(request, request.num_cacheable), request.salt)
            self._watched[request.watch] = request
        self._order.arrived(request)
        self._count(request, 1)
        if self._line is not None:
            self._last_number += 1
            self._line.add(request, self._last_number)

    def __delitem__(self, key: RequestKey) -> None:
        request = self._requests.pop(key)
        self._order.left(request)
        self._count(request, -1)
        if self._line is not None:
            self._line.remove(request)
        if self._cache is not None and request.watch is not None:
            del self._watched[request.watch]
            self._cache.unwatch(request.watch)
            request.watch = None

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: object) -> bool:
        return key in self._requests

    def values(self) -> ValuesView[Request]:
        return self._requests.values()
