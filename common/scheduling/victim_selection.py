"""Selection of the requests that must give up their pages so that another one fits. Pure."""

from collections.abc import Iterable, Sequence

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache, TreeNode
from common.request import Request


def has_room(
    cache: RadixCache, allocator: PageAllocator, *, num_pages: int, keep: TreeNode, without: Sequence[Request] = ()
) -> bool:
    """Whether ``num_pages`` pages are free or could be evicted.

    Args:
        keep: the path of this node may not be evicted.
        without: requests whose pages count as free.
    """
    return _try(cache, allocator, num_pages, keep, without)[1]


def victims_for(
    cache: RadixCache, allocator: PageAllocator, *, num_pages: int, keep: TreeNode, candidates: Iterable[Request]
) -> list[Request]:
    """The fewest leading ``candidates`` whose pages make room.

    Args:
        num_pages: pages that are needed beside those on the path of ``keep``, which may not be evicted.
        candidates: requests in the order in which they are chosen.

    Returns:
        The chosen requests. None are chosen if there is room already, or if all candidates together do not make enough.
    """
    chosen, is_enough = _try(cache, allocator, num_pages, keep, candidates)
    return chosen if is_enough else []


def _try(
    cache: RadixCache, allocator: PageAllocator, num_pages: int, keep: TreeNode, candidates: Iterable[Request]
) -> tuple[list[Request], bool]:
    """Choose candidates until there is room. The allocator and the cache are unchanged afterwards."""
    cache.lock(keep)
    chosen: list[Request] = []
    num_own = 0
    left = iter(candidates)
    while allocator.num_free + cache.num_evictable_pages + num_own < num_pages:
        victim = next(left, None)
        if victim is None:
            break
        chosen.append(victim)
        num_own += len(victim.own)
        cache.unlock(victim.node)  # pages that several victims share become evictable only with the last one
    is_enough = allocator.num_free + cache.num_evictable_pages + num_own >= num_pages
    for victim in chosen:
        cache.lock(victim.node)
    cache.unlock(keep)
    return chosen, is_enough
