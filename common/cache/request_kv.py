"""What happens to a request's pages once their KV is computed, and the one way in which it lets go of them.

A request's page table is made of pages that the radix cache owns (found at admission, or adopted once computed; the
request's lock keeps them) and pages of its own: those not yet whole, and duplicates of what the cache already had.
"""

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import TOKEN_BYTES, Inserted, RadixCache, TokenKey, TreeNode, pack
from common.request import Request


def packed_tokens(request: Request, num_tokens: int) -> TokenKey:
    """The first tokens of a request as the radix cache wants them; each is packed once in the request's life."""
    num_packed = len(request.packed) // TOKEN_BYTES
    if num_packed < num_tokens:
        request.packed += pack(request.tokens(num_packed, num_tokens))
    return request.packed[: num_tokens * TOKEN_BYTES]


def cache_computed(cache: RadixCache, request: Request) -> int:
    """Offer the whole pages computed so far to the cache, and lock what it took. Returns how many pages it took.

    Call it after a chunk, or whenever ``num_computed`` has grown. If the cache meanwhile got part of them from somebody
    else, they stay the request's own until ``release``: to use what lies behind another's prefix it would have to lock
    that prefix beside its own duplicate, and the other's pages would not come back when the other ends.
    """
    num_pages = request.num_computed // cache.page_size
    if num_pages <= len(request.pages) - len(request.own):
        return 0  # all of these were cached before
    key = packed_tokens(request, num_pages * cache.page_size)
    num_locked = 0 if request.node is None else sum(len(node.pages) for node in request.node.path())
    if len(cache.match(key, request.salt).pages) > num_locked:
        return 0
    inserted = _offer(cache, request, num_pages)
    if inserted.num_adopted:
        move_lock(cache, request, inserted.node)
    return inserted.num_adopted


def move_lock(cache: RadixCache, request: Request, node: TreeNode | None) -> None:
    """Lock another node for this request instead of the one it has."""
    cache.lock(node)  # first, so that what both have in common is locked throughout
    cache.unlock(request.node)
    request.node = node


def release(cache: RadixCache, books: PageAllocator, request: Request, *, keep: bool) -> None:
    """Every page of the request goes its way, whatever the reason: finished, aborted, retracted, paused. Idempotent.

    With ``keep`` the whole computed pages are offered to the cache first, evictable from now on. The request has no
    pages afterwards and nothing computed; its tokens stay.
    """
    if keep:
        _offer(cache, request, request.num_computed // cache.page_size)
    books.free(request.own, Owner.REQUEST)
    cache.unlock(request.node)
    request.pages = []
    request.own = []
    request.node = None
    request.num_computed = request.num_scheduled = request.num_sampling = 0


def _offer(cache: RadixCache, request: Request, num_pages: int) -> Inserted:
    """Insert the first pages of a request; what the cache takes is no longer the request's own."""
    pages = request.pages[:num_pages]
    key = packed_tokens(request, num_pages * cache.page_size)
    inserted = cache.insert(key, pages, request.salt, priority=request.priority)
    adopted = pages[inserted.first_adopted :]
    if adopted:
        first = request.own.index(adopted[0])
        end = first + len(adopted)
        assert request.own[first:end] == adopted, "a request's own pages are not in the order of its page table"
        del request.own[first:end]
    return inserted
