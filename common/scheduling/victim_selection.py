"""Selection of the requests that must give up their pages so that another one fits. Pure."""

from collections.abc import Iterable, Sequence

from common.cache.page_allocator import PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.tree_node import TreeNode
from common.request import Request


def has_room(
    cache: RadixCache,
    allocator: PageAllocator,
    *,
    num_pages: int,
    num_windowed: int,
    keep: TreeNode,
    without: Sequence[Request] = (),
) -> bool:
    """Whether ``num_pages`` pages are free, linger or could be evicted.

    Args:
        num_windowed: window pages that must be unreserved.
        keep: the path of this node may not be evicted.
        without: requests whose pages count as free.
    """
    return _choose(cache, allocator, num_pages, num_windowed, keep, without)[1]


def victims_for(
    cache: RadixCache,
    allocator: PageAllocator,
    *,
    num_pages: int,
    num_windowed: int,
    keep: TreeNode,
    candidates: Iterable[Request],
) -> list[Request]:
    """The fewest leading ``candidates`` whose pages make room.

    Args:
        num_pages: pages that are needed beside those on the path of ``keep``, which may not be evicted.
        num_windowed: window pages that must be unreserved.
        candidates: requests in the order in which they are chosen.

    Returns:
        The chosen requests. None are chosen if there is room already, or if all candidates together do not make enough.
    """
    chosen, is_enough = _choose(cache, allocator, num_pages, num_windowed, keep, candidates)
    return chosen if is_enough else []


def _choose(
    cache: RadixCache,
    allocator: PageAllocator,
    num_pages: int,
    num_windowed: int,
    keep: TreeNode,
    candidates: Iterable[Request],
) -> tuple[list[Request], bool]:
    """Choose candidates until there is room. The allocator and the cache are unchanged afterwards."""
    cache.lock(keep)
    chosen: list[Request] = []
    num_own = 0
    left = iter(candidates)
    num_unreserved = num_windowed if allocator.window_pages is None else allocator.window_pages.num_unreserved

    def is_enough() -> bool:
        has_pages = allocator.num_for_steps + cache.num_evictable_pages + num_own >= num_pages
        return has_pages and num_unreserved >= num_windowed

    while not is_enough():
        victim = next(left, None)
        if victim is None:
            break
        chosen.append(victim)
        num_own += len(victim.own)
        num_unreserved += victim.window_reserved
        cache.unlock(victim.node)  # pages that several victims share become evictable only with the last one
    found_room = is_enough()
    for victim in chosen:
        cache.lock(victim.node)
    cache.unlock(keep)
    return chosen, found_room
