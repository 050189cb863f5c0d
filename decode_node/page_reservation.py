"""Which waiting requests get pages for their prompts. Pure.

A request gets every page that its prompt still lacks, or none; only one at a time, the first in line, may begin with
part of them and get the others as pages come free. A request whose prefix is just being received for another waits
until it is there, so that a prefix is shipped once; those behind it may pass. For a retracted request that a prefill
node computes again, "prompt" is all that it takes to go on: the tokens before the one sampled last.

Why no two wait for each other: the one that holds part of its pages waits for requests of this node alone, those whose
pages are here and can be taken (``yielding``), never for another transfer, which may be waiting for the prefill node's
memory that this one's prompt takes up there. So it begins only if what it lacks is free, evictable, or held by such
requests, beside room for what transfers under way will say; and whoever is let in after it must leave that so. Nothing
else makes it untrue: pages pass between those three, and what arrives becomes takable. And requests of this node never
wait for other nodes while somebody holds part of its pages: where they cannot grow they lose theirs, even the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.prefix_watch import Watch
from common.cache.radix_cache import TOKEN_BYTES, Match, Pending, RadixCache, TreeNode
from common.cache.request_kv import packed_tokens
from common.request import Request
from common.scheduling.victim_selection import has_room


@dataclass(slots=True)
class Reservation:
    """Pages given to one transfer.

    Attributes:
        first: index of the first prompt page that must be shipped; those before it are cached here.
        pages: destination of page ``first`` and on, as far as there are any yet, owned as ``Owner.GRANT``.
        num_pages: pages of the whole prompt.
        pending: what became of the whole pages among them in the radix cache, until they have arrived.
    """

    first: int
    pages: list[int]
    num_pages: int
    pending: Pending | None = None

    @property
    def num_lacking(self) -> int:
        """Pages that are still to be given to it."""
        return self.num_pages - self.first - len(self.pages)


class AllocationFailure(Enum):
    """Why a request gets no pages now."""

    SHORT_OF_PAGES = auto()
    PREFIX_PENDING = auto()  # part of its prompt is just being received for another


@dataclass(frozen=True, slots=True)
class Contention:
    """Who holds pages beside a request.

    Attributes:
        yielding: those from whom they could be taken.
        num_grown: pages that transfers under way, the request among them, may need beyond their prompts.
    """

    yielding: Sequence[Request] = ()
    num_grown: int = 0


class Admission:
    """Reserves pages for prompts that come from prefill nodes, and settles what becomes of them."""

    def __init__(self, cache: RadixCache, books: PageAllocator) -> None:
        self._cache = cache
        self._books = books
        self.reservations: dict[tuple[str, int], Reservation] = {}
        self.partial: Request | None = None  # it has part of its pages

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
        """Whether there is no room for so many tokens, what is cached of the request's own and given to it included.

        Args:
            without: asked as if these requests held no pages.
        """
        match = self.match(request)
        num_had = len(match.pages)
        if request is self.partial:
            num_had += len(self.reservations[request.key].pages)
        num_pages = -(-num_tokens // self.page_size) - num_had
        return not has_room(self._cache, self._books, num_pages=num_pages, keep=match.node, without=without)

    def must_wait(self, request: Request, others: Contention) -> bool:
        """Whether its pages, given now, would be missed by the one that has part of its own, whoever gave way."""
        if self.partial is None:
            return False
        match = self.match(request)
        self._cache.lock(match.node)
        is_missed = not self._leaves_room(self.num_pages(request) - len(match.pages), others)
        self._cache.unlock(match.node)
        return is_missed

    def num_pages(self, request: Request) -> int:
        """Of all that it takes to decode its next token."""
        return -(-request.num_decodable // self.page_size)

    def num_pending(self, request: Request) -> int:
        """Those of them that are being received for another."""
        return self._cache.num_pending(packed_tokens(request, request.num_decodable), request.salt)

    def _leaves_room(self, num_pages: int, others: Contention) -> bool:
        """Whether so many can be given away, and the one that has part of its pages can still get the rest."""
        if self.partial is None:
            return True
        num_pages += self.reservations[self.partial.key].num_lacking
        assert self.partial.node is not None
        return self._would_have(num_pages, self.partial.node, others)

    def _would_have(self, num_pages: int, keep: TreeNode, others: Contention) -> bool:
        """Whether there would be so many pages, and some to grow, if all who can did give way."""
        num_pages += others.num_grown
        return has_room(self._cache, self._books, num_pages=num_pages, keep=keep, without=others.yielding)

    def _has_spare(self, request: Request, num_pages: int, spare_tokens: int) -> bool:
        """Whether with its last ``num_pages`` so many tokens remain: free, evictable, or in its last page."""
        room_in_last = self.num_pages(request) * self.page_size - request.num_decodable
        return (self.num_available - num_pages) * self.page_size + room_in_last >= spare_tokens

    def reserve(
        self, request: Request, *, spare_tokens: int, others: Contention = Contention()
    ) -> Reservation | AllocationFailure:
        """Give the request its prompt's pages if ``spare_tokens`` remain: free, evictable, or in its last page.

        Returns:
            A ``AllocationFailure``, and then nothing has changed, if pages are short or the prefix is on its way.
        """
        match = self.match(request)
        if match.pending is not None:
            return AllocationFailure.PREFIX_PENDING
        num_needed = self.num_pages(request) - len(match.pages)
        self._cache.lock(match.node)
        may_have = self._has_spare(request, num_needed, spare_tokens) and self._leaves_room(num_needed, others)
        pages = self._take(num_needed) if may_have else None
        if pages is None:
            self._cache.unlock(match.node)
            return AllocationFailure.SHORT_OF_PAGES
        return self._begin(request, match, pages)

    def reserve_part(self, request: Request, *, num_kept: int, others: Contention) -> Reservation | None:
        """Give the request the first of its prompt's pages, all but one at most, so that ``num_kept`` pages remain.

        Nobody else may have part of its pages. None, and then nothing has changed, if there is no page to give, or if
        what it lacks might have to come from other transfers.
        """
        assert self.partial is None
        match = self.match(request)
        if match.pending is not None:
            return None
        num_needed = self.num_pages(request) - len(match.pages)
        self._cache.lock(match.node)
        may_begin = self._would_have(num_needed, match.node, others)
        pages = self._take_some(min(num_needed - 1, self.num_available - num_kept)) if may_begin else []
        if not pages:
            self._cache.unlock(match.node)
            return None
        self.partial = request
        return self._begin(request, match, pages)

    def _take(self, count: int) -> list[int] | None:
        """So many pages, or None: a step under way keeps what is evicted amid it from being given out."""
        self._cache.evict(count - self._books.num_free)
        return self._books.alloc(count, Owner.GRANT)

    def _take_some(self, count: int) -> list[int]:
        """As many of so many pages as can be given out now."""
        self._cache.evict(count - self._books.num_free)
        return self._books.alloc(max(0, min(count, self._books.num_free)), Owner.GRANT) or []

    def _begin(self, request: Request, match: Match, pages: list[int]) -> Reservation:
        reservation = Reservation(len(match.pages), [], self.num_pages(request))
        self.reservations[request.key] = reservation
        request.node = match.node
        if not request.output:
            request.num_cached = match.num_tokens
        request.pages = match.pages
        self._add(request, reservation, pages)
        return reservation

    def extend(self, request: Request, *, num_kept: int) -> list[int]:
        """More pages for the one that has part of its own, so that ``num_kept`` remain; but for the last of them, which
        it gets from ``complete``. Returns those pages."""
        assert request is self.partial
        reservation = self.reservations[request.key]
        pages = self._take_some(min(reservation.num_lacking - 1, self.num_available - num_kept))
        self._add(request, reservation, pages)
        return pages

    def complete(self, request: Request, *, spare_tokens: int) -> list[int]:
        """All pages that it lacks for the one that has part of its own, if ``spare_tokens`` remain, else none."""
        assert request is self.partial
        reservation = self.reservations[request.key]
        may_have = self._has_spare(request, reservation.num_lacking, spare_tokens)
        pages = self._take(reservation.num_lacking) if may_have else None
        if pages is None:
            return []
        self.partial = None
        self._add(request, reservation, pages)
        return pages

    def _add(self, request: Request, reservation: Reservation, pages: list[int]) -> None:
        """The next pages of its prompt; whole ones are pending in the cache from now on."""
        num_before = reservation.first + len(reservation.pages)
        num_whole = min(request.num_decodable // self.page_size, num_before + len(pages))
        reservation.pages += pages
        request.pages += pages
        if self._cache.is_enabled and num_whole > num_before:
            whole = packed_tokens(request, num_whole * self.page_size)
            new = pages[: num_whole - num_before]
            if reservation.pending is None:
                reservation.pending = self._cache.insert_pending(whole, new, request.salt)
            else:
                self._cache.extend_pending(reservation.pending, whole, new)

    def awaited(self) -> dict[Watch, None]:
        """Watches of those who may be waiting for a prefix that is being received for another."""
        watches: dict[Watch, None] = {}
        for reservation in self.reservations.values():
            if reservation.pending is not None:
                first = reservation.pending.nodes[0]
                assert first.parent is not None
                for page in (first.key[: self.page_size * TOKEN_BYTES], b""):  # b"": all of what is watched is cached
                    watches.update(first.parent.watchers.get(page, {}))
        return watches

    def pending_for(self, request: Request) -> tuple[str, int] | None:
        """Whose transfer brings the prefix that this request waits for."""
        pending = self.match(request).pending
        if pending is None:
            return None
        return next((key for key, r in self.reservations.items() if r.pending is pending.pending), None)

    def settle(self, request: Request) -> None:
        """Every page has arrived: cached pages join the cache, the rest becomes the request's own."""
        reservation = self.reservations.pop(request.key)
        own = reservation.pages
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
        if request is self.partial:
            self.partial = None
        if reservation.pending is not None:
            self._cache.drop_pending(reservation.pending)
        assert request.node is not None
        self._cache.unlock(request.node)
        request.node = None
        request.pages = []

    def check(self, yielding: Sequence[Request]) -> None:
        """One at most lacks pages, and could have them if all of ``yielding`` gave way."""
        lacking = [key for key, reservation in self.reservations.items() if reservation.num_lacking]
        assert lacking == ([] if self.partial is None else [self.partial.key]), f"{lacking} lack pages"
        assert self._leaves_room(-self._books.num_lingering, Contention(yielding)), (
            "what it lacks would have to come from transfers"
        )
