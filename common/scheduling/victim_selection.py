"""Whose pages must go so that a request fits: just enough of them, or none at all. Pure."""

from collections.abc import Iterable, Sequence

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache, TreeNode
from common.request import Request


def has_room(
    cache: RadixCache, books: PageAllocator, *, num_pages: int, keep: TreeNode, without: Sequence[Request] = ()
) -> bool:
    """Whether so many pages are free or could be evicted.

    Args:
        keep: nobody may evict what is on the path of this node.
        without: asked as if these requests held no pages.
    """
    return _try(cache, books, num_pages, keep, without)[1]


def victims_for(
    cache: RadixCache, books: PageAllocator, *, num_pages: int, keep: TreeNode, candidates: Iterable[Request]
) -> list[Request]:
    """The first of ``candidates`` that have to give way.

    Args:
        num_pages: that are needed beside those on the path of ``keep``, which nobody may evict meanwhile.
        candidates: who may be asked, first to go first.
    Returns:
        Empty if there is room already, or if there would not be enough even without all of them: then nobody is to be
        touched for it.
    """
    chosen, is_enough = _try(cache, books, num_pages, keep, candidates)
    return chosen if is_enough else []


def _try(
    cache: RadixCache, books: PageAllocator, num_pages: int, keep: TreeNode, candidates: Iterable[Request]
) -> tuple[list[Request], bool]:
    """Take one after the other until there is room. Books and cache are as before afterwards."""
    cache.lock(keep)
    chosen: list[Request] = []
    num_own = 0
    left = iter(candidates)
    while books.num_free + cache.num_evictable_pages + num_own < num_pages:
        victim = next(left, None)
        if victim is None:
            break
        chosen.append(victim)
        num_own += len(victim.own)
        cache.unlock(victim.node)  # what several of them share comes back only with the last
    is_enough = books.num_free + cache.num_evictable_pages + num_own >= num_pages
    for victim in chosen:
        cache.lock(victim.node)
    cache.unlock(keep)
    return chosen, is_enough
