"""Which waiting requests get pages for their prompts. Pure.

In order of arrival, all or nothing: a request gets every page that its prompt still lacks, or none, so that every
transfer under way can end without further pages and no two wait for each other. Retracted requests come first. A
request whose prefix is just being received for another waits until it is there, so that a prefix is shipped once; those
behind it may pass.
"""

from dataclasses import dataclass
from enum import Enum, auto

from common.pages import Owner, PageBooks
from common.radix import Pending, RadixCache
from common.request import Request


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

    def reserve(self, request: Request, *, spare_tokens: int) -> Reservation | Refusal:
        """Give the request its prompt's pages if ``spare_tokens`` remain: free, evictable, or in its last page.

        Returns:
            A ``Refusal``, and then nothing has changed, if pages are short or the prefix is on its way.
        """
        match = self._cache.match(request.prompt, request.salt)
        if match.pending is not None:
            return Refusal.PREFIX_PENDING
        page_size = self._cache.page_size
        num_pages = -(-len(request.prompt) // page_size)
        num_needed = num_pages - len(match.pages)
        self._cache.lock(match.node)
        left = self._books.num_free + self._cache.num_evictable_pages - num_needed
        room_in_last = num_pages * page_size - len(request.prompt)
        pages = None
        if left >= 0 and left * page_size + room_in_last >= spare_tokens:
            self._cache.evict(num_needed - self._books.num_free)
            pages = self._books.alloc(num_needed, Owner.GRANT)
        if pages is None:
            self._cache.unlock(match.node)
            return Refusal.SHORT_OF_PAGES
        num_whole = len(request.prompt) // page_size
        pending = None
        if self._cache.is_enabled and num_whole > len(match.pages):
            whole = request.prompt[: num_whole * page_size]
            pending = self._cache.insert_pending(whole, pages[: num_whole - len(match.pages)], request.salt)
        request.node = match.node
        request.num_cached = match.num_tokens
        request.pages = match.pages + pages
        reservation = Reservation(len(match.pages), tuple(pages), num_pages, pending)
        self.reservations[request.key] = reservation
        return reservation

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
            own = own[len(request.prompt) // self._cache.page_size - reservation.first :]
        self._books.move(own, Owner.GRANT, Owner.REQUEST)
        request.own = own
        request.num_computed = len(request.prompt)

    def withdraw(self, request: Request) -> None:
        """The transfer will not happen. Its pages are the receiver's to free once no write can reach them."""
        reservation = self.reservations.pop(request.key)
        if reservation.pending is not None:
            self._cache.drop_pending(reservation.pending)
        assert request.node is not None
        self._cache.unlock(request.node)
        request.node = None
        request.pages = []
