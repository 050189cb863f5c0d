"""A queue of waiting requests: its order is told of all who enter and leave, and the cache of all who wait. Pure."""

from collections.abc import Iterator, MutableMapping, Sequence, ValuesView

from common.order import Order
from common.radix import RadixCache
from common.request import Request
from common.request_pages import packed_tokens

Key = tuple[str, int]


class WaitingQueue(MutableMapping[Key, Request]):
    """Requests by key, in order of arrival; used like the dictionary that it is.

    Args:
        order: in which they are served.
        cache: of this node; each request is watched there while it waits. None in the gateway.
    """

    def __init__(self, order: Order, cache: RadixCache | None = None) -> None:
        self._order = order
        self._cache = cache
        self._requests: dict[Key, Request] = {}

    def in_order(self, now: float) -> Sequence[Request]:
        """First in line first."""
        return self._order.sort(list(self._requests.values()), now)

    def put_first(self, request: Request) -> None:
        """Back to the front: it has waited before."""
        self[request.key] = request
        self._requests = {request.key: request, **self._requests}

    def change(self, request: Request, priority: int, priority_class: str | None) -> None:
        """A request counts otherwise from now on. One that waits keeps its place among those that are equal then.

        Args:
            request: in this queue, or past it.
            priority_class: None for the one it has.
        """
        is_here = self._requests.get(request.key) is request
        if is_here:
            self._order.left(request)
        request.priority = priority
        if priority_class is not None:
            request.priority_class = priority_class
        if is_here:
            self._order.arrived(request)

    def __getitem__(self, key: Key) -> Request:
        return self._requests[key]

    def __setitem__(self, key: Key, request: Request) -> None:
        assert key not in self._requests, f"{key} waits already"
        self._requests[key] = request
        if self._cache is not None:
            request.watch = self._cache.watch(packed_tokens(request, request.num_cacheable), request.salt)
        self._order.arrived(request)

    def __delitem__(self, key: Key) -> None:
        request = self._requests.pop(key)
        self._order.left(request)
        if self._cache is not None and request.watch is not None:
            self._cache.unwatch(request.watch)
            request.watch = None

    def __iter__(self) -> Iterator[Key]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: object) -> bool:
        return key in self._requests

    def values(self) -> ValuesView[Request]:
        return self._requests.values()
