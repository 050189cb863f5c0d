"""Moves a request's computed pages to the radix cache, and releases all its pages.

A request's page table holds pages of the radix cache, which the request's lock protects, and pages of its own: pages
that are not full yet, and duplicates of pages that the cache already had. A request that has wrapped (see
``common/cache/kv_window.py``) is no prefix any more, and adds nothing to the cache.
"""

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.tree_node import TOKEN_BYTES, Inserted, TokenKey, pack
from common.cache.window_pages import WindowPages
from common.request import Request


def packed_tokens(request: Request, num_tokens: int) -> TokenKey:
    """Return the first tokens of a request in the cache's packed form; each token is packed only once."""
    num_packed = len(request.packed) // TOKEN_BYTES
    if num_packed < num_tokens:
        request.packed += pack(request.tokens(num_packed, num_tokens))
    return request.packed[: num_tokens * TOKEN_BYTES]


def cache_computed(cache: RadixCache, request: Request) -> None:
    """Insert the full pages computed so far into the cache and lock them.

    Called whenever ``num_computed`` has grown. If another request has inserted part of the tokens since, the pages
    stay the request's own until ``release``: otherwise the request would lock the other request's prefix beside its
    own duplicate, and the prefix could not be evicted when the other request ends.
    """
    num_pages = request.num_computed // cache.page_size
    if num_pages <= len(request.pages) - len(request.own) or not adds_to_cache(cache, request):
        return
    inserted = _insert(cache, request, packed_tokens(request, num_pages * cache.page_size))
    if inserted.num_adopted:
        cache.lock(inserted.node)  # before the unlock, so that common ancestors stay locked
        cache.unlock(request.node)
        request.node = inserted.node


def adds_to_cache(cache: RadixCache, request: Request) -> bool:
    """Whether the request's next whole page will enter the cache: the cache does not have its tokens yet."""
    if request.is_wrapped or not cache.is_enabled:
        return False
    num_tokens = (len(request.pages) - len(request.own) + 1) * cache.page_size
    return request.num_tokens >= num_tokens and not cache.has_all(packed_tokens(request, num_tokens), request.salt)


def release(cache: RadixCache, allocator: PageAllocator, request: Request) -> None:
    """Release all pages of a request that is finished, aborted or retracted. Idempotent.

    Its full computed pages are inserted into the cache first, as far as they are its own. The request keeps its tokens.
    """
    window_pages = allocator.window_pages
    if window_pages is not None:
        window_pages.release(request)
    num_full = request.num_computed // cache.page_size
    if num_full > len(request.pages) - len(request.own) and not request.is_wrapped:
        num_kept = _insert(cache, request, packed_tokens(request, num_full * cache.page_size)).first_adopted
        if window_pages is not None and num_kept:
            _complete(cache, window_pages, request, num_kept)
    allocator.free(request.own, Owner.REQUEST)
    cache.unlock(request.node)
    request.pages = []
    request.own = []
    request.is_wrapped = False
    request.node = None
    request.num_computed = request.num_scheduled = request.num_sampling = 0


def _complete(cache: RadixCache, window_pages: WindowPages, request: Request, num_pages: int) -> None:
    """Give the window pages of the request's first pages to the cache where it has these tokens without them."""
    key = packed_tokens(request, num_pages * cache.page_size)
    for ours, cached in zip(request.pages, cache.match_all(key, request.salt).pages, strict=False):
        if ours != cached:
            window_pages.give(ours, cached)


def _insert(cache: RadixCache, request: Request, key: TokenKey) -> Inserted:
    """Insert the pages of the first tokens of a request; adopted pages leave ``request.own``."""
    pages = request.pages[: len(key) // (cache.page_size * TOKEN_BYTES)]
    inserted = cache.insert(key, pages, request.salt, priority=request.priority)
    adopted = pages[inserted.first_adopted :]
    if adopted:
        first = inserted.first_adopted - (len(request.pages) - len(request.own))
        end = first + len(adopted)
        assert request.own[first:end] == adopted, "a request's own pages are not in the order of its page table"
        del request.own[first:end]
    return inserted
