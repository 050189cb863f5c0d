"""The queue of waiting requests of a node or of the gateway. Pure."""

from collections.abc import Iterator, MutableMapping, ValuesView

from common.cache.radix_cache import RadixCache
from common.cache.request_kv import packed_tokens
from common.request import Request, RequestKey
from common.scheduling.ordering import RequestOrdering


class WaitingQueue(MutableMapping[RequestKey, Request]):
    """Waiting requests by key, in order of arrival.

    The ordering is told of every request that enters or leaves. The radix cache (None in the gateway) keeps the cached
    length of every waiting request up to date (``Request.watch``).
    """

    def __init__(self, order: RequestOrdering, cache: RadixCache | None = None) -> None:
        self._order = order
        self._cache = cache
        self._requests: dict[RequestKey, Request] = {}

    def put_first(self, request: Request) -> None:
        """Add a retracted request at the front."""
        self[request.key] = request
        self._requests = {request.key: request, **self._requests}

    def reprioritize(self, request: Request, priority: int, priority_class: str | None) -> None:
        """Change the priority of a request, and its class unless that is None; it may have left this queue.

        A waiting request keeps its place among its new equals.
        """
        is_waiting = self._requests.get(request.key) is request
        is_new_class = is_waiting and priority_class not in (None, request.priority_class)
        if is_new_class:
            self._order.left(request)
        request.priority = priority
        if priority_class is not None:
            request.priority_class = priority_class
        if is_new_class:
            self._order.arrived(request)

    def __getitem__(self, key: RequestKey) -> Request:
        return self._requests[key]

    def __setitem__(self, key: RequestKey, request: Request) -> None:
        assert key not in self._requests, f"{key} is already in the queue"
        self._requests[key] = request
        if self._cache is not None:
            request.watch = self._cache.watch(packed_tokens(request, request.num_cacheable), request.salt)
        self._order.arrived(request)

    def __delitem__(self, key: RequestKey) -> None:
        request = self._requests.pop(key)
        self._order.left(request)
        if self._cache is not None and request.watch is not None:
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
