"""The prefix cache: whole pages, split nodes, locks, eviction, pending pages, salts, watches."""

import numpy as np
import pytest

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.cache.tree_node import Pending, pack


def cache_of(num_pages: int, page_size: int = 4) -> tuple[RadixCache, PageAllocator]:
    allocator = PageAllocator(num_pages)
    return RadixCache(allocator, page_size), allocator


def take(allocator: PageAllocator, count: int, owner: Owner = Owner.REQUEST) -> list[int]:
    pages = allocator.alloc(count, owner)
    assert pages is not None
    return pages


def fill(cache: RadixCache, allocator: PageAllocator, tokens: list[int], salt: str = "") -> list[int]:
    """Insert tokens with new pages, free the pages that the tree did not adopt, and return all pages."""
    pages = take(allocator, len(tokens) // cache.page_size)
    first = cache.insert(tokens, pages, salt).first_adopted
    allocator.free(pages[:first], Owner.REQUEST)
    cache.check()
    allocator.check()
    return pages


A = [1, 1, 1, 1]
B = [2, 2, 2, 2]
C = [3, 3, 3, 3]
D = [4, 4, 4, 4]


def test_tokens_are_packed_as_little_endian_int32_once() -> None:
    key = pack((1, 258, 2**31 - 1))
    assert key == b"\x01\x00\x00\x00\x02\x01\x00\x00\xff\xff\xff\x7f"
    assert pack(key) is key
    tokens = np.random.default_rng(0).integers(0, 150_000, 100)
    assert pack(tokens.tolist()) == tokens.astype("<i4").tobytes()


def test_only_whole_pages_match() -> None:
    cache, allocator = cache_of(8)
    pages = fill(cache, allocator, A + B)
    assert cache.match([*A, *B, 9, 9]).pages == pages
    assert cache.match([*A, *B[:3]]).pages == pages[:1]
    assert cache.match(A[:3]).num_tokens == 0
    assert cache.match([]).pages == []
    cache.check()


def test_a_match_accepts_packed_tokens() -> None:
    cache, allocator = cache_of(8)
    pages = fill(cache, allocator, A + B)
    assert cache.match(pack([*A, *B, 7])).pages == pages


def test_a_match_splits_a_node_at_the_last_equal_page() -> None:
    cache, allocator = cache_of(8)
    pages = fill(cache, allocator, A + B + C)
    match = cache.match([*A, *B, *C[:2], 9, 9])  # two equal tokens of the third page do not count
    assert (match.pages, match.num_tokens) == (pages[:2], 8)
    assert [len(node.pages) for node in cache.nodes()] == [2, 1]
    cache.check()


def test_an_insert_adopts_new_pages_and_leaves_duplicates_to_the_caller() -> None:
    cache, allocator = cache_of(8)
    fill(cache, allocator, A + B)
    pages = take(allocator, 3)
    inserted = cache.insert(A + C + D, pages)
    assert (inserted.first_adopted, inserted.num_adopted) == (1, 2)
    assert inserted.node.pages == pages[1:]
    assert (allocator.count(Owner.RADIX), allocator.count(Owner.REQUEST)) == (4, 1)
    allocator.free(pages[:1], Owner.REQUEST)
    again = cache.insert(A + C + D, take(allocator, 3))
    assert (again.first_adopted, again.num_adopted) == (3, 0)
    assert again.node is inserted.node
    cache.check()


def test_an_insert_of_part_of_a_page_fails_an_assertion() -> None:
    cache, allocator = cache_of(8)
    with pytest.raises(AssertionError, match="whole pages"):
        cache.insert([1, 2, 3], take(allocator, 1))


def test_locks_survive_a_split_of_their_node() -> None:
    cache, allocator = cache_of(8)
    fill(cache, allocator, A + B + C)
    held = cache.match(A + B + C).node
    cache.lock(held)
    fill(cache, allocator, A + B + D)  # splits the node after two pages
    assert (cache.num_pages, cache.num_evictable_pages) == (4, 1)
    assert cache.evict(8) == 1
    assert cache.match(A + B + C).node is held
    cache.unlock(held)
    assert cache.num_evictable_pages == 3
    cache.check()
    assert cache.clear() == 3


def test_two_locks_need_two_unlocks_and_no_more() -> None:
    cache, allocator = cache_of(8)
    fill(cache, allocator, A + B)
    node = cache.match(A + B).node
    cache.lock(node)
    cache.lock(node)
    cache.unlock(node)
    assert cache.evict(8) == 0
    cache.unlock(node)
    with pytest.raises(AssertionError, match="a node without a lock is unlocked"):
        cache.unlock(node)


def test_eviction_starts_with_the_least_recently_used_leaf_and_stops_at_the_count() -> None:
    cache, allocator = cache_of(16)
    old = fill(cache, allocator, A + B + C)
    fill(cache, allocator, B + C + D)
    young = fill(cache, allocator, C + D + A)
    cache.match(A + B + C)  # used again, so that B C D is the least recently used
    assert cache.evict(4) == 4
    assert cache.match(B + C + D).num_tokens == 0
    assert cache.match(C + D + A).pages == young[:2]  # its last page was evicted
    assert cache.match(A + B + C).pages == old
    cache.check()


def test_a_parent_is_evictable_after_its_last_child() -> None:
    cache, allocator = cache_of(16)
    fill(cache, allocator, A + B)
    fill(cache, allocator, A + C)
    fill(cache, allocator, A + D)
    assert cache.evict(3) == 3
    assert [node.key for node in cache.nodes()] == [pack(A)]
    assert cache.evict(1) == 1
    assert allocator.num_free == 16
    cache.check()


def test_salts_share_nothing_and_their_roots_vanish_when_empty() -> None:
    cache, allocator = cache_of(16)
    fill(cache, allocator, A + B, "one")
    theirs = fill(cache, allocator, A + B, "two")
    assert cache.match(A + B).pages == []
    assert cache.match(A + B, "two").pages == theirs
    assert cache.evict(2) == 2
    assert cache.match(A + B, "one").pages == []
    cache.match(A, "three")
    assert list(cache._roots) == ["two"]
    cache.clear()
    assert not cache._roots


def test_a_lock_on_an_empty_root_has_no_effect() -> None:
    cache, allocator = cache_of(4)
    root = cache.match(A, "new").node
    cache.lock(root)
    fill(cache, allocator, A, "new")
    cache.unlock(root)
    assert cache.clear() == 1
    cache.check()


def test_a_disabled_cache_keeps_nothing() -> None:
    allocator = PageAllocator(4)
    cache = RadixCache(allocator, 4, is_enabled=False)
    inserted = cache.insert(A + B, take(allocator, 2))
    assert (inserted.first_adopted, inserted.num_adopted) == (2, 0)
    assert cache.match(A + B).num_tokens == 0
    assert allocator.count(Owner.REQUEST) == 2
    cache.check()


@pytest.mark.slow
def test_a_deep_tree_needs_no_recursion() -> None:
    cache, allocator = cache_of(3000, page_size=1)
    pages: list[int] = []
    for depth in range(1, 3001):
        pages += take(allocator, 1)
        cache.insert(list(range(depth)), pages)
    node = cache.match(list(range(3000))).node
    assert len(node.path()) == 3000
    cache.lock(node)
    cache.unlock(node)
    cache.check()
    assert cache.clear() == 3000
    cache.check()


def pending_over(cache: RadixCache, allocator: PageAllocator, tokens: list[int], count: int) -> Pending:
    return cache.insert_pending(tokens, take(allocator, count, Owner.GRANT))


def test_pending_pages_are_found_but_not_used_or_evicted() -> None:
    cache, allocator = cache_of(8)
    pages = fill(cache, allocator, A)
    pending = pending_over(cache, allocator, A + B + C, 2)
    match = cache.match(A + B + C)
    assert (match.pages, match.pending) == (pages, pending.node)
    assert (cache.num_pages, cache.num_evictable_pages) == (1, 0)  # the prefix of the transfer is locked
    assert cache.evict(8) == 0
    with pytest.raises(AssertionError, match="pending node cannot be used"):
        cache.lock(pending.node)
    cache.check()


def test_make_ready_moves_pages_to_the_tree() -> None:
    cache, allocator = cache_of(8)
    first = fill(cache, allocator, A)
    pending = pending_over(cache, allocator, A + B + C, 2)
    node = cache.make_ready(pending)
    assert cache.match(A + B + C).pages == first + node.pages
    assert (cache.num_pages, cache.num_evictable_pages, allocator.count(Owner.GRANT)) == (3, 3, 0)
    cache.check()
    with pytest.raises(AssertionError, match="already completed"):
        cache.make_ready(pending)


def test_dropped_pages_return_to_the_caller() -> None:
    cache, allocator = cache_of(8)
    pending = pending_over(cache, allocator, B + C, 2)
    cut = cache.match(B + D)
    assert cut.pending is not None
    assert len(pending.nodes) == 2
    assert cache.drop_pending(pending) == [0, 1]
    assert allocator.count(Owner.GRANT) == 2
    assert not cache._roots
    cache.check()


@pytest.mark.parametrize("num_arrived", [1, 2, 3])
@pytest.mark.parametrize("is_split", [True, False])
def test_pages_that_had_arrived_stay_when_the_others_are_dropped(num_arrived: int, is_split: bool) -> None:
    cache, allocator = cache_of(8)
    first = fill(cache, allocator, A)
    pending = pending_over(cache, allocator, A + B + C + D, 3)
    pages = pending.pages
    if is_split:
        assert cache.match(A + B + D).pending is not None
        assert len(pending.nodes) == 2
    assert cache.drop_pending(pending, num_arrived) == pages[num_arrived:]
    allocator.free(pages[num_arrived:], Owner.GRANT)
    assert cache.match(A + B + C + D).pages == first + pages[:num_arrived]
    assert cache.match(A + B + C + D).pending is None
    assert cache.num_evictable_pages == 1 + num_arrived
    cache.check()
    assert cache.clear() == 1 + num_arrived
    assert allocator.num_free == 8


def test_both_parts_of_a_split_pending_node_stay_pending() -> None:
    cache, allocator = cache_of(8)
    pending = pending_over(cache, allocator, A + B + C, 3)
    match = cache.match(A + B + D)
    assert match.num_tokens == 0
    assert match.pending is not None
    assert match.pending.pages == [0, 1]  # exactly the common pages
    assert [node.pages for node in pending.nodes] == [[0, 1], [2]]
    assert all(node.pending is pending for node in pending.nodes)
    cache.check()
    assert cache.make_ready(pending) is pending.node
    assert cache.match(A + B + D).pages == [0, 1]
    assert cache.match(A + B + C).pages == [0, 1, 2]
    cache.check()


def test_an_insert_stops_before_a_pending_node() -> None:
    cache, allocator = cache_of(16)
    fill(cache, allocator, A)
    pending_over(cache, allocator, A + B + C, 2)
    for tokens in (A + B + C, A + B + D, A + B + C + D):
        pages = take(allocator, len(tokens) // 4)
        inserted = cache.insert(tokens, pages)
        assert (inserted.first_adopted, inserted.num_adopted) == (len(pages), 0)
        assert inserted.node.key == pack(A)
        allocator.free(pages, Owner.REQUEST)
    pages = take(allocator, 2)
    assert cache.insert(A + D, pages).first_adopted == 1  # D is not pending
    cache.check()


def test_a_pending_node_needs_a_ready_prefix() -> None:
    cache, allocator = cache_of(8)
    pending_over(cache, allocator, A + B, 2)
    with pytest.raises(AssertionError, match="pending already"):
        pending_over(cache, allocator, A + B + C, 1)
    with pytest.raises(AssertionError, match="not in the tree"):
        pending_over(cache, allocator, C + D, 1)


def test_a_watch_follows_inserts_evictions_and_splits() -> None:
    cache, allocator = cache_of(8)
    watch = cache.watch([*A, *B, *C, 9])
    assert watch.num_tokens == 0
    fill(cache, allocator, A + B + D)
    assert watch.num_tokens == 8  # the node was split where the tokens differ
    fill(cache, allocator, A + B + C)
    assert watch.num_tokens == 12
    cache.evict(2)  # D, which is older, and C
    assert watch.num_tokens == 8
    cache.evict(1)  # the end of a node
    assert watch.num_tokens == 4
    fill(cache, allocator, A + B)
    assert watch.num_tokens == 8
    cache.check()
    cache.clear()
    assert watch.num_tokens == 0
    cache.unwatch(watch)
    assert not cache._roots


def test_a_watch_sees_pending_pages_once_they_are_ready() -> None:
    cache, allocator = cache_of(8)
    fill(cache, allocator, A)
    watch = cache.watch(A + B + C)
    pending = pending_over(cache, allocator, A + B, 1)
    assert watch.num_tokens == 4
    cache.make_ready(pending)
    assert watch.num_tokens == 8
    cache.unwatch(watch)
    fill(cache, allocator, A + B + C)
    assert watch.num_tokens == 8  # the watch has been removed
    cache.check()


def test_a_watch_of_one_salt_sees_nothing_of_another() -> None:
    cache, allocator = cache_of(8)
    red = cache.watch(A + B, "red")
    fill(cache, allocator, A + B, "blue")
    assert red.num_tokens == 0
    fill(cache, allocator, A, "red")
    assert red.num_tokens == 4


def test_a_watch_on_a_disabled_cache_sees_nothing() -> None:
    cache = RadixCache(PageAllocator(8), 4, is_enabled=False)
    watch = cache.watch(A)
    assert (watch.num_tokens, watch.node) == (0, None)
    cache.unwatch(watch)
