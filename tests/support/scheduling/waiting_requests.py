"""Waiting requests, and caches that hold some of their prefixes, for tests of orderings."""

from typing import Any

from hypothesis import strategies as st

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.waiting_queue import WaitingQueue

PAGE_SIZE = 4
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def request(*prompt: int, rid: str = "r", salt: str = "", max_new: int = 16, **more: Any) -> Request:
    return Request(rid, 0, prompt, SamplingParams(max_new_tokens=max_new), salt=salt, **more)


def cache_with(*tokens: int) -> RadixCache:
    cache = RadixCache(PageAllocator(1000), PAGE_SIZE)
    insert(cache, *tokens)
    return cache


def insert(cache: RadixCache, *tokens: int, salt: str = "") -> None:
    pages = cache.allocator.alloc(len(tokens) // PAGE_SIZE, Owner.REQUEST)
    assert pages
    first = cache.insert(tokens, pages, salt).first_adopted
    cache.allocator.free(pages[:first], Owner.REQUEST)


def rids(queue: WaitingQueue, now: float = 0.0) -> list[str]:
    """The ids of waiting requests, in the order of service."""
    return [each.rid for each in queue._order.sort(list(queue.values()), now)]
