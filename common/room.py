"""Whose pages must go so that a request fits: just enough of them, or none at all. Pure."""

from collections.abc import Iterable

from common.pages import PageBooks
from common.radix import Node, RadixCache
from common.request import Request


def victims_for(
    cache: RadixCache, books: PageBooks, *, num_pages: int, keep: Node, candidates: Iterable[Request]
) -> list[Request]:
    """The first of ``candidates`` that have to give way.

    Args:
        num_pages: that are needed beside those on the path of ``keep``, which nobody may evict meanwhile.
        candidates: who may be asked, first to go first.
    Returns:
        Empty if there is room already, or if there would not be enough even without all of them: then nobody is to be
        touched for it.
    """
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
        cache.unlock(victim.node)  # tried out: what several of them share comes back only with the last
    is_enough = books.num_free + cache.num_evictable_pages + num_own >= num_pages
    for victim in chosen:
        cache.lock(victim.node)
    cache.unlock(keep)
    return chosen if is_enough else []
