"""The prefix cache: whole pages, cut nodes, locks, least recently used first, pending pages, salts."""

import numpy as np
import pytest

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import Pending, RadixCache, pack


def cache_of(num_pages: int, page_size: int = 4) -> tuple[RadixCache, PageAllocator]:
    books = PageAllocator(num_pages)
    return RadixCache(books, page_size), books


def take(books: PageAllocator, count: int, owner: Owner = Owner.REQUEST) -> list[int]:
    pages = books.alloc(count, owner)
    assert pages is not None
    return pages


def fill(cache: RadixCache, books: PageAllocator, tokens: list[int], salt: str = "") -> list[int]:
    """Insert tokens with fresh pages; free those that the tree did not want; returns the pages."""
    pages = take(books, len(tokens) // cache.page_size)
    first = cache.insert(tokens, pages, salt).first_adopted
    books.free(pages[:first], Owner.REQUEST)
    cache.check()
    books.check()
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
    cache, books = cache_of(8)
    pages = fill(cache, books, A + B)
    assert cache.match([*A, *B, 9, 9]).pages == pages
    assert cache.match([*A, *B[:3]]).pages == pages[:1]
    assert cache.match(A[:3]).num_tokens == 0
    assert cache.match([]).pages == []
    cache.check()


def test_a_match_takes_packed_tokens_as_well() -> None:
    cache, books = cache_of(8)
    pages = fill(cache, books, A + B)
    assert cache.match(pack([*A, *B, 7])).pages == pages


def test_a_node_is_cut_where_tokens_leave_it_at_a_page() -> None:
    cache, books = cache_of(8)
    pages = fill(cache, books, A + B + C)
    match = cache.match([*A, *B, *C[:2], 9, 9])  # two tokens of the third page agree: that is not a page
    assert (match.pages, match.num_tokens) == (pages[:2], 8)
    assert [len(node.pages) for node in cache.nodes()] == [2, 1]
    cache.check()


def test_what_the_tree_lacks_is_adopted_and_what_it_has_stays_with_the_caller() -> None:
    cache, books = cache_of(8)
    fill(cache, books, A + B)
    pages = take(books, 3)
    inserted = cache.insert(A + C + D, pages)
    assert (inserted.first_adopted, inserted.num_adopted) == (1, 2)
    assert inserted.node.pages == pages[1:]
    assert (books.count(Owner.RADIX), books.count(Owner.REQUEST)) == (4, 1)
    books.free(pages[:1], Owner.REQUEST)
    again = cache.insert(A + C + D, take(books, 3))
    assert (again.first_adopted, again.num_adopted) == (3, 0)
    assert again.node is inserted.node
    cache.check()


def test_an_insert_without_whole_pages_is_our_own_bug() -> None:
    cache, books = cache_of(8)
    with pytest.raises(AssertionError, match="whole pages"):
        cache.insert([1, 2, 3], take(books, 1))


def test_locks_survive_the_cutting_of_their_node() -> None:
    cache, books = cache_of(8)
    fill(cache, books, A + B + C)
    held = cache.match(A + B + C).node
    cache.lock(held)
    fill(cache, books, A + B + D)  # cuts the node after two pages
    assert (cache.num_pages, cache.num_evictable_pages) == (4, 1)
    assert cache.evict(8) == 1
    assert cache.match(A + B + C).node is held
    cache.unlock(held)
    assert cache.num_evictable_pages == 3
    cache.check()
    assert cache.clear() == 3


def test_two_locks_need_two_unlocks_and_no_more() -> None:
    cache, books = cache_of(8)
    fill(cache, books, A + B)
    node = cache.match(A + B).node
    cache.lock(node)
    cache.lock(node)
    cache.unlock(node)
    assert cache.evict(8) == 0
    cache.unlock(node)
    with pytest.raises(AssertionError, match="not locked"):
        cache.unlock(node)


def test_the_least_recently_used_leaf_goes_first_and_no_more_than_asked() -> None:
    cache, books = cache_of(16)
    old = fill(cache, books, A + B + C)
    fill(cache, books, B + C + D)
    young = fill(cache, books, C + D + A)
    cache.match(A + B + C)  # used again: B C D is the oldest now
    assert cache.evict(4) == 4
    assert cache.match(B + C + D).num_tokens == 0
    assert cache.match(C + D + A).pages == young[:2]  # its last page went
    assert cache.match(A + B + C).pages == old
    cache.check()


def test_a_parent_can_go_once_its_last_child_went() -> None:
    cache, books = cache_of(16)
    fill(cache, books, A + B)
    fill(cache, books, A + C)
    fill(cache, books, A + D)
    assert cache.evict(3) == 3
    assert [node.key for node in cache.nodes()] == [pack(A)]
    assert cache.evict(1) == 1
    assert books.num_free == 16
    cache.check()


def test_salts_share_nothing_and_their_roots_vanish_when_empty() -> None:
    cache, books = cache_of(16)
    fill(cache, books, A + B, "one")
    theirs = fill(cache, books, A + B, "two")
    assert cache.match(A + B).pages == []
    assert cache.match(A + B, "two").pages == theirs
    assert cache.evict(2) == 2
    assert cache.match(A + B, "one").pages == []
    cache.match(A, "three")
    assert list(cache._roots) == ["two"]
    cache.clear()
    assert not cache._roots


def test_a_lock_on_an_empty_root_holds_nothing_and_does_no_harm() -> None:
    cache, books = cache_of(4)
    root = cache.match(A, "new").node
    cache.lock(root)
    fill(cache, books, A, "new")
    cache.unlock(root)
    assert cache.clear() == 1
    cache.check()


def test_a_disabled_cache_keeps_nothing() -> None:
    books = PageAllocator(4)
    cache = RadixCache(books, 4, is_enabled=False)
    inserted = cache.insert(A + B, take(books, 2))
    assert (inserted.first_adopted, inserted.num_adopted) == (2, 0)
    assert cache.match(A + B).num_tokens == 0
    assert books.count(Owner.REQUEST) == 2
    cache.check()


def test_a_deep_tree_needs_no_recursion() -> None:
    cache, books = cache_of(3000, page_size=1)
    pages: list[int] = []
    for depth in range(1, 3001):
        pages += take(books, 1)
        cache.insert(list(range(depth)), pages)
    node = cache.match(list(range(3000))).node
    assert len(node.path()) == 3000
    cache.lock(node)
    cache.unlock(node)
    cache.check()
    assert cache.clear() == 3000
    cache.check()


def pending_over(cache: RadixCache, books: PageAllocator, tokens: list[int], count: int) -> Pending:
    return cache.insert_pending(tokens, take(books, count, Owner.GRANT))


def test_pending_pages_are_found_but_neither_used_nor_evicted() -> None:
    cache, books = cache_of(8)
    pages = fill(cache, books, A)
    pending = pending_over(cache, books, A + B + C, 2)
    match = cache.match(A + B + C)
    assert (match.pages, match.pending) == (pages, pending.node)
    assert (cache.num_pages, cache.num_evictable_pages) == (1, 0)  # what the transfer builds on is kept for it
    assert cache.evict(8) == 0
    with pytest.raises(AssertionError, match="pending node cannot be used"):
        cache.lock(pending.node)
    cache.check()


def test_ready_pages_pass_to_the_tree() -> None:
    cache, books = cache_of(8)
    first = fill(cache, books, A)
    pending = pending_over(cache, books, A + B + C, 2)
    node = cache.make_ready(pending)
    assert cache.match(A + B + C).pages == first + node.pages
    assert (cache.num_pages, cache.num_evictable_pages, books.count(Owner.GRANT)) == (3, 3, 0)
    cache.check()
    with pytest.raises(AssertionError, match="before"):
        cache.make_ready(pending)


def test_dropped_pages_are_the_callers_again() -> None:
    cache, books = cache_of(8)
    pending = pending_over(cache, books, B + C, 2)
    cut = cache.match(B + D)
    assert cut.pending is not None
    assert len(pending.nodes) == 2
    assert cache.drop_pending(pending) == [0, 1]
    assert books.count(Owner.GRANT) == 2
    assert not cache._roots
    cache.check()


def test_a_pending_node_cut_by_a_match_stays_pending_in_both_halves() -> None:
    cache, books = cache_of(8)
    pending = pending_over(cache, books, A + B + C, 3)
    match = cache.match(A + B + D)
    assert match.num_tokens == 0
    assert match.pending is not None
    assert match.pending.pages == [0, 1]  # exactly what the two have in common
    assert [node.pages for node in pending.nodes] == [[0, 1], [2]]
    assert all(node.is_pending for node in pending.nodes)
    cache.check()
    assert cache.make_ready(pending) is pending.node
    assert cache.match(A + B + D).pages == [0, 1]
    assert cache.match(A + B + C).pages == [0, 1, 2]
    cache.check()


def test_an_insert_stops_before_what_is_pending() -> None:
    cache, books = cache_of(16)
    fill(cache, books, A)
    pending_over(cache, books, A + B + C, 2)
    for tokens in (A + B + C, A + B + D, A + B + C + D):
        pages = take(books, len(tokens) // 4)
        inserted = cache.insert(tokens, pages)
        assert (inserted.first_adopted, inserted.num_adopted) == (len(pages), 0)
        assert inserted.node.key == pack(A)
        books.free(pages, Owner.REQUEST)
    pages = take(books, 2)
    assert cache.insert(A + D, pages).first_adopted == 1  # another way
    cache.check()


def test_nothing_is_announced_upon_what_is_pending_or_missing() -> None:
    cache, books = cache_of(8)
    pending_over(cache, books, A + B, 2)
    with pytest.raises(AssertionError, match="pending already"):
        pending_over(cache, books, A + B + C, 1)
    with pytest.raises(AssertionError, match="not in the tree"):
        pending_over(cache, books, C + D, 1)


def test_pending_pages_may_become_more_and_are_found_as_one_prefix() -> None:
    cache, books = cache_of(8)
    first = fill(cache, books, A)
    pending = pending_over(cache, books, A + B, 1)
    cache.match(A + B + D)
    cache.extend_pending(pending, A + B + C + D, take(books, 2, Owner.GRANT))
    cache.check()
    match = cache.match(A + B + C + D)
    assert (match.pages, match.pending) == (first, pending.node)
    assert pending.pages == [1, 2, 3]
    watch = cache.watch(A + B + C + D)
    cache.make_ready(pending)
    assert watch.num_tokens == 16
    assert cache.match(A + B + C + D).pages == [0, 1, 2, 3]
    cache.check()


def test_more_pending_pages_go_on_below_a_cut_and_are_dropped_with_the_rest() -> None:
    cache, books = cache_of(8)
    pending = pending_over(cache, books, A + B, 2)
    cache.match(A + D)  # cuts it
    cache.extend_pending(pending, A + B + C, take(books, 1, Owner.GRANT))
    assert [node.pages for node in pending.nodes] == [[0], [1, 2]]
    cache.check()
    assert cache.drop_pending(pending) == [0, 1, 2]
    assert not cache._roots
    with pytest.raises(AssertionError, match="before"):
        cache.extend_pending(pending, A + B + C + D, [3])


def test_more_pages_than_tokens_are_not_announced() -> None:
    cache, books = cache_of(8)
    pending = pending_over(cache, books, A, 1)
    with pytest.raises(AssertionError, match="other tokens than pages"):
        cache.extend_pending(pending, A + B, take(books, 2, Owner.GRANT))


def test_a_watch_follows_what_is_inserted_evicted_and_cut() -> None:
    cache, books = cache_of(8)
    watch = cache.watch([*A, *B, *C, 9])
    assert watch.num_tokens == 0
    fill(cache, books, A + B + D)
    assert watch.num_tokens == 8  # the node was cut where the two part
    fill(cache, books, A + B + C)
    assert watch.num_tokens == 12
    cache.evict(2)  # D, which is older, and C
    assert watch.num_tokens == 8
    cache.evict(1)  # the end of a node
    assert watch.num_tokens == 4
    fill(cache, books, A + B)
    assert watch.num_tokens == 8
    cache.check()
    cache.clear()
    assert watch.num_tokens == 0
    cache.unwatch(watch)
    assert not cache._roots


def test_a_watch_sees_pending_pages_once_they_are_ready() -> None:
    cache, books = cache_of(8)
    fill(cache, books, A)
    watch = cache.watch(A + B + C)
    pending = pending_over(cache, books, A + B, 1)
    assert watch.num_tokens == 4
    cache.make_ready(pending)
    assert watch.num_tokens == 8
    cache.unwatch(watch)
    fill(cache, books, A + B + C)
    assert watch.num_tokens == 8  # nobody tells it any more
    cache.check()


def test_a_watch_of_one_salt_sees_nothing_of_another() -> None:
    cache, books = cache_of(8)
    red = cache.watch(A + B, "red")
    fill(cache, books, A + B, "blue")
    assert red.num_tokens == 0
    fill(cache, books, A, "red")
    assert red.num_tokens == 4


def test_with_the_cache_off_a_watch_sees_nothing() -> None:
    cache = RadixCache(PageAllocator(8), 4, is_enabled=False)
    watch = cache.watch(A)
    assert (watch.num_tokens, watch.node) == (0, None)
    cache.unwatch(watch)
