"""Page reservations for prompts that come from prefill nodes. Pure.

A request gets every page that its prompt lacks, or none. A request whose prefix is being received for another request
waits until the prefix is there, so that a prefix is shipped once. Of a prompt that is longer than the model's window
only the pages within the window are reserved and shipped, for this request alone. For a retracted request that a
prefill node computes again, "prompt" means every token before the one sampled last: all that it takes to decode the
next token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.cache.kv_window import KVWindow
from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.request_kv import packed_tokens
from common.cache.tree_node import Match, Pending, TreeNode
from common.errors import invariant
from common.request import Request, RequestKey
from common.scheduling.victim_selection import has_room


@dataclass(slots=True)
class Reservation:
    """Pages reserved for one transfer.

    Attributes:
        first: index of the first prompt page that must be shipped.
        num_cached: pages before it that are cached here; the others are outside the window.
        pages: destinations of page ``first`` and the following ones, owned as ``Owner.GRANT``.
        num_pages: pages of the whole prompt.
        pending: the whole pages among ``pages`` in the radix cache, pending until they have arrived.
    """

    first: int
    num_cached: int
    pages: list[int]
    num_pages: int
    pending: Pending | None = None


class PageReservations:
    """The reservations of one decode node, by request."""

    def __init__(self, cache: RadixCache, allocator: PageAllocator, kv_window: KVWindow) -> None:
        self.kv_window = kv_window
        self._cache = cache
        self._allocator = allocator
        self.by_key: dict[RequestKey, Reservation] = {}
        self._num_claimed = 0  # pages that earlier requests of this pass get once outstanding steps have ended

    @property
    def page_size(self) -> int:
        return self._cache.page_size

    @property
    def num_available(self) -> int:
        """Pages that are free or could be evicted."""
        return self._allocator.num_free + self._cache.num_evictable_pages

    def match(self, request: Request, *, is_here: bool = False) -> Match:
        """The cached part of the tokens that it takes to decode the request's next token.

        Args:
            is_here: the remaining tokens are computed here, not received, and so are those whose logits are needed.
        """
        if not self.kv_window.is_cached(request.num_decodable):
            return Match()
        received_from = None if is_here else self._received_from(request)
        tokens = packed_tokens(request, request.num_cacheable if is_here else request.num_decodable)
        return self._cache.match(tokens, request.salt, received_from=received_from)

    def _received_from(self, request: Request) -> int | None:
        """See ``WindowPages.num_usable``."""
        window_pages = self._allocator.window_pages
        return None if window_pages is None else window_pages.kv_window.first_seen(request.num_decodable)

    def num_pages(self, request: Request) -> int:
        """Pages of all tokens that it takes to decode the request's next token."""
        return self.kv_window.num_pages(request.num_decodable)

    def num_pending(self, request: Request) -> int:
        """Pages that the request could use and that are being received for another request."""
        if not self.kv_window.is_cached(request.num_decodable):
            return 0
        tokens, received_from = packed_tokens(request, request.num_decodable), self._received_from(request)
        return self._cache.num_pending(tokens, request.salt, received_from=received_from)

    def lacks(self, request: Request, num_tokens: int, without: Sequence[Request], *, is_here: bool) -> bool:
        """Whether there is no room for ``num_tokens``, counting the cached prefix of the request as room.

        Pages that linger until an outstanding step is committed count as room, too.

        Args:
            without: requests whose pages count as free.
            is_here: the request is computed here.
        """
        match = self.match(request, is_here=is_here)
        num_pages = self.kv_window.num_pages(num_tokens) - len(match.pages)
        return not has_room(
            self._cache,
            self._allocator,
            num_pages=num_pages,
            num_windowed=self.num_windowed(request, is_here=is_here),
            keep=match.node,
            without=without,
        )

    def num_windowed(self, request: Request, *, is_here: bool) -> int:
        """Window pages that a request reserves; see ``lacks``."""
        window_pages = self._allocator.window_pages
        if window_pages is None:
            return 0
        return window_pages.needs(request, decodes=True) if is_here else window_pages.needs_to_decode(request)

    @property
    def room(self) -> tuple[int, ...]:
        """Pages that are free, that could be evicted, and that are cached; window pages that are free or unreserved."""
        room = (self._allocator.num_free, self._cache.num_evictable_pages, self._cache.num_pages)
        window_pages = self._allocator.window_pages
        return room if window_pages is None else (*room, window_pages.num_free, window_pages.num_unreserved)

    def begin_pass(self) -> None:
        """The calls of ``reserve`` that follow are for the whole queue, from its front."""
        self._num_claimed = 0

    def reserve(self, request: Request, *, spare_tokens: int, spare_windowed: int = 0) -> Reservation | TreeNode | None:
        """Reserve the pages that the prompt lacks, or change nothing.

        Args:
            spare_tokens: room that must remain: free, evictable, or in the prompt's last page.
            spare_windowed: window pages that must remain unreserved.
        Returns:
            The pending node of a prefix that is being received for another request; None if pages are short.
        """
        match = self.match(request)
        if match.pending is not None:
            return match.pending
        num_pages = self.num_pages(request)
        first = max(len(match.pages), self.kv_window.first_held(request.num_decodable))
        num_needed = num_pages - first
        self._cache.lock(match.node)
        room_in_last = num_pages * self.page_size - request.num_decodable
        may_have = (self.num_available - num_needed) * self.page_size + room_in_last >= spare_tokens
        may_have = may_have and self._reserve_windows(request, match, spare_windowed)
        pages = self._allocate(num_needed) if may_have else None
        if pages is None:
            if may_have and self._allocator.window_pages is not None:
                request.pages = match.pages
                self._allocator.window_pages.release(request)
                request.pages = []
            self._cache.unlock(match.node)
            return None
        reservation = Reservation(first, len(match.pages), pages, num_pages)
        self.by_key[request.key] = reservation
        request.node = match.node
        self._cache.count_use(match.node)
        request.is_wrapped = not self.kv_window.is_cached(request.num_decodable)
        request.pages = (pages[:1] * first if request.is_wrapped else match.pages) + pages
        if self._allocator.window_pages is not None:
            self._allocator.window_pages.take_grant(request)
        num_whole = request.num_decodable // self.page_size
        if self._cache.is_enabled and not request.is_wrapped and num_whole > len(match.pages):
            whole = packed_tokens(request, num_whole * self.page_size)
            if self._allocator.window_pages is not None:
                stored = self._cache.match_all(whole, request.salt)
                if stored.pending is not None or len(stored.pages) > len(match.pages):
                    return reservation  # the cache has these tokens already, but lacks window pages
            new = pages[: num_whole - len(match.pages)]
            reservation.pending = self._cache.insert_pending(whole, new, request.salt, priority=request.priority)
        return reservation

    def _reserve_windows(self, request: Request, match: Match, num_spare: int) -> bool:
        window_pages = self._allocator.window_pages
        return window_pages is None or window_pages.reserve_grant(
            request,
            match.pages,
            request.num_decodable,
            last_step=self._allocator.step_in_flight,
            num_spare=num_spare,
        )

    def _allocate(self, count: int) -> list[int] | None:
        """``count`` pages. None while pages evicted for them linger, since an outstanding step may read them."""
        allocator = self._allocator
        self._cache.evict(self._num_claimed + count - allocator.num_free - allocator.num_lingering)
        pages = allocator.alloc(count, Owner.GRANT)
        if pages is None:
            self._num_claimed += count
        return pages

    def receiver_of(self, node: TreeNode) -> RequestKey | None:
        """The request whose transfer fills this pending node."""
        return next((key for key, r in self.by_key.items() if r.pending is node.pending), None)

    def settle(self, request: Request) -> None:
        """Every page has arrived: whole pages join the cache, the rest becomes the request's own."""
        reservation = self.by_key.pop(request.key)
        own = reservation.pages
        if reservation.pending is not None:
            node = self._cache.make_ready(reservation.pending)
            self._cache.lock(node)
            assert request.node is not None
            self._cache.unlock(request.node)
            request.node = node
            own = own[request.num_decodable // self._cache.page_size - reservation.first :]
        self._allocator.move(own, Owner.GRANT, Owner.REQUEST)
        request.own = own
        request.num_computed = request.num_scheduled = request.num_decodable

    def withdraw(self, request: Request, arrived: Sequence[int] = ()) -> None:
        """The transfer will not complete. Its leading pages, ``arrived``, join the cache, or are freed without one.

        The receiver frees the other pages once no write can reach them.
        """
        reservation = self.by_key.pop(request.key)
        if self._allocator.window_pages is not None:
            self._allocator.window_pages.withdraw_grant(request, reservation.first + len(arrived))
        if reservation.pending is not None:
            num_kept = min(len(arrived), len(reservation.pending.pages))
            self._cache.drop_pending(reservation.pending, num_kept)
            arrived = arrived[num_kept:]
        self._allocator.free(arrived, Owner.GRANT)
        assert request.node is not None
        self._cache.unlock(request.node)
        request.node = None
        request.pages = []
        request.is_wrapped = False

    def check(self, receiving: Sequence[Request]) -> None:
        """Prove that every transfer in progress has all of its pages; raises ``InvariantError``."""
        keys = {request.key for request in receiving}
        invariant(self.by_key.keys() == keys, "a reservation belongs to no transfer, or a transfer has none")
        for request in receiving:
            reservation = self.by_key[request.key]
            is_whole = reservation.first + len(reservation.pages) == reservation.num_pages
            invariant(is_whole, f"{request.key} lacks pages of its prompt")
