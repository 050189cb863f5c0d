"""Which waiting requests get pages for their prompts. Pure.

All or nothing: a request gets every page that its prompt still lacks, or none, so that every transfer under way can end
without further pages and no two wait for each other. A request whose prefix is just being received for another waits
until it is there, so that a prefix is shipped once; those behind it may pass. For a retracted request that a prefill
node computes again, "prompt" is all that it takes to go on: the tokens before the one sampled last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from common.pages import Owner, PageBooks
from common.radix import Match, Pending, RadixCache
from common.request import Request
from common.request_pages import packed_tokens
from common.room import has_room


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages given to one transfer.

    Attributes:
        first: index of the first prompt page that must be shipped; those before it are cached here.
        pages: destination of page ``first`` and on, owned as ``Owner.GRANT``.
        num_pages: pages of the whole prompt.
        pending: what became of the whole pages among them in the radix cache, until they have arrived.
    """

    first: int
    pages: tuple[int, ...]
    num_pages: int
    pending: Pending | None


class Refusal(Enum):
    """Why a request gets no pages now."""

    SHORT_OF_PAGES = auto()
    PREFIX_PENDING = auto()  # part of its prompt is just being received for another


class Admission:
    """Reserves pages for prompts that come from prefill nodes, and settles what becomes of them."""

    def __init__(self, cache: RadixCache, books: PageBooks) -> None:
        self._cache = cache
        self._books = books
        self.reservations: dict[tuple[str, int], Reservation] = {}

    @property
    def page_size(self) -> int:
        return self._cache.page_size

    @property
    def num_available(self) -> int:
        """Pages that are free or could be evicted."""
        return self._books.num_free + self._cache.num_evictable_pages

    def match(self, request: Request) -> Match:
        """What is cached of all that it takes to decode its next token."""
        return self._cache.match(packed_tokens(request, request.num_decodable), request.salt)

    def lacks(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> bool:
        """Whether there is no room for so many tokens, what is cached of the request's own included.

        Args:
            without: asked as if these requests held no pages.
        """
        match = self.match(request)
        num_pages = -(-num_tokens // self.page_size) - len(match.pages)
        return not has_room(self._cache, self._books, num_pages=num_pages, keep=match.node, without=without)

    def reserve(self, request: Request, *, spare_tokens: int) -> Reservation | Refusal:
        """Give the request its prompt's pages if ``spare_tokens`` remain: free, evictable, or in its last page.

        Returns:
            A ``Refusal``, and then nothing has changed, if pages are short or the prefix is on its way.
        """
        num_tokens = request.num_decodable
        match = self.match(request)
        if match.pending is not None:
            return Refusal.PREFIX_PENDING
        page_size = self._cache.page_size
        num_pages = -(-num_tokens // page_size)
        num_needed = num_pages - len(match.pages)
        self._cache.lock(match.node)
        left = self._books.num_free + self._cache.num_evictable_pages - num_needed
        room_in_last = num_pages * page_size - num_tokens
        pages = None
        if left >= 0 and left * page_size + room_in_last >= spare_tokens:
            self._cache.evict(num_needed - self._books.num_free)
            pages = self._books.alloc(num_needed, Owner.GRANT)
        if pages is None:
            self._cache.unlock(match.node)
            return Refusal.SHORT_OF_PAGES
        num_whole = num_tokens // page_size
        pending = None
        if self._cache.is_enabled and num_whole > len(match.pages):
            whole = packed_tokens(request, num_whole * page_size)
            pending = self._cache.insert_pending(whole, pages[: num_whole - len(match.pages)], request.salt)
        request.node = match.node
        if not request.output:
            request.num_cached = match.num_tokens
        request.pages = match.pages + pages
        reservation = Reservation(len(match.pages), tuple(pages), num_pages, pending)
        self.reservations[request.key] = reservation
        return reservation

    def pending_for(self, request: Request) -> tuple[str, int] | None:
        """Whose transfer brings the prefix that this request waits for."""
        pending = self.match(request).pending
        if pending is None:
            return None
        return next((key for key, r in self.reservations.items() if r.pending is pending.pending), None)

    def settle(self, request: Request) -> None:
        """Every page has arrived: cached pages join the cache, the rest becomes the request's own."""
        reservation = self.reservations.pop(request.key)
        own = list(reservation.pages)
        if reservation.pending is not None:
            node = self._cache.make_ready(reservation.pending)
            self._cache.lock(node)
            assert request.node is not None
            self._cache.unlock(request.node)
            request.node = node
            own = own[request.num_decodable // self._cache.page_size - reservation.first :]
        self._books.move(own, Owner.GRANT, Owner.REQUEST)
        request.own = own
        request.num_computed = request.num_decodable

    def withdraw(self, request: Request) -> None:
        """The transfer will not happen. Its pages are the receiver's to free once no write can reach them."""
        reservation = self.reservations.pop(request.key)
        if reservation.pending is not None:
            self._cache.drop_pending(reservation.pending)
        assert request.node is not None
        self._cache.unlock(request.node)
        request.node = None
        request.pages = []
