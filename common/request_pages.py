"""What happens to a request's pages once their KV is computed, and the one way in which it lets go of them.

A request's page table is made of pages that the radix cache owns (found at admission, or adopted once computed; the
request's lock keeps them) and pages of its own: those not yet whole, and duplicates of what the cache already had.
"""

from collections.abc import Sequence

from common.pages import Owner, PageBooks
from common.radix import Node, RadixCache
from common.request import Request


def cache_computed(cache: RadixCache, books: PageBooks, request: Request) -> int:
    """Offer the whole pages computed so far to the cache, and lock what it took. Returns how many pages it took.

    Call it after a chunk, or whenever ``num_computed`` has grown. What the cache had from others stays a duplicate of
    the request's own, and if that is all, the lock stays where it is.
    """
    num_pages = request.num_computed // cache.page_size
    if num_pages <= len(request.pages) - len(request.own):
        return 0  # all of these were cached before
    pages = request.pages[:num_pages]
    inserted = cache.insert(request.tokens(0, num_pages * cache.page_size), pages, request.salt)
    if inserted.num_adopted == 0:
        return 0
    _disown(request, pages[inserted.first_adopted :])
    move_lock(cache, request, inserted.node)
    return inserted.num_adopted


def move_lock(cache: RadixCache, request: Request, node: Node | None) -> None:
    """Lock another node for this request instead of the one it has."""
    cache.lock(node)  # first, so that what both have in common is locked throughout
    cache.unlock(request.node)
    request.node = node


def release(cache: RadixCache, books: PageBooks, request: Request, *, keep: bool) -> None:
    """Every page of the request goes its way, whatever the reason: finished, aborted, retracted, paused. Idempotent.

    With ``keep`` the whole computed pages are offered to the cache first, evictable from now on. The request has no
    pages afterwards and nothing computed; its tokens stay.
    """
    if keep:
        cache_computed(cache, books, request)
    books.free(request.own, Owner.REQUEST)
    cache.unlock(request.node)
    request.pages = []
    request.own = []
    request.node = None
    request.num_computed = 0


def _disown(request: Request, adopted: Sequence[int]) -> None:
    """The cache has taken these: a run of the request's own pages, which are in the order of its page table."""
    first = request.own.index(adopted[0])
    end = first + len(adopted)
    assert request.own[first:end] == list(adopted), "a request's own pages are not in the order of its page table"
    del request.own[first:end]
